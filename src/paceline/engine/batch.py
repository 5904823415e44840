"""What one step computes (`Batch`), and what it committed for each sequence (`StepOutputs`)."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from paceline.config import NONE
from paceline.sequence import Sequence

Tables = np.ndarray[Any, np.dtype[np.int32]]  # (sequences, blocks) ids
Ints = np.ndarray[Any, np.dtype[np.int64]]
Bools = np.ndarray[Any, np.dtype[np.bool_]]


@dataclass(slots=True)
class Row:
    """One sequence's share of a step: `count` of its tokens from `first` on, then a draft of at most `budget` nodes."""

    sequence: Sequence
    first: int
    count: int
    samples: bool  # it computes the sequence's last token, so the pass yields a next one
    method: str = NONE
    budget: int = 0
    behind: int = -1  # its token is that of this row of the unread verdict the batch follows; -1: the host knows it


class Batch:
    """The rows of one step: decodes, then prompt chunks. Columns are arrays, since layout works on all rows at once."""

    __slots__ = ("count", "first", "num_drafted", "num_tokens", "rows", "sampling", "tables")

    def __init__(self, rows: SequenceOf[Row] = (), tables: Tables | None = None) -> None:
        self.rows = list(rows)
        self.tables = np.empty((0, 0), np.int32) if tables is None else tables  # by row, -1 beyond a sequence's end
        self.first: Ints = np.array([row.first for row in self.rows], np.int64)
        self.count: Ints = np.array([row.count for row in self.rows], np.int64)
        self.num_drafted = sum([row.budget for row in self.rows])  # nodes, at the most
        self.num_tokens = int(self.count.sum()) + self.num_drafted  # of the target pass at the most
        self.sampling = [index for index, row in enumerate(self.rows) if row.samples]  # rows that yield a token

    @property
    def only_decodes(self) -> bool:
        """Every row computes its sequence's last token, and a draft."""
        return self.num_tokens - self.num_drafted == len(self.rows) == len(self.sampling)

    @property
    def sampled_sequences(self) -> list[Sequence]:
        return [self.rows[index].sequence for index in self.sampling]


class StepOutput(NamedTuple):
    sequence: Sequence
    tokens: list[int]  # committed in this step, after stops were applied
    text: str  # what became visible of a sequence with stop strings; others are decoded by the reader
    kinds: list[int]  # per token, draft.Kind: drafted, recovered or bonus
    finished: bool
    method: str = NONE  # that drafted
    drafted: int = 0  # nodes of the draft
    accepted: int = 0  # drafted tokens the target agreed with, also those a stop cut off
    depth: int = 0  # of the draft's deepest node


@dataclass(slots=True, eq=False)
class StepOutputs(SequenceOf[StepOutput]):
    """By sequence that committed something, or failed. Columns, since most readers look at ended sequences only."""

    sequences: list[Sequence] = field(default_factory=list)
    tokens: list[list[int]] = field(default_factory=list)
    kinds: list[list[int]] = field(default_factory=list)
    drafts: dict[int, tuple[str, int, int, int]] = field(
        default_factory=dict
    )  # index -> method, nodes, accepted, depth
    texts: dict[int, str] = field(default_factory=dict)
    ended: list[int] = field(default_factory=list)  # indices of sequences this step ended

    def __len__(self) -> int:
        return len(self.sequences)

    def __iter__(self) -> Iterator[StepOutput]:
        return map(self.__getitem__, range(len(self.sequences)))

    def __getitem__(self, index: int) -> StepOutput:  # type: ignore[override]  # slices have no use
        sequence = self.sequences[index]
        return StepOutput(
            sequence,
            self.tokens[index],
            self.texts.get(index, ""),
            self.kinds[index],
            sequence.finish_reason is not None and index in self.ended,
            *self.drafts.get(index, (NONE, 0, 0, 0)),
        )

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.tokens))

    def add_failed(self, sequence: Sequence) -> None:
        self.ended.append(len(self.sequences))
        self.sequences.append(sequence)
        self.tokens.append([])
        self.kinds.append([])
