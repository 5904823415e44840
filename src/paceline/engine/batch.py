"""What one step computes (`Batch`), what it committed for each sequence (`StepOutputs`), and sums over all steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from paceline.config import NONE
from paceline.sequence import Sequence
from paceline.verdict import Kind

Tables = np.ndarray[Any, np.dtype[np.int32]]  # (sequences, blocks) ids
Ints = np.ndarray[Any, np.dtype[np.int64]]
Bools = np.ndarray[Any, np.dtype[np.bool_]]
NO_TABLES: Tables = np.empty((0, 0), np.int32)


@dataclass(slots=True)
class Row:
    """One sequence's share of a step: `count` of its tokens from `first` on, then a draft of at most `budget` nodes."""

    sequence: Sequence
    first: int
    count: int
    samples: bool  # it computes the sequence's last token, so the pass yields a next one
    method: str = NONE
    budget: int = 0


class Batch:
    """The rows of one step as columns, since a step of hundreds of plain rows is a few array operations."""

    def __init__(
        self,
        sequences: list[Sequence],
        first: Ints,
        count: Ints,
        samples: Bools,
        tables: Tables,
        seats: Ints,
        *,
        drafts: dict[int, tuple[str, int]] | None = None,
        behind: Ints | None = None,
    ) -> None:
        self.sequences, self.first, self.count, self.samples, self.tables = sequences, first, count, samples, tables
        self.ends = first + count  # where the tokens that the step computes end, without drafts
        self.drafts = drafts or {}  # by row: method and nodes at the most
        # (B,) the row of the unread verdict the batch follows that a row's token is taken from; -1: the host knows it.
        self.behind = behind
        self.num_drafted = sum([budget for _, budget in self.drafts.values()])  # nodes, at the most
        self.num_tokens = sum(count.tolist()) + self.num_drafted  # of the target pass at the most
        self.sampling: Ints = samples.nonzero()[0]  # rows that yield a token
        self.all_sample = len(self.sampling) == len(sequences)
        self.seats = seats
        self.filled: list[int] = []  # rows that fill a block of the cache
        self.changes = -1  # the scheduler's count of sequences that joined or left, when it was made

    @staticmethod
    def of(rows: SequenceOf[Row], tables: Tables = NO_TABLES) -> Batch:
        first, count = np.array([row.first for row in rows], np.int64), np.array([row.count for row in rows], np.int64)
        seats = np.array([row.sequence.seat for row in rows], np.int64)
        samples = np.array([row.samples for row in rows], np.bool_)
        drafts = {index: (row.method, row.budget) for index, row in enumerate(rows) if row.budget}
        return Batch([row.sequence for row in rows], first, count, samples, tables, seats, drafts=drafts)

    def __len__(self) -> int:
        return len(self.sequences)

    def row(self, index: int) -> Row:
        first, count, samples = int(self.first[index]), int(self.count[index]), bool(self.samples[index])
        return Row(self.sequences[index], first, count, samples, *self.drafts.get(index, (NONE, 0)))

    @property
    def rows(self) -> list[Row]:
        return [self.row(index) for index in range(len(self))]

    @property
    def only_decodes(self) -> bool:
        """Every row computes its sequence's last token, and a draft."""
        return self.all_sample and self.num_tokens - self.num_drafted == len(self.sequences)

    @property
    def place(self) -> SequenceOf[int] | dict[int, int]:
        """Of a row that samples among these, by its row of the batch."""
        return range(len(self)) if self.all_sample else {row: at for at, row in enumerate(self.sampling.tolist())}

    @property
    def sampled_sequences(self) -> list[Sequence]:
        return self.sequences if self.all_sample else [self.sequences[index] for index in self.sampling]

    @property
    def sampled_seats(self) -> Ints:
        return self.seats if self.all_sample else self.seats[self.sampling]

    @property
    def chunks(self) -> list[int]:
        """Rows that read a prompt, but for its last token alone."""
        if self.only_decodes:
            return []
        return [int(index) for index in np.flatnonzero(~self.samples | (self.count > 1))]

    @property
    def sampled_lengths(self) -> Ints:
        """Committed lengths at the start of the step, of rows that sample."""
        return self.ends if self.all_sample else self.ends[self.sampling]


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
    kinds: Callable[[int], list[int]] | None = None  # of a sequence with a draft; a plain one's token is a bonus
    paths: Callable[[int], list[int]] | None = None  # the nodes of its draft that were accepted; None: the first ones
    drafts: dict[int, tuple[str, int, int, int]] = field(default_factory=dict)  # method, nodes, accepted, depth
    texts: dict[int, str] = field(default_factory=dict)
    ended: list[int] = field(default_factory=list)  # indices of sequences this step ended

    @staticmethod
    def of(outputs: SequenceOf[StepOutput]) -> StepOutputs:
        return StepOutputs(
            [output.sequence for output in outputs],
            [output.tokens for output in outputs],
            lambda at: outputs[at].kinds,
            None,
            {at: output[5:] for at, output in enumerate(outputs) if output.drafted},
            {at: output.text for at, output in enumerate(outputs)},
            [at for at, output in enumerate(outputs) if output.finished],
        )

    def __len__(self) -> int:
        return len(self.sequences)

    def __iter__(self) -> Iterator[StepOutput]:
        return map(self.__getitem__, range(len(self.sequences)))

    def __getitem__(self, index: int) -> StepOutput:  # type: ignore[override]  # slices have no use
        sequence, tokens = self.sequences[index], self.tokens[index]
        kinds = None if self.kinds is None or index not in self.drafts else self.kinds(index)
        return StepOutput(
            sequence,
            tokens,
            self.texts.get(index, ""),
            [int(Kind.BONUS)] * len(tokens) if kinds is None else kinds[: len(tokens)],
            index in self.ended,
            *self.drafts.get(index, (NONE, 0, 0, 0)),
        )

    @property
    def num_tokens(self) -> int:
        """Of sequences without drafts one each, but those that failed."""
        return sum(map(len, self.tokens)) if self.drafts or self.ended else len(self.tokens)

    def add_failed(self, sequence: Sequence) -> None:
        self.ended.append(len(self.sequences))
        self.sequences.append(sequence)
        self.tokens.append([])


@dataclass
class EngineStats:
    """What the engine has done so far, and what share of the time was not the model's."""

    num_steps: int = 0
    num_pass_tokens: int = 0  # rows of target passes, drafted nodes at their budget
    num_committed_tokens: int = 0
    step_s: float = 0.0
    model_s: float = 0.0
    captured_late: int = 0  # passes captured and sampling kernels compiled after start-up: steps waited for them

    @property
    def overhead_s(self) -> float:
        """Everything but the model, over all steps."""
        return self.step_s - self.model_s

    def add(self, batch: Batch, *, committed: int, model_s: float, step_s: float) -> None:
        self.num_steps += 1
        self.num_pass_tokens += batch.num_tokens
        self.num_committed_tokens += committed
        self.step_s += step_s
        self.model_s += model_s
