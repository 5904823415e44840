"""/v1/completions: objects and chunks in OpenAI's form; several prompts share one answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from itertools import accumulate
from typing import Any

from paceline.outputs import Logprob, RequestOutput, StreamChunk
from paceline.server.api.generation import Generation, details, header, prompt_logprobs, usage, usage_so_far
from paceline.server.api.protocol import CompletionRequest


def completion(
    generations: list[Generation], outputs: list[RequestOutput], request: CompletionRequest, model: str
) -> dict[str, Any]:
    """Return the choices of all prompts, n of each, in the order of the prompts."""
    choices = []
    for at, (generation, output) in enumerate(zip(generations, outputs, strict=True)):
        for answer in output.outputs:
            choice = {
                "index": at * generation.params.n + answer.index,
                "text": _echoed(generation, request) + answer.text,
                "logprobs": _logprobs(generation, answer.token_ids, answer.logprobs, echoed=request.echo),
                "finish_reason": answer.finish_reason,
                "stop_reason": answer.stop_reason,
                "prompt_logprobs": prompt_logprobs(generation, request),
            }
            if request.return_token_ids:
                choice["token_ids"] = answer.token_ids
            choices.append(choice)
    return {**header(generations[0], "text_completion", model), "choices": choices, "usage": usage(generations)}


async def chunks(
    generations: list[Generation], request: CompletionRequest, model: str
) -> AsyncIterator[dict[str, Any]]:
    base = header(generations[0], "text_completion", model)
    if request.includes_usage:
        base["usage"] = None
    if request.echo:
        for at, generation in enumerate(generations):
            for answer in range(generation.params.n):
                index = at * generation.params.n + answer
                text = _echoed(generation, request)
                yield {**base, "choices": [{"index": index, "text": text, "logprobs": None, "finish_reason": None}]}
    async for at, chunk in _merged(generations):
        if request.counts_each_chunk:
            base["usage"] = usage_so_far(generations)
        yield {**base, "choices": [_chunk_choice(generations[at], at, chunk, request)]}
    if request.includes_usage:
        yield {**base, "choices": [], "usage": usage(generations)}


async def _merged(generations: list[Generation]) -> AsyncIterator[tuple[int, StreamChunk]]:
    """Yield chunks of several prompts as they arrive, each with the number of its prompt."""
    if len(generations) == 1:
        while (chunk := await generations[0].chunk()) is not None:
            yield 0, chunk
        return
    arrived: asyncio.Queue[tuple[int, StreamChunk | BaseException | None]] = asyncio.Queue()

    async def read(at: int, generation: Generation) -> None:
        try:
            while (chunk := await generation.chunk()) is not None:
                arrived.put_nowait((at, chunk))
            arrived.put_nowait((at, None))
        except Exception as problem:
            arrived.put_nowait((at, problem))

    readers = [asyncio.create_task(read(at, generation)) for at, generation in enumerate(generations)]
    try:
        left = len(readers)
        while left:
            at, item = await arrived.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                left -= 1
            else:
                yield at, item
    finally:
        for reader in readers:
            reader.cancel()


def _chunk_choice(generation: Generation, at: int, chunk: StreamChunk, request: CompletionRequest) -> dict[str, Any]:
    choice: dict[str, Any] = {
        "index": at * generation.params.n + chunk.index,
        "text": chunk.text,
        "logprobs": _logprobs(generation, chunk.token_ids, chunk.logprobs),
        "finish_reason": chunk.finish_reason,
    }
    if request.return_token_ids:
        choice |= details(chunk)
    return choice


def _echoed(generation: Generation, request: CompletionRequest) -> str:
    return generation.tokenizer.decode(generation.prompt) if request.echo else ""


def _logprobs(
    generation: Generation, tokens: list[int], entries: list[dict[int, Logprob]] | None, *, echoed: bool = False
) -> dict[str, Any] | None:
    """Return the log-probabilities of an answer. `echoed`: the prompt's come first, and its first token has none."""
    if entries is None:
        return None
    output, texts, first = generation.output, [], []
    if echoed and output is not None and output.prompt_logprobs is not None:
        of_prompt = [entry for entry in output.prompt_logprobs if entry is not None]
        texts, first = [generation.tokenizer.token_text(generation.prompt[0])], [None]
        tokens, entries = [*generation.prompt[1:], *tokens], [*of_prompt, *entries]
    chosen = [entry[token] for token, entry in zip(tokens, entries, strict=True)]
    count = generation.params.logprobs or 1
    top = [
        {each.decoded_token: each.logprob for each in sorted(entry.values(), key=lambda one: one.rank)[:count]}
        for entry in entries
    ]
    texts += [each.decoded_token for each in chosen]
    return {
        "tokens": texts,
        "token_logprobs": [*first, *(each.logprob for each in chosen)],
        "top_logprobs": [*first, *top],
        "text_offset": list(accumulate(map(len, texts[:-1]), initial=0)) if texts else [],
    }
