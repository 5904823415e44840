"""/v1/messages: requests and answers in Anthropic's form, over chat."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

from pydantic import Field

from paceline.errors import InvalidParameter, short_repr
from paceline.outputs import RequestOutput
from paceline.server.api.answer_parts import AnswerBlocks, AnswerParser, BlockChange, whole_parts
from paceline.server.api.as_chat import as_chat
from paceline.server.api.generation import Generation, usage
from paceline.server.api.protocol import ChatRequest, Items, Sampling

Json = dict[str, Any]
# Names of chat's fields in this route, for errors.
NAMES = {
    r"tools\.(\d+)\.function\.parameters": r"tools.\1.input_schema",
    r"tools\.(\d+)\.function": r"tools.\1",
    "tool_choice.function": "tool_choice",
    "response_format": "output_config.format",
    "stop": "stop_sequences",
    "reasoning_effort": "thinking",
}
CHOICES = {"auto": "auto", "any": "required", "none": "none"}
THINKING = {"disabled": "none", "enabled": "medium", "adaptive": "medium"}  # the effort of each type


class MessagesRequest(Sampling):
    messages: Annotated[Items[Json], Field(min_length=1)]
    system: str | Items[Json] | None = None
    max_tokens: int | None = None
    stop_sequences: Items[str] | None = None
    tools: Items[Json] | None = None
    tool_choice: Json | None = None
    thinking: Json | None = None
    output_config: Json | None = None

    def chat(self) -> ChatRequest:
        choice = self.tool_choice or {}
        kind, one = choice.get("type"), choice.get("disable_parallel_tool_use")
        if kind == "tool":
            wanted: Any = {"type": "function", "function": {"name": choice.get("name")}}
        elif kind is None or kind in CHOICES:
            wanted = CHOICES.get(kind or "auto") if self.tools else None
        else:
            raise InvalidParameter("tool_choice.type", f"{short_repr(kind)} is not one of {', '.join(CHOICES)}, tool")
        return as_chat(
            self,
            messages=self._messages(),
            max_tokens=self.max_tokens,
            stop=self.stop_sequences,
            tools=[_tool(at, tool) for at, tool in enumerate(self.tools or ())] or None,
            tool_choice=wanted,
            parallel_tool_calls=False if one else None,
            response_format=self._format(),
            reasoning_effort=self._effort(),
        )

    def _format(self) -> Json | None:
        wanted = (self.output_config or {}).get("format")
        if wanted is None:
            return None
        if not isinstance(wanted, dict) or wanted.get("type") != "json_schema":
            raise InvalidParameter("output_config.format", "is not of type json_schema")
        return {"type": "json_schema", "json_schema": {"schema": wanted.get("schema")}}

    def _effort(self) -> str | None:
        kind = (self.thinking or {}).get("type")
        if kind is not None and kind not in THINKING:
            raise InvalidParameter("thinking.type", f"{short_repr(kind)} is not one of {', '.join(THINKING)}")
        return (
            THINKING["disabled"]
            if kind == "disabled"
            else (self.output_config or {}).get("effort") or (None if kind is None else THINKING[kind])
        )

    def _messages(self) -> list[Json]:
        messages: list[Json] = []
        if self.system:
            messages.append({"role": "system", "content": _text("system", self.system)})
        for at, message in enumerate(self.messages):
            role, content = message.get("role"), message.get("content")
            if role not in ("user", "assistant", "system"):
                raise InvalidParameter(f"messages.{at}.role", f"{short_repr(role)} is not user or assistant")
            blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
            if not isinstance(blocks, list) or not all(isinstance(block, dict) for block in blocks):
                raise InvalidParameter(f"messages.{at}.content", "is a text or a list of blocks")
            messages += _of_blocks(f"messages.{at}.content", str(role), blocks)
        return messages


def _of_blocks(field: str, role: str, blocks: list[Json]) -> list[Json]:
    """Return the chat messages of one message: results of tools come first, each as a message of its own."""
    results: list[Json] = []
    own: Json = {"role": role, "content": ""}
    texts, calls = [], []
    for at, block in enumerate(blocks):
        match block.get("type"):
            case "text":
                texts.append(_text(f"{field}.{at}", [block]))
            case "thinking":
                own["reasoning_content"] = str(block.get("thinking") or "")
            case "redacted_thinking":
                pass
            case "tool_use":
                function = {"name": block.get("name"), "arguments": json.dumps(block.get("input") or {})}
                calls.append({"id": block.get("id"), "type": "function", "function": function})
            case "tool_result":
                content = _text(f"{field}.{at}.content", block.get("content") or "")
                results.append({"role": "tool", "tool_call_id": str(block.get("tool_use_id")), "content": content})
            case kind:
                raise InvalidParameter(f"{field}.{at}", f"a block of type {short_repr(kind)} is not supported")
    own["content"] = "\n".join(texts)
    if calls:
        own["tool_calls"] = calls
    return [*results, own] if texts or calls or not results else results


def _text(field: str, content: Any) -> str:
    """Return a text, or the joined texts of blocks."""
    if isinstance(content, str):
        return content
    for block in content if isinstance(content, list) else [content]:
        if not isinstance(block, dict) or block.get("type") != "text" or not isinstance(block.get("text"), str):
            kind = block.get("type") if isinstance(block, dict) else block
            raise InvalidParameter(field, f"content of type {short_repr(kind)} is not supported; text is")
    return "\n".join(block["text"] for block in content)


def _tool(at: int, tool: Json) -> Json:
    if tool.get("type") not in (None, "custom"):
        raise InvalidParameter(f"tools.{at}", f"type {short_repr(tool['type'])} is not supported; custom is")
    function = {
        "name": tool.get("name"),
        "description": tool.get("description"),
        "parameters": tool.get("input_schema"),
    }
    return {"type": "function", "function": {name: value for name, value in function.items() if value is not None}}


def message(generation: Generation, output: RequestOutput, chat: ChatRequest, model: str) -> Json:
    (answer,) = output.outputs
    blocks, parts = AnswerBlocks(), whole_parts(generation, answer, chat)
    changes = [*blocks.push(parts), *blocks.finish()]
    content = [_block(change) for change in changes if change.change in ("end", "call")]
    return _message(generation, model) | {"content": content, **_ending(generation, bool(parts.calls))}


async def events(generation: Generation, chat: ChatRequest, model: str) -> AsyncIterator[Json]:
    yield {"type": "message_start", "message": _message(generation, model)}
    blocks, parser = AnswerBlocks(), AnswerParser(generation, chat)
    while (chunk := await generation.chunk()) is not None:
        for change in blocks.push(parser.push(chunk)):
            for event in _events(change):
                yield event
    for change in blocks.finish():
        for event in _events(change):
            yield event
    ending = _ending(generation, parser.num_calls > 0)
    counts = ending.pop("usage")
    yield {"type": "message_delta", "delta": ending, "usage": counts}
    yield {"type": "message_stop"}


def _message(generation: Generation, model: str) -> Json:
    """Return a message that has just begun."""
    counts = {"input_tokens": len(generation.prompt), "output_tokens": 0}
    begun = {"id": generation.request_id, "type": "message", "role": "assistant", "model": model, "content": []}
    return begun | {"stop_reason": None, "stop_sequence": None, "usage": counts}


def _ending(generation: Generation, called: bool) -> Json:
    output, counts = generation.output, usage([generation])
    assert output is not None
    (answer,) = output.outputs
    stopped = answer.stop_reason if isinstance(answer.stop_reason, str) else None
    reason = "max_tokens" if answer.finish_reason == "length" else "tool_use" if called else "end_turn"
    cached = counts["prompt_tokens_details"]["cached_tokens"]
    return {
        "stop_reason": "stop_sequence" if stopped is not None else reason,
        "stop_sequence": stopped,
        "usage": {
            "input_tokens": counts["prompt_tokens"] - cached,
            "cache_read_input_tokens": cached,
            "cache_creation_input_tokens": 0,
            "output_tokens": counts["completion_tokens"],
        },
    }


def _block(change: BlockChange) -> Json:
    if change.call is not None:
        return {"type": "tool_use", "id": change.call.id, "name": change.call.name, "input": change.call.values}
    if change.kind == "thought":
        return {"type": "thinking", "thinking": change.text, "signature": ""}
    return {"type": "text", "text": change.text}


def _events(change: BlockChange) -> list[Json]:
    """Return the events of a change of blocks."""
    at = {"index": change.index}
    begin, stop = {"type": "content_block_start", **at}, {"type": "content_block_stop", **at}
    delta = {"type": "content_block_delta", **at}
    match change.change:
        case "begin":
            return [begin | {"content_block": _block(change)}]
        case "grow":
            kind: Literal["thinking", "text"] = "thinking" if change.kind == "thought" else "text"
            return [delta | {"delta": {"type": f"{kind}_delta", kind: change.text}}]
        case "end":
            return [stop]
    whole = json.dumps(_block(change)["input"])
    of_call = {"type": "input_json_delta", "partial_json": whole}
    return [begin | {"content_block": _block(change) | {"input": {}}}, delta | {"delta": of_call}, stop]
