"""/v1/chat/completions: objects and chunks as OpenAI documents them."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

from paceline.server.api.generation import Generation, Piece, prompt_logprobs, usage
from paceline.server.api.protocol import ChatRequest
from paceline.server.api.tool_calls import ToolParser
from paceline.server.process import messages as m


def completion(generation: Generation, answers: list[m.Answer], request: ChatRequest, model: str) -> dict[str, Any]:
    return {
        "id": generation.stream.request_id,
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model,
        "choices": [_choice(generation, answer, request) for answer in answers],
        "prompt_logprobs": prompt_logprobs(generation, request),
        "usage": usage([generation]),
    }


def _choice(generation: Generation, answer: m.Answer, request: ChatRequest) -> dict[str, Any]:
    text, calls = generation.text_of(answer), []
    if request.offered_tools:
        parser = ToolParser()
        text = parser.push(text)[0] + parser.finish()[0]
        calls = parser.calls[: request.most_calls]
    message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
    if calls:
        message |= {"content": text or None, "tool_calls": [call.as_dict() for call in calls]}
    choice = {
        "index": answer.index,
        "message": message,
        "logprobs": _logprobs(generation, answer.logprobs),
        "finish_reason": _reason(answer.finish_reason, bool(calls), request),
        "stop_reason": answer.stop_reason,
    }
    if request.return_token_ids:
        choice["token_ids"] = answer.tokens
    return choice


async def chunks(generation: Generation, request: ChatRequest, model: str) -> AsyncIterator[dict[str, Any]]:
    base = {
        "id": generation.stream.request_id,
        "object": "chat.completion.chunk",
        "created": int(time.time()),
        "model": model,
    }
    if request.includes_usage:
        base["usage"] = None
    for index in range(generation.params.n):
        delta: dict[str, Any] = {"role": "assistant", "content": ""}
        yield {**base, "choices": [{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}]}
    parsers = [ToolParser() for _ in range(generation.params.n)] if request.offered_tools else []
    while (piece := await generation.piece()) is not None:
        delta = (
            _parsed(piece, parsers[piece.index], request) if parsers else {"content": piece.text} if piece.text else {}
        )
        reason = _reason(piece.finish_reason, bool(parsers and parsers[piece.index].calls), request)
        yield {**base, "choices": [_chunk_choice(generation, piece, request, delta, reason)]}
    if request.includes_usage:
        yield {**base, "choices": [], "usage": usage([generation])}


def _parsed(piece: Piece, parser: ToolParser, request: ChatRequest) -> dict[str, Any]:
    """A delta with the text that is no call, and the calls that are complete."""
    begun = len(parser.calls)
    text, calls = parser.push(piece.text)
    if piece.finish_reason is not None:
        rest, more = parser.finish()
        text, calls = text + rest, [*calls, *more]
    if request.most_calls is not None:
        calls = calls[: max(request.most_calls - begun, 0)]
    delta: dict[str, Any] = {"content": text} if text else {}
    if calls:
        delta["tool_calls"] = [call.as_dict(begun + at) for at, call in enumerate(calls)]
    return delta


def _reason(reason: str | None, called: bool, request: ChatRequest) -> str | None:
    """As OpenAI has it, also where the request names the function: such an answer has just stopped."""
    return "tool_calls" if called and reason == "stop" and not request.names_function else reason


def _chunk_choice(
    generation: Generation, piece: Piece, request: ChatRequest, delta: dict[str, Any], reason: str | None
) -> dict[str, Any]:
    choice: dict[str, Any] = {
        "index": piece.index,
        "delta": delta,
        "logprobs": _logprobs(generation, piece.logprobs),
        "finish_reason": reason,
    }
    if request.return_token_ids:
        choice |= piece.details()
    return choice


def _logprobs(generation: Generation, entries: list[list[m.LoggedToken]] | None) -> dict[str, Any] | None:
    if entries is None:
        return None
    return {"content": [_entry(generation, entry) for entry in entries], "refusal": None}


def _entry(generation: Generation, entry: list[m.LoggedToken]) -> dict[str, Any]:
    chosen, count = entry[0], generation.params.logprobs or 0
    likeliest = sorted(entry, key=lambda each: each.rank)[:count]
    return {**_token(generation, chosen), "top_logprobs": [_token(generation, each) for each in likeliest]}


def _token(generation: Generation, logged: m.LoggedToken) -> dict[str, Any]:
    text = generation.tokenizer.token_text(logged.token)
    return {"token": text, "logprob": logged.logprob, "bytes": list(text.encode())}
