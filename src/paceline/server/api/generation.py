"""From events of the engine to text, usage and log-probabilities, as the OpenAI routes report them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from paceline.errors import EngineDied, InvalidParameter, InvalidPrompt, PacelineError, QueueFull, RequestFailed
from paceline.outputs import SpeculationStats
from paceline.sampling_params import SamplingParams
from paceline.server.api.protocol import Choices
from paceline.server.process import messages as m
from paceline.server.process.client import EngineClient, Stream
from paceline.text.stop_strings import TextDecoder
from paceline.text.tokenizer import Tokenizer

KINDS = ("drafted", "recovered", "bonus")  # names of draft.Kind, without importing torch


class TimeLimit(PacelineError):
    """A request ran longer than the server allows."""


_ERRORS: dict[str, type[PacelineError]] = {
    each.__name__: each for each in (EngineDied, InvalidPrompt, PacelineError, QueueFull, RequestFailed, TimeLimit)
}


@dataclass(slots=True)
class Piece:
    """New text of one answer."""

    index: int
    text: str
    token_texts: list[str]  # by token; a character of several tokens belongs to its last
    tokens: list[int]
    kinds: list[int]
    finish_reason: str | None
    logprobs: list[list[m.LoggedToken]] | None
    draft: tuple[str, int, int] | None  # of the step: method, nodes, depth

    def details(self) -> dict[str, Any]:
        """For requests with `return_token_ids`: what each token is, and what the step drafted."""
        draft = None if self.draft is None else dict(zip(("method", "nodes", "depth"), self.draft, strict=True))
        return {
            "token_ids": self.tokens,
            "token_kinds": [KINDS[kind] for kind in self.kinds],
            "token_texts": self.token_texts,
            "draft": draft,
        }


@dataclass
class Generation:
    """One prompt in the engine."""

    client: EngineClient
    tokenizer: Tokenizer
    prompt: list[int]
    params: SamplingParams
    stream: Stream
    limit: asyncio.TimerHandle
    on_end: Callable[[Generation], None]
    ended: m.Ended | None = None
    _decoders: dict[int, TextDecoder] = field(default_factory=dict)

    @classmethod
    async def start(
        cls,
        client: EngineClient,
        tokenizer: Tokenizer,
        prompt: list[int],
        params: SamplingParams,
        *,
        streamed: bool,
        request_id: str,
        limit_s: float,
        on_end: Callable[[Generation], None] = lambda generation: None,
    ) -> Generation:
        """Raises at once where the engine refuses a streamed request, so that the answer has the right status."""
        stream = client.submit(prompt, params, streamed=streamed, request_id=request_id)
        reason = f"the request was stopped after {limit_s:.0f} s, the server's limit"
        late = m.Failed(request_id, TimeLimit.__name__, reason, None)
        limit = asyncio.get_running_loop().call_later(limit_s, stream.put, late)  # one timer, not one for each event
        self = cls(client, tokenizer, prompt, params, stream, limit, on_end)
        if streamed:
            try:
                await self._next()
            except BaseException:
                self.cancel()
                raise
        return self

    async def piece(self) -> Piece | None:
        """What comes next; None: the answer is complete."""
        event = await self._next()
        if isinstance(event, m.Ended):
            self._end(event)
            return None
        assert isinstance(event, m.Delta)
        texts = self._decode(event)
        return Piece(
            event.index,
            event.text if self.params.stop else "".join(texts),
            texts,
            event.tokens,
            event.kinds,
            event.finish_reason,
            event.logprobs,
            event.draft,
        )

    async def answers(self) -> list[m.Answer]:
        """Of a request that is not streamed."""
        event = await self._next()
        assert isinstance(event, m.Ended)
        self._end(event)
        return event.answers

    def text_of(self, answer: m.Answer) -> str:
        if self.params.stop:
            return answer.text
        decoder = self.tokenizer.incremental_decoder(self.params.skip_special_tokens)
        return decoder.decode(answer.tokens)

    def cancel(self) -> None:
        self.limit.cancel()
        if self.ended is None:
            self.client.cancel(self.stream.request_id)

    def _end(self, event: m.Ended) -> None:
        self.ended = event
        self.limit.cancel()
        self.on_end(self)

    async def _next(self) -> m.Event:
        event = await self.stream.get()
        if isinstance(event, m.Failed):
            if event.field is not None:
                raise InvalidParameter(event.field, event.error.removeprefix(f"{event.field}: "))
            raise _ERRORS.get(event.kind, RequestFailed)(event.error)
        return event

    def _decode(self, delta: m.Delta) -> list[str]:
        """Text by token. Of requests with stop strings it is that of all tokens, the stop's included."""
        decoder = self._decoders.get(delta.index)
        if decoder is None:
            decoder = self.tokenizer.incremental_decoder(self.params.skip_special_tokens)
            self._decoders[delta.index] = decoder
        texts = [decoder.push(token) for token in delta.tokens]
        if texts and delta.finish_reason is not None:
            texts[-1] += decoder.flush()
        return texts


def prompt_logprobs(generation: Generation, request: Choices) -> list[dict[str, Any] | None] | None:
    """By prompt token, as vLLM has it: by token id the prompt's own and the most likely; None for the first."""
    ended = generation.ended
    if request.prompt_logprobs is None or ended is None or ended.prompt_logprobs is None:
        return None
    text_of, most = generation.tokenizer.token_text, request.prompt_logprobs
    of_tokens: list[dict[str, Any] | None] = [None]
    for own, *others in ended.prompt_logprobs:
        shown = [own, *sorted((each for each in others if each.rank <= most), key=lambda each: each.rank)]
        of_tokens.append(
            {
                str(each.token): {"logprob": each.logprob, "rank": each.rank, "decoded_token": text_of(each.token)}
                for each in shown
            }
        )
    return of_tokens


def usage(generations: list[Generation]) -> dict[str, Any]:
    """OpenAI's counts, and speculation's: drafted, accepted, τ and the time saved by the engine's own estimate."""
    ended = [each.ended for each in generations if each.ended is not None]
    prompt = sum(len(each.prompt) for each in generations)
    output = sum(len(answer.tokens) for each in ended for answer in each.answers)
    total, saved = SpeculationStats(), 0.0
    for each in ended:
        for answer in each.answers:
            total.merge(answer.stats)
        saved = max(saved, *(answer.stats.plain_s - answer.stats.spent_s for answer in each.answers))
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": sum(each.num_cached for each in ended)},
        "speculation": {
            "drafted": total.num_draft_tokens,
            "accepted": total.num_accepted_tokens,
            "mean_acceptance_length": total.mean_acceptance_length,
            "estimated_speedup": total.estimated_speedup,
            "estimated_time_saved_s": saved,
            "methods": total.drafts_by_method,
        },
    }
