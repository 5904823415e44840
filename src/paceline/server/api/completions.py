"""/v1/completions: objects and chunks as OpenAI documents them; several prompts share one answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from itertools import accumulate
from typing import Any

from paceline.server.api.generation import Generation, Piece, prompt_logprobs, usage
from paceline.server.api.protocol import CompletionRequest
from paceline.server.process import messages as m


def completion(
    generations: list[Generation], answers: list[list[m.Answer]], request: CompletionRequest, model: str
) -> dict[str, Any]:
    """Choices of the first prompt come first, n of each."""
    choices = []
    for at, (generation, each) in enumerate(zip(generations, answers, strict=True)):
        for answer in each:
            choice = {
                "index": at * generation.params.n + answer.index,
                "text": _echoed(generation, request) + generation.text_of(answer),
                "logprobs": _logprobs(generation, answer.logprobs, echoed=request.echo),
                "finish_reason": answer.finish_reason,
                "stop_reason": answer.stop_reason,
                "prompt_logprobs": prompt_logprobs(generation, request),
            }
            if request.return_token_ids:
                choice["token_ids"] = answer.tokens
            choices.append(choice)
    return {**_base(generations[0], model), "choices": choices, "usage": usage(generations)}


async def chunks(
    generations: list[Generation], request: CompletionRequest, model: str
) -> AsyncIterator[dict[str, Any]]:
    base = _base(generations[0], model)
    if request.includes_usage:
        base["usage"] = None
    if request.echo:
        for at, generation in enumerate(generations):
            for answer in range(generation.params.n):
                index = at * generation.params.n + answer
                text = _echoed(generation, request)
                yield {**base, "choices": [{"index": index, "text": text, "logprobs": None, "finish_reason": None}]}
    async for at, piece in _merged(generations):
        yield {**base, "choices": [_chunk_choice(generations[at], at, piece, request)]}
    if request.includes_usage:
        yield {**base, "choices": [], "usage": usage(generations)}


async def _merged(generations: list[Generation]) -> AsyncIterator[tuple[int, Piece]]:
    """Pieces of several prompts, as they arrive."""
    if len(generations) == 1:
        while (piece := await generations[0].piece()) is not None:
            yield 0, piece
        return
    arrived: asyncio.Queue[tuple[int, Piece | BaseException | None]] = asyncio.Queue()

    async def read(at: int, generation: Generation) -> None:
        try:
            while (piece := await generation.piece()) is not None:
                arrived.put_nowait((at, piece))
            arrived.put_nowait((at, None))
        except Exception as problem:
            arrived.put_nowait((at, problem))

    readers = [asyncio.create_task(read(at, generation)) for at, generation in enumerate(generations)]
    try:
        left = len(readers)
        while left:
            at, found = await arrived.get()
            if isinstance(found, BaseException):
                raise found
            if found is None:
                left -= 1
            else:
                yield at, found
    finally:
        for reader in readers:
            reader.cancel()


def _chunk_choice(generation: Generation, at: int, piece: Piece, request: CompletionRequest) -> dict[str, Any]:
    choice: dict[str, Any] = {
        "index": at * generation.params.n + piece.index,
        "text": piece.text,
        "logprobs": _logprobs(generation, piece.logprobs),
        "finish_reason": piece.finish_reason,
    }
    if request.return_token_ids:
        choice |= piece.details()
    return choice


def _base(generation: Generation, model: str) -> dict[str, Any]:
    return {
        "id": generation.stream.request_id,
        "object": "text_completion",
        "created": int(time.time()),
        "model": model,
    }


def _echoed(generation: Generation, request: CompletionRequest) -> str:
    return generation.tokenizer.decode(generation.prompt) if request.echo else ""


def _logprobs(
    generation: Generation, entries: list[list[m.LoggedToken]] | None, *, echoed: bool = False
) -> dict[str, Any] | None:
    """`echoed`: the prompt's tokens come first, and its first one has no log-probability."""
    if entries is None:
        return None
    text_of, count = generation.tokenizer.token_text, generation.params.logprobs or 0
    ended, texts, first = generation.ended, [], []
    if echoed and ended is not None and ended.prompt_logprobs is not None:
        entries, texts, first = [*ended.prompt_logprobs, *entries], [text_of(generation.prompt[0])], [None]
    texts += [text_of(entry[0].token) for entry in entries]
    top = [
        {text_of(each.token): each.logprob for each in sorted(entry, key=lambda one: one.rank)[: count or 1]}
        for entry in entries
    ]
    return {
        "tokens": texts,
        "token_logprobs": [*first, *(entry[0].logprob for entry in entries)],
        "top_logprobs": [*first, *top],
        "text_offset": list(accumulate(map(len, texts[:-1]), initial=0)) if texts else [],
    }
