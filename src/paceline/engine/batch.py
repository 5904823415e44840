"""What one step does (`Batch`), and what came of it for each sequence (`StepOutput`)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from paceline.outputs import SpeculationStats
from paceline.sequence import Sequence

Tables = np.ndarray[Any, np.dtype[np.int32]]  # (sequences, blocks) ids
Ints = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(slots=True)
class Row:
    """One sequence's share of a step: `count` of its tokens from `first` on, then a draft of at most `budget` nodes."""

    sequence: Sequence
    first: int
    count: int
    samples: bool  # it computes the sequence's last token, so the pass yields a next one
    method: str
    budget: int


@dataclass(slots=True, eq=False)
class Company:
    """Sequences that decode plainly together, step after step: what stays the same until one joins or leaves."""

    sequences: list[Sequence]
    stats: list[SpeculationStats]
    max_len: Ints
    seats: Ints
    width: int  # of their block tables
    sampled: bool  # somebody is not greedy

    @staticmethod
    def of(sequences: list[Sequence]) -> Company:
        return Company(
            sequences,
            [sequence.stats for sequence in sequences],
            np.array([sequence.max_len for sequence in sequences], np.int64),
            np.array([sequence.seat for sequence in sequences], np.int64),
            max(len(sequence.blocks) for sequence in sequences),
            any(sequence.sampled for sequence in sequences),
        )

    def part(self, going: list[int]) -> Company:
        """Those that are left."""
        sequences = [self.sequences[index] for index in going]
        return Company(
            sequences,
            [self.stats[index] for index in going],
            self.max_len[going],
            self.seats[going],
            self.width,
            self.sampled and any(not sequence.params.greedy for sequence in sequences),
        )


@dataclass(slots=True)
class Stage:
    """One step of a company."""

    company: Company
    first: Ints  # by sequence, as in its row
    room: int  # from there to where the first of them must end
    changes: int  # the scheduler's count of who joined or left by then
    spare: list[Row] | None = None  # of the step before, which is over: they serve the next one


@dataclass
class Batch:
    rows: list[Row] = field(default_factory=list)
    num_tokens: int = 0  # of the target pass at most: a draft may turn out smaller than its budget
    num_drafted: int = 0  # the budgets in it
    tables: Tables = field(default_factory=lambda: np.empty((0, 0), np.int32))  # by row, -1 beyond a sequence's end
    stage: Stage | None = None  # where nothing but the positions is new

    @property
    def first(self) -> Ints:
        """By row."""
        return np.array([row.first for row in self.rows], np.int64) if self.stage is None else self.stage.first

    @property
    def only_decodes(self) -> bool:
        """Every row computes one token, its draft aside."""
        return self.num_tokens - self.num_drafted == len(self.rows)

    def add(self, row: Row) -> None:
        self.rows.append(row)
        self.num_tokens += row.count + row.budget
        self.num_drafted += row.budget

    def remove(self, sequence: Sequence) -> None:
        for row in [row for row in self.rows if row.sequence is sequence]:
            self.rows.remove(row)
            self.num_tokens -= row.count + row.budget
            self.num_drafted -= row.budget


@dataclass(slots=True)
class StepOutput:
    sequence: Sequence
    tokens: list[int]  # committed in this step, after stops were applied
    text: str  # what became visible; a possible beginning of a stop string is held back
    kinds: list[int]  # per token, draft.Kind: drafted, recovered or bonus
    finished: bool
    method: str = "none"  # who drafted
    drafted: int = 0  # nodes of the draft
    accepted: int = 0  # drafted tokens the target agreed with, also those a stop cut off
    depth: int = 0  # of the draft's deepest node
