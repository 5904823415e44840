"""What is noted of every answer: when which tokens were committed. Everything a cell says is worked out from these."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from paceline.bench.grid import Contender
from paceline.outputs import SpeculationStats


@dataclass(frozen=True)
class Answer:
    tokens: tuple[int, ...]
    commits: tuple[tuple[float, int], ...]  # (seconds since the group was handed in, tokens committed then)
    stats: SpeculationStats = field(default_factory=SpeculationStats)

    @property
    def first_s(self) -> float:
        return self.commits[0][0]

    @property
    def last_s(self) -> float:
        return self.commits[-1][0]

    def gaps(self) -> Iterator[float]:
        """The wait for every token after the first commit; tokens committed together share it equally."""
        before = self.first_s
        for moment, count in self.commits[1:]:
            yield from [(moment - before) / count] * count
            before = moment


@dataclass(frozen=True)
class Run:
    """One engine's answers to one group at one turn."""

    answers: tuple[Answer, ...]
    outside_s: float | None = None  # of the time, outside the models; None where the device keeps that to itself

    @property
    def seconds(self) -> float:
        """Until the last token of the last answer."""
        return max(answer.last_s for answer in self.answers)

    @property
    def tokens(self) -> int:
        return sum(len(answer.tokens) for answer in self.answers)

    def decoding(self) -> tuple[float, int]:
        """Seconds and tokens after every request has its first token."""
        start = max(answer.first_s for answer in self.answers)
        after = sum(count for answer in self.answers for moment, count in answer.commits if moment > start)
        return self.seconds - start, after


@dataclass(frozen=True)
class Row:
    """One group at one turn, answered by every engine within the same moments."""

    group: int  # the pair it belongs to: all turns of a group are one
    workload: str | None  # None: mixed
    concurrency: int
    runs: dict[Contender, Run]


@dataclass
class Measurement:
    """Grows as the run goes on; what is in it was measured whole, whenever the run ends."""

    contenders: list[Contender]
    rows: list[Row] = field(default_factory=list)
    left_out: dict[int, int] = field(default_factory=dict)  # concurrency -> prompts that filled no group
    comparable: bool = True  # whether all engines are to say the same: greedy, or seeded
    complete: bool = False
