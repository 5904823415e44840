"""The parts of a chat answer: its thought, its text and its tool calls, as they stream or as a whole."""

from __future__ import annotations

from typing import NamedTuple

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


def whole_parts(generation: Generation, answer: CompletionOutput, request: ChatRequest) -> AnswerParts:
    """Return the parts of an answer that was not streamed."""
    if generation.thought is None:
        chunk = StreamChunk(answer.index, answer.text, answer.token_ids, answer.finish_reason or "stop")
    else:
        chunk = generation.reader.whole_chunk(answer)
    return AnswerParser(generation, request).push(chunk)
