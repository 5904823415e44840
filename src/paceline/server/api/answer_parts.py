"""The parts of a chat answer: its thought, its text and its tool calls, as they stream or as a whole."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from paceline.outputs import CompletionOutput, StreamChunk
from paceline.server.api.generation import Generation
from paceline.server.api.protocol import ChatRequest
from paceline.server.api.tool_calls import ParsedCall, ToolParser
from paceline.text.thoughts import ThoughtReader


class AnswerParts(NamedTuple):
    thought: str
    text: str
    calls: list[ParsedCall]  # complete ones


class AnswerParser:
    """One answer: a chunk of it is read into its parts. A call is no text, nor is what may become one."""

    def __init__(self, generation: Generation, request: ChatRequest) -> None:
        thought = generation.thought
        self._generation, self._max_calls = generation, request.max_calls
        self._thoughts = None if thought is None else ThoughtReader(thought)
        self._counter = None if thought is None else ThoughtReader(thought)  # of tokens; stop strings delay text
        self._tools = ToolParser() if request.offered_tools else None
        self.num_calls = 0

    def push(self, chunk: StreamChunk) -> AnswerParts:
        is_last = chunk.finish_reason is not None
        thought, text, calls = "", chunk.text, list[ParsedCall]()
        if self._thoughts is not None:
            thought, text = self._thoughts.push(text)
            if is_last:
                rest = self._thoughts.finish()
                thought, text = thought + rest[0], text + rest[1]
        if self._counter is not None:
            self._generation.num_thought_tokens += self._counter.count(chunk.token_texts)
        if self._tools is not None:
            text, calls = self._tools.push(text)
            if is_last:
                last, more = self._tools.finish()
                text, calls = text + last, [*calls, *more]
        if self._max_calls is not None:
            calls = calls[: max(self._max_calls - self.num_calls, 0)]
        self.num_calls += len(calls)
        return AnswerParts(thought, text, calls)


BlockKind = Literal["thought", "text"]


@dataclass(frozen=True, slots=True)
class BlockChange:
    """A change of an answer's blocks: one begins, grows or ends, or a call is added, which is a block of its own."""

    change: Literal["begin", "grow", "end", "call"]
    index: int  # number of the block
    kind: BlockKind = "text"
    text: str = ""  # at the end: the whole block's
    call: ParsedCall | None = None


class AnswerBlocks:
    """The parts of an answer as a sequence of blocks: thought, text, calls. White space before a call is no text."""

    def __init__(self) -> None:
        self._kind: BlockKind | None = None  # of the block that goes on
        self._text, self._blank = "", ""  # of that block; white space that a call may follow
        self._index, self._has_content = 0, False

    def push(self, parts: AnswerParts) -> Iterator[BlockChange]:
        if parts.thought:
            yield from self._grow("thought", parts.thought)
        text = self._blank + parts.text
        if self._kind == "text" or text.strip():
            self._blank = ""
            yield from self._grow("text", text)
        else:
            self._blank = text
        for call in parts.calls:
            self._blank, self._has_content = "", True
            yield from self._end()
            yield BlockChange("call", self._index, call=call)
            self._index += 1

    def finish(self) -> Iterator[BlockChange]:
        """End the answer, which has a text, even if it is empty, or a call."""
        if not self._has_content or (self._blank and self._kind is None):
            yield from self._grow("text", self._blank)
        yield from self._end()

    def _grow(self, kind: BlockKind, text: str) -> Iterator[BlockChange]:
        if self._kind != kind:
            yield from self._end()
            self._kind, self._has_content = kind, self._has_content or kind == "text"
            yield BlockChange("begin", self._index, kind)
        self._text += text
        if text:
            yield BlockChange("grow", self._index, kind, text)

    def _end(self) -> Iterator[BlockChange]:
        if self._kind is not None:
            kind, text = self._kind, self._text
            self._kind, self._text = None, ""
            yield BlockChange("end", self._index, kind, text)
            self._index += 1


def whole_parts(generation: Generation, answer: CompletionOutput, request: ChatRequest) -> AnswerParts:
    """Return the parts of an answer that was not streamed."""
    if generation.thought is None:
        chunk = StreamChunk(answer.index, answer.text, answer.token_ids, answer.finish_reason or "stop")
    else:
        chunk = generation.reader.whole_chunk(answer)
    return AnswerParser(generation, request).push(chunk)
