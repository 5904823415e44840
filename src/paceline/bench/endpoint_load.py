"""Load on a server: a group of requests at once, timed together and held against the server's counters."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field

from paceline.bench import endpoint_metrics as metrics
from paceline.bench.endpoint_client import Client, Messages, Sampling, served_model
from paceline.bench.endpoint_http import Address, Switch, Wire
from paceline.bench.endpoint_metrics import Counters
from paceline.bench.endpoint_tokens import Answer

WARM_UP: Messages = (
    {
        "role": "user",
        "content": "Describe, as you would to a visitor, the street on which the town's old bakery stands.",
    },
)
WARM_UP_TOKENS = 24


@dataclass(frozen=True)
class Run:
    """One server's answers to one group at one turn."""

    answers: tuple[Answer, ...]
    counted: Counters | None  # what its counters grew by meanwhile

    @property
    def tokens(self) -> int:
        return sum(answer.tokens for answer in self.answers)

    @property
    def seconds(self) -> float:
        """From the first request to the end of the last answer."""
        return max(one.sent + one.request_s for one in self.answers) - min(one.sent for one in self.answers)

    def decoding(self) -> tuple[float, int]:
        """Seconds and tokens after every request has its first token."""
        moments = [(one.sent + at, count) for one in self.answers for at, count in one.commits]
        start = max((one.sent + one.commits[0][0] for one in self.answers if one.commits), default=0.0)
        after = [(moment, count) for moment, count in moments if moment > start]
        return max((moment for moment, _ in after), default=start) - start, sum(count for _, count in after)


@dataclass
class Target:
    """A server that is measured. Its counters are followed from one group to the next."""

    client: Client
    owner: str | None = None
    counters: Counters | None = None
    wire: Wire = field(init=False)

    def __post_init__(self) -> None:
        self.wire = self.client.wire

    @property
    def server(self) -> str | None:
        """What it seems to be, by its counters or by who it says owns the model."""
        return (self.counters.server if self.counters else None) or self.owner

    def warm_up(self, pool: Executor, concurrency: int, temperature: float, counters: bool) -> None:
        sampling = Sampling(max_tokens=WARM_UP_TOKENS, temperature=temperature)
        self._ask(pool, [(WARM_UP, sampling)] * concurrency)
        self.counters = metrics.settled(self.wire) if counters else None

    def run(self, pool: Executor, requests: Sequence[tuple[Messages, Sampling]]) -> Run:
        before = self.counters
        answers = self._ask(pool, requests)
        if before is None:
            return Run(answers, None)
        tokens = sum(answer.tokens for answer in answers)
        self.counters = metrics.read_after(self.wire, before, tokens, len(answers))
        return Run(answers, self.counters.since(before))

    def _ask(self, pool: Executor, requests: Sequence[tuple[Messages, Sampling]]) -> tuple[Answer, ...]:
        """All at once. The first that fails speaks for all: the others are cut off."""
        futures = [pool.submit(self.client.ask, messages, sampling) for messages, sampling in requests]
        try:
            for future in concurrent.futures.as_completed(futures):
                future.result()
        except BaseException:
            self.wire.switch.cut()
            concurrent.futures.wait(futures)
            raise
        return tuple(future.result() for future in futures)


def open_target(
    url: str, option: str, *, model: str | None, api_key: str | None, timeout_s: float, sampling: Sampling
) -> Target:
    """Find out whether anybody is there, which model it serves and how it wants to be asked."""
    wire = Wire(address=Address.parse(url, option), timeout_s=timeout_s, api_key=api_key, switch=Switch())
    name, owner = served_model(wire, model)
    seed = sampling.seed if sampling.temperature > 0 else None
    first = Sampling(max_tokens=WARM_UP_TOKENS, temperature=sampling.temperature, seed=seed)
    return Target(Client(wire=wire, model=name).settled(WARM_UP, first), owner)
