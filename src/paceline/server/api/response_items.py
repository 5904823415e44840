"""The answers of /v1/responses: items of thought, text and calls, whole or as typed events in OpenAI's order."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

from paceline.outputs import RequestOutput, StreamChunk
from paceline.server.api.answer_parts import AnswerParser, AnswerParts, whole_parts
from paceline.server.api.chat import token_logprobs
from paceline.server.api.generation import Generation, usage
from paceline.server.api.protocol import ChatRequest
from paceline.server.api.responses import ResponseRequest
from paceline.server.api.tool_calls import ParsedCall

Json = dict[str, Any]
Event = tuple[str, Json]
PREFIXES = {"reasoning": "rs", "message": "msg", "function_call": "fc"}
PARTS = {"reasoning": "reasoning_text", "message": "output_text"}  # type of an item's one part


class OutputItems:
    """The items of one response as they come. Each method yields the events that it causes."""

    def __init__(self, response_id: str) -> None:
        self._id = response_id.partition("-")[2]
        self.items: list[Json] = []
        self._kind = ""  # of the item that goes on
        self._text, self._blank = "", ""  # of that item; white space that may come before a call
        self._logprobs: list[Json] = []

    def push(self, parts: AnswerParts, logprobs: list[Json]) -> Iterator[Event]:
        if parts.thought:
            yield from self._extend("reasoning", parts.thought, [])
        if parts.text:
            yield from self._extend_message(parts.text, logprobs)
        for call in parts.calls:
            self._blank = ""
            yield from self.close("completed")
            yield from self._call(call)

    def finish(self, status: str) -> Iterator[Event]:
        if not self._kind and (self._blank or not any(item["type"] != "reasoning" for item in self.items)):
            yield from self._extend("message", self._blank, [])
        yield from self.close(status)

    def close(self, status: str) -> Iterator[Event]:
        """End the item that goes on."""
        if not self._kind:
            return
        part, item = self._part(), self._item(status)
        fields = {"text": self._text} | ({"logprobs": self._logprobs} if self._kind == "message" else {})
        yield f"{PARTS[self._kind]}.done", {**self._place(), **fields}
        yield "content_part.done", {**self._place(), "part": part}
        yield "output_item.done", {"output_index": len(self.items), "item": item}
        self.items.append(item)
        self._kind, self._text, self._logprobs = "", "", []

    def _extend_message(self, text: str, logprobs: list[Json]) -> Iterator[Event]:
        if self._kind != "message" and not (self._blank + text).strip():
            self._blank += text
            return
        text, self._blank = self._blank + text, ""
        yield from self._extend("message", text, logprobs)

    def _extend(self, kind: str, text: str, logprobs: list[Json]) -> Iterator[Event]:
        if self._kind != kind:
            yield from self.close("completed")
            self._kind = kind
            yield "output_item.added", {"output_index": len(self.items), "item": self._item("in_progress", content=[])}
            yield "content_part.added", {**self._place(), "part": self._part()}
        self._text += text
        self._logprobs += logprobs
        if text:
            fields = {"delta": text} | ({"logprobs": logprobs} if kind == "message" else {})
            yield f"{PARTS[kind]}.delta", {**self._place(), **fields}

    def _call(self, call: ParsedCall) -> Iterator[Event]:
        item = {"id": self._new_id("function_call"), "type": "function_call", "status": "completed"}
        item |= {"call_id": call.id, "name": call.name, "arguments": call.arguments}
        at = {"item_id": item["id"], "output_index": len(self.items)}
        begun = item | {"status": "in_progress", "arguments": ""}
        yield "output_item.added", {"output_index": at["output_index"], "item": begun}
        yield "function_call_arguments.delta", {**at, "delta": call.arguments}
        yield "function_call_arguments.done", {**at, "name": call.name, "arguments": call.arguments}
        yield "output_item.done", {"output_index": at["output_index"], "item": item}
        self.items.append(item)

    def _new_id(self, kind: str) -> str:
        return f"{PREFIXES[kind]}-{self._id}-{len(self.items)}"

    def _place(self) -> Json:
        return {"item_id": self._new_id(self._kind), "output_index": len(self.items), "content_index": 0}

    def _part(self) -> Json:
        part = {"type": PARTS[self._kind], "text": self._text}
        return part if self._kind == "reasoning" else part | {"annotations": [], "logprobs": self._logprobs}

    def _item(self, status: str, **fields: Any) -> Json:
        item: Json = {"id": self._new_id(self._kind), "type": self._kind, "status": status, "content": [self._part()]}
        own: Json = {"summary": []} if self._kind == "reasoning" else {"role": "assistant"}
        return item | own | fields


def response(
    generation: Generation, output: RequestOutput, asked: ResponseRequest, chat: ChatRequest, model: str
) -> Json:
    (answer,) = output.outputs
    items, status = OutputItems(generation.request_id), _status(answer.finish_reason)
    logprobs = token_logprobs(generation, answer.token_ids, answer.logprobs)
    for _ in items.push(whole_parts(generation, answer, chat), logprobs):
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
        for event in items.push(parser.push(chunk), _logprobs(generation, chunk)):
            yield numbered(*event)
    status = _status(reason)
    for event in items.finish(status):
        yield numbered(*event)
    yield numbered(status, {"response": _response(generation, asked, model, items.items, status)})


def _logprobs(generation: Generation, chunk: StreamChunk) -> list[Json]:
    return token_logprobs(generation, chunk.token_ids, chunk.logprobs)


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
