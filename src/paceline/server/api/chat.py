"""/v1/chat/completions: objects and chunks in OpenAI's form."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from paceline.outputs import CompletionOutput, Logprob, RequestOutput, StreamChunk
from paceline.server.api.answer_parts import AnswerParser, whole_parts
from paceline.server.api.generation import Generation, details, header, prompt_logprobs, usage, usage_so_far
from paceline.server.api.protocol import ChatRequest


def completion(generation: Generation, output: RequestOutput, request: ChatRequest, model: str) -> dict[str, Any]:
    return {
        **header(generation, "chat.completion", model),
        "choices": [_choice(generation, answer, request) for answer in output.outputs],
        "prompt_logprobs": prompt_logprobs(generation, request),
        "usage": usage([generation]),
    }


def _choice(generation: Generation, answer: CompletionOutput, request: ChatRequest) -> dict[str, Any]:
    thought, text, calls = whole_parts(generation, answer, request)
    message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
    if thought:
        message["reasoning_content"] = thought
    if calls:
        message |= {"content": text or None, "tool_calls": [call.as_dict() for call in calls]}
    choice = {
        "index": answer.index,
        "message": message,
        "logprobs": _logprobs(generation, answer),
        "finish_reason": _reason(answer.finish_reason, bool(calls), request),
        "stop_reason": answer.stop_reason,
    }
    if request.return_token_ids:
        choice["token_ids"] = answer.token_ids
    return choice


async def chunks(generation: Generation, request: ChatRequest, model: str) -> AsyncIterator[dict[str, Any]]:
    base = header(generation, "chat.completion.chunk", model)
    if request.includes_usage:
        base["usage"] = None
    for index in range(generation.params.n):
        delta: dict[str, Any] = {"role": "assistant", "content": ""}
        yield {**base, "choices": [{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}]}
    parsers = [AnswerParser(generation, request) for _ in range(generation.params.n)]
    while (chunk := await generation.chunk()) is not None:
        delta = parse_chunk(chunk, parsers[chunk.index])
        if request.counts_each_chunk:
            base["usage"] = usage_so_far([generation])
        reason = _reason(chunk.finish_reason, parsers[chunk.index].num_calls > 0, request)
        yield {**base, "choices": [_chunk_choice(generation, chunk, request, delta, reason)]}
    if request.includes_usage:
        yield {**base, "choices": [], "usage": usage([generation])}


def parse_chunk(chunk: StreamChunk, parser: AnswerParser) -> dict[str, Any]:
    """Return a delta with thought, text that is no call, and calls that are complete."""
    begun = parser.num_calls
    thought, text, calls = parser.push(chunk)
    delta: dict[str, Any] = {"reasoning_content": thought} if thought else {}
    if text:
        delta["content"] = text
    if calls:
        delta["tool_calls"] = [call.as_dict(begun + at) for at, call in enumerate(calls)]
    return delta


def _reason(reason: str | None, called: bool, request: ChatRequest) -> str | None:
    """Return OpenAI's finish reason; an answer to a request that names its function has stopped."""
    return "tool_calls" if called and reason == "stop" and not request.names_function else reason


def _chunk_choice(
    generation: Generation, chunk: StreamChunk, request: ChatRequest, delta: dict[str, Any], reason: str | None
) -> dict[str, Any]:
    choice: dict[str, Any] = {
        "index": chunk.index,
        "delta": delta,
        "logprobs": _logprobs(generation, chunk),
        "finish_reason": reason,
    }
    if request.return_token_ids:
        choice |= details(chunk)
    return choice


def _logprobs(generation: Generation, piece: CompletionOutput | StreamChunk) -> dict[str, Any] | None:
    return None if piece.logprobs is None else {"content": token_logprobs(generation, piece), "refusal": None}


def token_logprobs(generation: Generation, piece: CompletionOutput | StreamChunk) -> list[dict[str, Any]]:
    """Return an entry for each token, but none for the end token, which has no text; none at all where
    log-probabilities were not asked for."""
    tokens, entries = piece.token_ids, piece.logprobs or []
    ends = bool(entries) and piece.finish_reason == "stop" and generation.params.skip_special_tokens
    if ends and not generation.tokenizer.decode(tokens[-1:]):
        tokens, entries = tokens[:-1], entries[:-1]
    count, content = generation.params.logprobs or 0, []
    for token, entry in zip(tokens, entries, strict=bool(entries)):
        likeliest = sorted(entry.values(), key=lambda each: each.rank)[:count]
        content.append({**_token(entry[token]), "top_logprobs": [_token(each) for each in likeliest]})
    return content


def _token(logprob: Logprob) -> dict[str, Any]:
    text = logprob.decoded_token
    return {"token": text, "logprob": logprob.logprob, "bytes": list(text.encode())}
