"""What one step does (`Batch`), and what came of it for each sequence (`StepOutput`)."""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.sequence import Sequence


@dataclass
class Row:
    """One sequence's share of a step: `count` of its tokens from `first` on, then a draft of at most `budget` nodes."""

    sequence: Sequence
    first: int
    count: int
    method: str
    budget: int

    @property
    def samples(self) -> bool:
        """The row computes the sequence's last token, so the pass yields a next one."""
        return self.first + self.count == len(self.sequence.tokens)


@dataclass
class Batch:
    rows: list[Row] = field(default_factory=list)
    num_tokens: int = 0  # of the target pass at most: a draft may turn out smaller than its budget
    num_drafted: int = 0  # the budgets in it

    def add(self, row: Row) -> None:
        self.rows.append(row)
        self._count(row, 1)

    def remove(self, sequence: Sequence) -> None:
        for row in [row for row in self.rows if row.sequence is sequence]:
            self.rows.remove(row)
            self._count(row, -1)

    def _count(self, row: Row, sign: int) -> None:
        self.num_tokens += sign * (row.count + row.budget)
        self.num_drafted += sign * row.budget


@dataclass(frozen=True)
class StepOutput:
    sequence: Sequence
    tokens: list[int]  # committed in this step, after stops were applied
    text: str  # what became visible; a possible beginning of a stop string is held back
    kinds: list[int]  # per token, draft.Kind: drafted, recovered or bonus
    finished: bool
    method: str = "none"  # who drafted
    drafted: int = 0  # nodes of the draft
    accepted: int = 0  # drafted tokens the target agreed with, also those a stop cut off
