"""The answers of /v1/responses: items of thought, text and calls, whole or as typed events in OpenAI's order."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

from paceline.outputs import RequestOutput
from paceline.server.api.answer_parts import AnswerBlocks, AnswerParser, AnswerParts, BlockChange, whole_parts
from paceline.server.api.chat import token_logprobs
from paceline.server.api.generation import Generation, usage
from paceline.server.api.protocol import ChatRequest
from paceline.server.api.responses import ResponseRequest
from paceline.server.api.tool_calls import ParsedCall

Json = dict[str, Any]
Event = tuple[str, Json]
TYPES = {"thought": ("rs", "reasoning", "reasoning_text"), "text": ("msg", "message", "output_text")}


class OutputItems:
    """The items of one response as they come. Each method yields the events that it causes."""

    def __init__(self, response_id: str) -> None:
        self._id = response_id.partition("-")[2]
        self._blocks = AnswerBlocks()
        self._logprobs: list[Json] = []  # of the text that goes on
        self.items: list[Json] = []

    def push(self, parts: AnswerParts, logprobs: list[Json]) -> Iterator[Event]:
        for change in self._blocks.push(parts):
            yield from self._events(change, logprobs)

    def finish(self, status: str) -> Iterator[Event]:
        for change in self._blocks.finish():
            yield from self._events(change, [], status)

    def _events(self, change: BlockChange, logprobs: list[Json], status: str = "completed") -> Iterator[Event]:
        if change.call is not None:
            yield from self._call(change.index, change.call)
            return
        prefix, kind, part_kind = TYPES[change.kind]
        at = {"item_id": f"{prefix}-{self._id}-{change.index}", "output_index": change.index, "content_index": 0}
        is_text = change.kind == "text"
        of_item: Json = {"role": "assistant"} if is_text else {"summary": []}
        of_part: Json = {"annotations": [], "logprobs": []} if is_text else {}
        item: Json = {"id": at["item_id"], "type": kind, **of_item}
        part: Json = {"type": part_kind, "text": "", **of_part}
        match change.change:
            case "begin":
                added = item | {"status": "in_progress", "content": []}
                yield "output_item.added", {"output_index": change.index, "item": added}
                yield "content_part.added", {**at, "part": part}
            case "grow":
                self._logprobs += logprobs
                yield f"{part_kind}.delta", {**at, "delta": change.text} | ({"logprobs": logprobs} if is_text else {})
            case "end":
                part["text"] = change.text
                if is_text:
                    part["logprobs"], self._logprobs = self._logprobs, []
                fields: Json = {name: part[name] for name in ("text", "logprobs") if name in part}
                item |= {"status": status, "content": [part]}
                yield f"{part_kind}.done", {**at, **fields}
                yield "content_part.done", {**at, "part": part}
                yield "output_item.done", {"output_index": change.index, "item": item}
                self.items.append(item)

    def _call(self, index: int, call: ParsedCall) -> Iterator[Event]:
        item = {"id": f"fc-{self._id}-{index}", "type": "function_call", "status": "completed"}
        item |= {"call_id": call.id, "name": call.name, "arguments": call.arguments}
        at = {"item_id": item["id"], "output_index": index}
        begun = item | {"status": "in_progress", "arguments": ""}
        yield "output_item.added", {"output_index": index, "item": begun}
        yield "function_call_arguments.delta", {**at, "delta": call.arguments}
        yield "function_call_arguments.done", {**at, "name": call.name, "arguments": call.arguments}
        yield "output_item.done", {"output_index": index, "item": item}
        self.items.append(item)


def response(
    generation: Generation, output: RequestOutput, asked: ResponseRequest, chat: ChatRequest, model: str
) -> Json:
    (answer,) = output.outputs
    items, status = OutputItems(generation.request_id), _status(answer.finish_reason)
    for _ in items.push(whole_parts(generation, answer, chat), token_logprobs(generation, answer)):
        pass
    for _ in items.finish(status):
        pass
    return _response(generation, asked, model, items.items, status)


async def events(generation: Generation, asked: ResponseRequest, chat: ChatRequest, model: str) -> AsyncIterator[Json]:
    number = 0

    def numbered(kind: str, fields: Json) -> Json:
        nonlocal number
        number += 1
        return {"type": f"response.{kind}", "sequence_number": number - 1, **fields}

    begun = _response(generation, asked, model, [], "in_progress")
    for kind in ("created", "in_progress"):
        yield numbered(kind, {"response": begun})
    items, parser, reason = OutputItems(generation.request_id), AnswerParser(generation, chat), "stop"
    while (chunk := await generation.chunk()) is not None:
        reason = chunk.finish_reason or reason
        for event in items.push(parser.push(chunk), token_logprobs(generation, chunk)):
            yield numbered(*event)
    status = _status(reason)
    for event in items.finish(status):
        yield numbered(*event)
    yield numbered(status, {"response": _response(generation, asked, model, items.items, status)})


def _response(generation: Generation, asked: ResponseRequest, model: str, items: list[Json], status: str) -> Json:
    params, reasoning = generation.params, asked.reasoning or {}
    return {
        "id": generation.request_id,
        "object": "response",
        "created_at": int(time.time()),
        "status": status,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "instructions": asked.instructions,
        "max_output_tokens": asked.max_output_tokens,
        "model": model,
        "output": items,
        "parallel_tool_calls": asked.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": {"effort": reasoning.get("effort"), "summary": None},
        "store": False,
        "temperature": params.temperature,
        "text": {"format": (asked.text or {}).get("format") or {"type": "text"}},
        "tool_choice": asked.tool_choice or "auto",
        "tools": asked.tools or [],
        "top_logprobs": asked.top_logprobs or 0,
        "top_p": params.top_p,
        "truncation": "disabled",
        "usage": None if generation.output is None else _usage(generation),
        "metadata": asked.metadata or {},
    }


def _usage(generation: Generation) -> Json:
    counts = usage([generation])
    return {
        "input_tokens": counts["prompt_tokens"],
        "input_tokens_details": counts["prompt_tokens_details"],
        "output_tokens": counts["completion_tokens"],
        "output_tokens_details": counts["completion_tokens_details"],
        "total_tokens": counts["total_tokens"],
        "speculation": counts["speculation"],
    }


def _status(reason: str | None) -> str:
    return "incomplete" if reason == "length" else "completed"
