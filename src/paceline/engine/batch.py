"""The input of one step (`Batch`), its outcome (`StepResult`), its seconds (`StepTiming`), and sums over all steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from paceline.config import NONE
from paceline.core.sequence import Sequence
from paceline.core.verdict import TokenKind

Tables = np.ndarray[Any, np.dtype[np.int32]]  # (sequences, blocks) ids
Ints = np.ndarray[Any, np.dtype[np.int64]]
Bools = np.ndarray[Any, np.dtype[np.bool_]]
NO_TABLES: Tables = np.empty((0, 0), np.int32)


@dataclass(slots=True)
class Row:
    """One sequence's share of a step: `count` tokens from `first` on, then a draft of at most `max_nodes` nodes."""

    sequence: Sequence
    first: int
    count: int
    samples: bool  # it computes the sequence's last token, so the pass yields a next one
    method: str = NONE
    max_nodes: int = 0


@dataclass(eq=False)
class Batch:
    """The rows of one step as columns, since a step of hundreds of plain rows is a few array operations."""

    sequences: list[Sequence]
    first: Ints  # positions
    count: Ints
    samples: Bools
    req_indices: Ints
    drafts: dict[int, tuple[str, int]] = field(default_factory=dict)  # row -> method, and the most nodes
    token_source: Ints | None = None  # (B,) row of the unread verdict that gives a row's token; -1: the host has it

    def __post_init__(self) -> None:
        self.ends = self.first + self.count  # positions behind the tokens that the step computes, drafts left out
        self.num_drafted = sum([max_nodes for _, max_nodes in self.drafts.values()])  # nodes, at the most
        self.num_tokens = sum(self.count.tolist()) + self.num_drafted  # rows of the target pass, at the most
        self.sampling: Ints = self.samples.nonzero()[0]  # rows that yield a token
        self.all_sample = len(self.sampling) == len(self.sequences)
        self.sampled_req_indices = self.req_indices if self.all_sample else self.req_indices[self.sampling]
        self.sampled_lengths = self.ends if self.all_sample else self.ends[self.sampling]  # before the step
        self.tables = NO_TABLES
        self.filled: list[int] = []  # rows that fill a block of the cache
        self.changes = -1  # the scheduler's count of sequences that joined or left, when the batch was made

    @staticmethod
    def of(rows: SequenceOf[Row]) -> Batch:
        first, count = np.array([row.first for row in rows], np.int64), np.array([row.count for row in rows], np.int64)
        req_indices = np.array([row.sequence.req_index for row in rows], np.int64)
        samples = np.array([row.samples for row in rows], np.bool_)
        drafts = {index: (row.method, row.max_nodes) for index, row in enumerate(rows) if row.max_nodes}
        return Batch([row.sequence for row in rows], first, count, samples, req_indices, drafts)

    def joined(self, other: Batch) -> Batch:
        """Return these rows and those of newcomers, whose tokens the host knows; without tables."""
        first, count = np.append(self.first, other.first), np.append(self.count, other.count)
        samples, req_indices = np.append(self.samples, other.samples), np.append(self.req_indices, other.req_indices)
        source = None if self.token_source is None else np.append(self.token_source, np.full(len(other), -1))
        return Batch([*self.sequences, *other.sequences], first, count, samples, req_indices, token_source=source)

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def only_decodes(self) -> bool:
        """Return whether every row computes only its sequence's last token, and a draft."""
        return self.all_sample and self.num_tokens - self.num_drafted == len(self.sequences)

    @property
    def chunks(self) -> list[int]:
        """Rows that compute more of a prompt than its last token."""
        if self.only_decodes:
            return []
        return [int(index) for index in np.flatnonzero(~self.samples | (self.count > 1))]

    @property
    def place(self) -> SequenceOf[int] | dict[int, int]:
        """Return the index of each row that samples, among the rows that sample."""
        return range(len(self)) if self.all_sample else {row: at for at, row in enumerate(self.sampling.tolist())}

    @property
    def sampled_sequences(self) -> list[Sequence]:
        return self.sequences if self.all_sample else [self.sequences[index] for index in self.sampling]

    @property
    def reserved(self) -> dict[str, int]:
        """Return, by sequence key, the end of the slots that the step needs, including one for the token it commits."""
        ends = dict(zip([sequence.key for sequence in self.sequences], (self.ends + 1).tolist(), strict=True))
        for row, (_, max_nodes) in self.drafts.items():
            ends[self.sequences[row].key] += max_nodes
        return ends


class DraftOutcome(NamedTuple):
    method: str
    nodes: int
    accepted: int  # drafted tokens the target agreed with, also those behind a stop
    depth: int  # depth of the deepest node


@dataclass(slots=True, eq=False)
class StepResult:
    """The outcome of a step as columns, one entry for each sequence that committed a token or failed. Most readers look
    at ended sequences only."""

    sequences: list[Sequence] = field(default_factory=list)
    tokens: list[list[int]] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)  # rows of the verdict
    kinds: Callable[[int], list[int]] | None = None  # TokenKind of a sequence with a draft; a plain one's is a bonus
    paths: Callable[[int], list[int]] | None = None  # accepted nodes of a sequence's draft; None: the first ones
    drafts: dict[int, DraftOutcome] = field(default_factory=dict)
    texts: dict[int, str] = field(default_factory=dict)  # newly visible, of sequences with stop strings
    ended: list[int] = field(default_factory=list)  # indices of sequences that this step ended

    def __len__(self) -> int:
        return len(self.sequences)

    def kinds_of(self, index: int) -> list[int]:
        """Return the TokenKind of each token that the sequence committed."""
        tokens = self.tokens[index]
        if self.kinds is None or index not in self.drafts:
            return [int(TokenKind.BONUS)] * len(tokens)
        return self.kinds(index)[: len(tokens)]

    @property
    def num_tokens(self) -> int:
        """Tokens committed in the step; a plain row commits one, a failed row none."""
        return sum(map(len, self.tokens)) if self.drafts or self.ended else len(self.tokens)

    def add_failed(self, sequence: Sequence) -> None:
        self.ended.append(len(self.sequences))
        self.sequences.append(sequence)
        self.tokens.append([])


class DraftWork(NamedTuple):
    """The work of one method's drafts in a step."""

    passes: int  # of its model, one behind the other: the depth of a chain; 1 for a tree or a lookup
    unread: int  # tokens of all rows that it read first
    seconds: float


@dataclass(frozen=True, slots=True)
class StepTiming:
    """The seconds of one step, and whether they are typical."""

    num_sequences: int
    rows: int  # rows of the target pass
    step_s: float  # from the end of the step before, or from the step's first launch
    work: Mapping[str, DraftWork]  # by method; without drafts that compiled or captured something
    time_is_typical: bool = True  # nothing was captured or compiled in the step
    ahead: bool = False  # launched before the step before it was read


@dataclass
class EngineStats:
    """Sums over all steps."""

    num_steps: int = 0
    num_pass_tokens: int = 0  # rows of target passes, each draft at its most nodes
    num_committed_tokens: int = 0
    step_s: float = 0.0
    model_s: float = 0.0  # the rest of `step_s` is the engine's own

    def add(self, batch: Batch, committed: int, model_s: float, step_s: float) -> None:
        self.num_steps += 1
        self.num_pass_tokens += batch.num_tokens
        self.num_committed_tokens += committed
        self.step_s += step_s
        self.model_s += model_s
