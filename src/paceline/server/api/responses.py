"""/v1/responses: text in, text out, streamed as typed events. The server stores no response."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any, Literal

from paceline.errors import InvalidParameter
from paceline.outputs import RequestOutput
from paceline.sampling_params import SamplingParams
from paceline.server.api.generation import Generation, usage
from paceline.server.api.protocol import Items, Message, Sampling, plain_message


class ResponseRequest(Sampling):
    input: str | Items[Message]
    instructions: str | None = None
    max_output_tokens: int | None = None
    text: dict[str, Any] | None = None
    previous_response_id: str | None = None
    truncation: Literal["disabled", "auto"] | None = None
    parallel_tool_calls: bool | None = None
    background: bool | None = None

    def to_params(self) -> SamplingParams:
        if self.previous_response_id is not None:
            raise InvalidParameter("previous_response_id", "responses are not stored here; send the conversation")
        if self.background:
            raise InvalidParameter("background", "is not supported; leave it out")
        if self.truncation == "auto":
            raise InvalidParameter("truncation", "the conversation is never cut here; leave it out")
        for name, value in (self.text or {}).items():
            if name != "format":
                raise InvalidParameter(f"text.{name}", "is not supported here; leave it out")
            if value not in (None, {"type": "text"}):
                raise InvalidParameter("text.format", "is text on this route; use chat completions for JSON")
        return self.sampling_params(max_tokens=self.max_output_tokens)

    def conversation(self) -> list[dict[str, Any]]:
        system = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        if isinstance(self.input, str):
            return [*system, {"role": "user", "content": self.input}]
        return [*system, *map(plain_message, self.input)]


def response(generation: Generation, output: RequestOutput, request: ResponseRequest, model: str) -> dict[str, Any]:
    (answer,) = output.outputs
    return _response(generation, request, model, answer.text, answer.finish_reason)


async def events(generation: Generation, request: ResponseRequest, model: str) -> AsyncIterator[dict[str, Any]]:
    number = 0

    def event(kind: str, **fields: Any) -> dict[str, Any]:
        nonlocal number
        number += 1
        return {"type": f"response.{kind}", "sequence_number": number - 1, **fields}

    item, at = _item(generation, "", "in_progress"), {"item_id": "", "output_index": 0, "content_index": 0}
    at["item_id"] = item["id"]
    begun = _response(generation, request, model, None, None)
    yield event("created", response=begun)
    yield event("in_progress", response=begun)
    yield event("output_item.added", output_index=0, item=item | {"content": []})
    yield event("content_part.added", **at, part=_part(""))
    text, reason = "", "stop"
    while (chunk := await generation.chunk()) is not None:
        reason = chunk.finish_reason or reason
        text += chunk.text
        if chunk.text:
            yield event("output_text.delta", **at, delta=chunk.text, logprobs=[])
    yield event("output_text.done", **at, text=text, logprobs=[])
    yield event("content_part.done", **at, part=_part(text))
    yield event("output_item.done", output_index=0, item=_item(generation, text, _status(reason)))
    done = _response(generation, request, model, text, reason)
    yield event("completed" if done["status"] == "completed" else "incomplete", response=done)


def _response(
    generation: Generation, request: ResponseRequest, model: str, text: str | None, reason: str | None
) -> dict[str, Any]:
    """Return the response object. `text` None: the answer has just begun."""
    status = "in_progress" if reason is None else _status(reason)
    params = generation.params
    return {
        "id": generation.request_id,
        "object": "response",
        "created_at": int(time.time()),
        "status": status,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "model": model,
        "output": [] if text is None else [_item(generation, text, status)],
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "store": False,
        "temperature": params.temperature,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [],
        "top_p": params.top_p,
        "truncation": "disabled",
        "usage": None if generation.output is None else _usage(generation),
        "metadata": request.metadata or {},
    }


def _usage(generation: Generation) -> dict[str, Any]:
    counts = usage([generation])
    return {
        "input_tokens": counts["prompt_tokens"],
        "input_tokens_details": counts["prompt_tokens_details"],
        "output_tokens": counts["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": counts["total_tokens"],
        "speculation": counts["speculation"],
    }


def _status(reason: str) -> str:
    return "incomplete" if reason == "length" else "completed"


def _item(generation: Generation, text: str, status: str) -> dict[str, Any]:
    item_id = "msg-" + generation.request_id.partition("-")[2]
    return {"id": item_id, "type": "message", "status": status, "role": "assistant", "content": [_part(text)]}


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
