"""Results returned to the caller: vLLM's names and shapes, and speculation's own figures. No torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn, overload


@dataclass
class SpeculationStats:
    """Counts of drafting, in committed tokens: tokens cut off by a stop do not count as accepted."""

    num_drafts: int = 0  # steps that carried a draft
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_target_passes: int = 0  # passes that committed at least one token
    num_committed_tokens: int = 0
    drafted_per_position: list[int] = field(default_factory=list)  # drafts that reached depth 1, 2, ...
    accepted_per_position: list[int] = field(default_factory=list)  # drafts accepted to depth 1, 2, ...
    drafts_by_method: dict[str, int] = field(default_factory=dict)
    hits_by_method: dict[str, int] = field(default_factory=dict)  # drafts whose first token was accepted
    draft_tokens_by_method: dict[str, int] = field(default_factory=dict)
    accepted_by_method: dict[str, int] = field(default_factory=dict)
    spent_s: float = 0.0  # seconds of steps that only decoded
    plain_s: float = 0.0  # seconds of these tokens by plain decoding, as the engine estimates

    @property
    def acceptance_rate(self) -> float | None:
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else None

    @property
    def mean_acceptance_length(self) -> float | None:
        """Return τ: committed tokens per target pass; plain decoding has 1."""
        return self.num_committed_tokens / self.num_target_passes if self.num_target_passes else None

    @property
    def estimated_speedup(self) -> float | None:
        """Return the speed-up over a live estimate of plain decoding, never more than τ; None: nothing was measured."""
        if self.spent_s <= 0 or self.plain_s <= 0 or self.mean_acceptance_length is None:
            return None
        return min(self.plain_s / self.spent_s, self.mean_acceptance_length)

    @property
    def mean_draft_length(self) -> float | None:
        return self.num_draft_tokens / self.num_drafts if self.num_drafts else None

    def add_draft(self, nodes: int, depth: int, accepted: int, method: str) -> None:
        self.num_drafts += 1
        for counts, increment in (
            (self.drafts_by_method, 1),
            (self.hits_by_method, int(accepted > 0)),
            (self.draft_tokens_by_method, nodes),
            (self.accepted_by_method, accepted),
        ):
            counts[method] = counts.get(method, 0) + increment
        self.num_draft_tokens += nodes
        self.num_accepted_tokens += accepted
        drafted_at, accepted_at = self.drafted_per_position, self.accepted_per_position
        for per_position in (drafted_at, accepted_at):
            per_position.extend([0] * (depth - len(per_position)))
        for position in range(depth):
            drafted_at[position] += 1
        for position in range(accepted):
            accepted_at[position] += 1

    def merge(self, other: SpeculationStats) -> None:
        for name, value in vars(self).items():
            added = getattr(other, name)
            if isinstance(value, dict):  # counts by method
                for method, count in added.items():
                    value[method] = value.get(method, 0) + count
            elif isinstance(value, list):  # counts by position
                value.extend([0] * (len(added) - len(value)))
                for position, count in enumerate(added):
                    value[position] += count
            else:
                setattr(self, name, value + added)

    def as_dict(self) -> dict[str, Any]:
        return {
            "num_drafts": self.num_drafts,
            "num_draft_tokens": self.num_draft_tokens,
            "num_accepted_tokens": self.num_accepted_tokens,
            "acceptance_rate": self.acceptance_rate,
            "mean_acceptance_length": self.mean_acceptance_length,
            "drafted_per_position": list(self.drafted_per_position),
            "accepted_per_position": list(self.accepted_per_position),
        }


@dataclass(frozen=True)
class Logprob:
    """A log-probability under the raw distribution, before penalties, temperature and filters. `rank` starts at 1."""

    logprob: float
    rank: int
    decoded_token: str


class DecodedText:
    """A text that may be set as a function, which is called when the text is first read."""

    @overload
    def __get__(self, output: None, kind: type) -> NoReturn: ...

    @overload
    def __get__(self, output: object, kind: type) -> str: ...

    def __get__(self, output: object | None, kind: type) -> str:
        if output is None:
            raise AttributeError("a text belongs to an output")  # so that the field has no default
        text = output.__dict__["text"]
        if callable(text):
            text = output.__dict__["text"] = text()
        return str(text)

    def __set__(self, output: object, text: str | Callable[[], str]) -> None:
        output.__dict__["text"] = text


@dataclass
class CompletionOutput:
    """One answer. Its text is decoded when it is first read."""

    index: int  # number of the answer, below n
    text: DecodedText = DecodedText()
    token_ids: list[int]  # type: ignore[misc]
    finish_reason: str | None  # type: ignore[misc]  # "stop" or "length"
    stop_reason: int | str | None = None  # the stop token or string that ended it; None for EOS and length
    logprobs: list[dict[int, Logprob]] | None = None  # per token: the chosen one and the most likely
    speculation: SpeculationStats = field(default_factory=SpeculationStats)
    cumulative_logprob: float | None = None  # sum over `token_ids`; None: no `logprobs`

    def __getstate__(self) -> dict[str, Any]:
        """Return the fields for pickle and copy, with the text in place of its decoder."""
        _ = self.text
        return self.__dict__.copy()


@dataclass
class RequestMetrics:
    """Seconds on the monotonic clock."""

    arrival_time: float
    first_token_time: float | None = None
    finished_time: float | None = None

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time

    @property
    def decode_s(self) -> float | None:
        """Return the seconds from the first token to the last."""
        if self.first_token_time is None or self.finished_time is None:
            return None
        return self.finished_time - self.first_token_time


@dataclass
class RequestOutput:
    """A prompt and its answers."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache
    # For each prompt token, if `prompt_logprobs` asks for them: itself and the most likely; None for the first.
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None


@dataclass(frozen=True)
class StreamChunk:
    """A piece of one answer as it is committed; the last piece of each answer carries its finish_reason."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    output: RequestOutput | None = None  # on the last chunk of a stream: the whole answer
    kinds: list[int] = field(default_factory=list)  # TokenKind of each token: 0 is an accepted draft
    token_texts: list[str] = field(default_factory=list)  # text of each token, a stop string included
    logprobs: list[dict[int, Logprob]] | None = None  # one entry for each token, as in CompletionOutput
    draft: tuple[str, int, int] | None = None  # the step's method, nodes, depth
