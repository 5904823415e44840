"""One prompt in the engine, as the OpenAI routes see it: chunks or a whole output, usage and log-probabilities."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from paceline.client import AnswerReader
from paceline.engine.events import Accepted, Delta, Ended, Event, Failed, Request
from paceline.errors import PacelineError
from paceline.outputs import RequestOutput, SpeculationStats, StreamChunk
from paceline.sampling_params import SamplingParams
from paceline.server.api.protocol import Choices
from paceline.server.process.client import EngineClient, RequestInbox
from paceline.text.request_text import EncodedPrompt
from paceline.text.thoughts import Thought
from paceline.text.tokenizer import Tokenizer

KINDS = ("drafted", "recovered", "bonus")  # names of core.verdict.TokenKind, without importing torch


class TimeLimit(PacelineError):
    """A request ran longer than the server allows."""


@dataclass
class Generation:
    """One prompt in the engine."""

    client: EngineClient
    tokenizer: Tokenizer
    reader: AnswerReader
    inbox: RequestInbox
    limit: asyncio.TimerHandle
    on_end: Callable[[Generation], None]
    output: RequestOutput | None = None  # None: it is not complete
    thought: Thought | None = None  # None: the model's chat template knows none, or it is no chat
    num_thought_tokens: int = 0  # of the answers as far as they were read
    num_tokens: int = 0  # of the chunks that were read

    @classmethod
    async def start(
        cls,
        client: EngineClient,
        tokenizer: Tokenizer,
        prompt: EncodedPrompt,
        request: Request,
        *,
        limit_s: float,
        on_end: Callable[[Generation], None] = lambda generation: None,
        thought: Thought | None = None,
    ) -> Generation:
        """Submit a request. A streamed one raises here if the engine refuses it, so that its status can say so."""
        inbox = client.submit(request)
        reason = TimeLimit(f"the request was stopped after {limit_s:.0f} s, the server's limit")
        late = Failed(request.request_id, reason)
        limit = asyncio.get_running_loop().call_later(
            limit_s, inbox.put_nowait, late
        )  # one timer, not one for each event
        self = cls(
            client, tokenizer, AnswerReader(tokenizer, prompt, request.params), inbox, limit, on_end, thought=thought
        )
        if request.streamed:
            try:
                accepted = await self._next()
                assert isinstance(accepted, Accepted)
            except BaseException:
                self.cancel()
                raise
        return self

    @property
    def request_id(self) -> str:
        return self.inbox.request_id

    @property
    def params(self) -> SamplingParams:
        return self.reader.params

    @property
    def prompt(self) -> list[int]:
        return self.reader.prompt.tokens

    async def chunk(self) -> StreamChunk | None:
        """Return the next chunk of a streamed request; None once the answer is complete."""
        event = await self._next()
        if isinstance(event, Ended):
            self._end(event)
            return None
        assert isinstance(event, Delta)
        self.num_tokens += len(event.tokens)
        return self.reader.chunk(event)

    async def whole(self) -> RequestOutput:
        """Return the answers of a request that is not streamed."""
        event = await self._next()
        assert isinstance(event, Ended)
        return self._end(event)

    def cancel(self) -> None:
        self.limit.cancel()
        if self.output is None:
            self.client.cancel(self.request_id)

    def _end(self, event: Ended) -> RequestOutput:
        self.output = self.reader.output(event)
        self.limit.cancel()
        self.on_end(self)
        return self.output

    async def _next(self) -> Event:
        event = await self.inbox.get()
        if isinstance(event, Failed):
            raise event.error
        return event


def header(generation: Generation, kind: str, model: str) -> dict[str, Any]:
    """Return the fields that all objects of an answer begin with."""
    return {"id": generation.request_id, "object": kind, "created": int(time.time()), "model": model}


def details(chunk: StreamChunk) -> dict[str, Any]:
    """Return what `return_token_ids` asks for: the origin of each token, and the draft of the step."""
    draft = None if chunk.draft is None else dict(zip(("method", "nodes", "depth"), chunk.draft, strict=True))
    return {
        "token_ids": chunk.token_ids,
        "token_kinds": [KINDS[kind] for kind in chunk.kinds],
        "token_texts": chunk.token_texts,
        "draft": draft,
    }


def prompt_logprobs(generation: Generation, request: Choices) -> list[dict[str, Any] | None] | None:
    """Return an entry for each prompt token, as vLLM does: its own and the likeliest by id; None for the first."""
    output, limit = generation.output, request.prompt_logprobs
    if limit is None or output is None or output.prompt_logprobs is None:
        return None
    entries: list[dict[str, Any] | None] = []
    for token, entry in zip(generation.prompt, output.prompt_logprobs, strict=True):
        if entry is None:
            entries.append(None)
            continue
        others = sorted((each for each in entry if each != token), key=lambda each: entry[each].rank)
        listed = [token, *(each for each in others if entry[each].rank <= limit)]
        entries.append({str(each): asdict(entry[each]) for each in listed})
    return entries


def usage_so_far(generations: list[Generation]) -> dict[str, Any]:
    """Return OpenAI's counts of answers under way."""
    prompt, completion = sum(len(each.prompt) for each in generations), sum(each.num_tokens for each in generations)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def usage(generations: list[Generation]) -> dict[str, Any]:
    """Return OpenAI's counts, and speculation's: drafted, accepted, τ and the time saved as the engine estimates."""
    outputs = [each.output for each in generations if each.output is not None]
    answers = [answer for output in outputs for answer in output.outputs]
    prompt = sum(len(each.prompt) for each in generations)
    completion = sum(len(answer.token_ids) for answer in answers)
    total, saved = SpeculationStats(), 0.0
    for answer in answers:
        total.merge(answer.speculation)
        saved = max(saved, answer.speculation.plain_s - answer.speculation.spent_s)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(output.num_cached_tokens for output in outputs)},
        "completion_tokens_details": {"reasoning_tokens": sum(each.num_thought_tokens for each in generations)},
        "speculation": {
            "drafted": total.num_draft_tokens,
            "accepted": total.num_accepted_tokens,
            "mean_acceptance_length": total.mean_acceptance_length,
            "estimated_speedup": total.estimated_speedup,
            "estimated_time_saved_s": saved,
            "methods": total.drafts_by_method,
        },
    }
