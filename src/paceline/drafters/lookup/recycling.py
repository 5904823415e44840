"""`recycling` drafts what the target itself ranked high behind the last tokens before: a tree from tables of successors
(`successors`), mixed node by node with the places of `suffix`.

- **Children of a node.** Both tables' successors, by .4 and .6 where both know the context, else those of one. A place
  that votes for a token takes its share first: p = p_suffix + (1 - sum of p_suffix) p. Children of the root are also
  *next-next* tokens: ranks 2 to 9 of the logits that chose the newest token often come one token later
  (after LogitSpec, 2507.01449).
- **Survival.** p is no probability of survival: that is learnt by buckets of the longest context known, the length of
  the match, the rank, p, and whether it is a next-next token. Every list of children on the answer's path is counted,
  drafted or not, so the counts have no bias. `survival.json` has those of recorded answers.
- **The tree** is grown best first by the product of survivals.

Tables and survival are written in native code (native/recycling.h). Without a library nothing is learnt, and the draft
is that of `suffix`.
"""

from __future__ import annotations

import ctypes
import functools
from array import array
from collections.abc import Sequence as SequenceOf
from ctypes import c_double, c_float, c_int32, c_int64, c_void_p
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.core.draft import Draft
from paceline.core.feedback import Feedback
from paceline.core.sequence import Sequence
from paceline.drafters.base import DrafterContext, DraftRequest
from paceline.drafters.lookup.index import Memory
from paceline.drafters.lookup.native import NativeIndex, NativeLookup, NativeState, RowView
from paceline.drafters.lookup.store import SuffixStore
from paceline.drafters.lookup.successors import ENTRY, WIDTH, Entries, SuccessorTable, SuccessorTables
from paceline.drafters.lookup.suffix import SuffixDrafter
from paceline.drafters.lookup.table_file import known_table
from paceline.drafters.methods import RECYCLING
from paceline.files.json_fields import read_json
from paceline.native.library import Library

MOST_NODES, MOST_CHILDREN = 64, 16
CONTEXTS, MATCHES, RANKS, SHARES = 3, 6, 8, 9  # classes of a bucket; see bucket_of in native/recycling.h
BUCKETS = 2 * CONTEXTS * MATCHES * RANKS * SHARES
SHARE_PRIORS = (0.007, 0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.85)  # survival by class of p, on recorded answers
PRIOR_WEIGHT, MOST_TRIED = 4.0, 2000.0  # candidates; MOST_TRIED: both counts are halved there
ONE_TOKEN, TWO_TOKENS = 0.4, 0.6  # weights of the tables where both know a context
COUNTS = Path(__file__).parent / "survival.json"  # bucket -> candidates, and those that the answer took
NO_TOKEN_BEFORE = -2

Floats = npt.NDArray[np.float32]


class SurvivalView(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("tried", "right", "prior")),
        *((name, c_double) for name in ("prior_weight", "most_tried", "one_token", "two_tokens")),
    )


class ChildrenView(ctypes.Structure):
    _fields_ = (
        *((name, c_int32) for name in ("count", "node")),
        *((name, c_int32 * MOST_CHILDREN) for name in ("tokens", "buckets")),
    )


class RecyclingRowView(ctypes.Structure):
    _fields_ = (
        ("text", RowView),
        *((name, c_void_p) for name in ("table", "base")),
        ("num_next", c_int64),
        ("next_behind", c_int32),
        ("next_ids", c_int32 * WIDTH),
        ("next_probs", c_float * WIDTH),
        *((name, c_int64) for name in ("num_expanded", "num_nodes")),
        ("expanded", ChildrenView * (MOST_NODES + 1)),
        *((name, c_int32 * MOST_NODES) for name in ("tokens", "parents")),
    )


class RowsView(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("tokens", "parents", "ids", "probs")),
        *((name, c_int64) for name in ("stride", "num_sequences")),
    )


class RecyclingState(NativeState):
    __slots__ = ("table", "whole")

    def make_view(self, index: NativeIndex | None) -> RowView:
        self.whole = RecyclingRowView()
        self.table: SuccessorTable | None = None
        view: RowView = self.whole.text
        view.own = None if index is None else index.address
        return view

    def use_table(self, table: SuccessorTable) -> None:
        self.table, self.whole.table = table, table.address


class Survival:
    """The counts from which survival is learnt, shared by all domains: no token can be read from them."""

    def __init__(self) -> None:
        self.tried, self.right = np.zeros((2, BUCKETS), np.float32)
        self.prior = prior_survival()
        arrays = (self.tried.ctypes.data, self.right.ctypes.data, self.prior.ctypes.data)
        self.view = SurvivalView(*arrays, PRIOR_WEIGHT, MOST_TRIED, ONE_TOKEN, TWO_TOKENS)


@functools.cache
def prior_survival() -> Floats:
    """Return the survival of each bucket before anything was counted."""
    prior = np.tile(np.array(SHARE_PRIORS, np.float32), BUCKETS // SHARES)
    for bucket, (tried, right) in (read_json(COUNTS) if COUNTS.exists() else {}).items():
        prior[int(bucket)] = (right + PRIOR_WEIGHT * prior[int(bucket)]) / (tried + PRIOR_WEIGHT)
    return prior


class RecyclingDrafter(SuffixDrafter):
    name = RECYCLING
    trees = True

    def __init__(self, context: DrafterContext, native: bool = True) -> None:
        """`native`: use the native library if there is one."""
        self.survival = Survival()
        self.tables: SuccessorTables | None = None  # None: there is no library
        self._max_bytes = context.speculation.recycling_bytes
        stored = None if context.embedding is None else known_table(context.embedding)
        self._stored = np.zeros(0, ENTRY) if stored is None else stored.entries  # of the model's own table
        super().__init__(context, native)

    def native_backend(self, library: Library, memory: Memory[Any], store: SuffixStore) -> NativeLookup:
        self.feedback = 1 + WIDTH
        self.tables = SuccessorTables(self._max_bytes, library.function("successors_move"))
        self._teach = library.function("recycling_teach")
        self._base = SuccessorTable.of(self._stored, self.tables.move)
        self._lookup = NativeLookup.by_suffix(library, memory, store, RecyclingState, self.survival.view)
        return self._lookup

    @property
    def nbytes(self) -> int:
        return super().nbytes + (0 if self.tables is None else self.tables.nbytes)

    def propose(self, rows: SequenceOf[DraftRequest]) -> Draft:
        if self.tables is not None:
            self._lookup.least = rows[0].min_node_probability
        return super().propose(rows)

    def new_state(self, sequence: Sequence) -> Any:
        state = super().new_state(sequence)
        if self.tables is not None:
            state.use_table(self.tables.of(self._domain(sequence)))
            state.whole.base = self._base.address
        return state

    def contexts(self) -> Entries:
        """Return all that requests without a domain taught, and what the model's own table has beside that."""
        assert self.tables is not None
        entries = self.tables.of("").entries
        taught = entries[entries["stamp"] > 0]
        return np.concatenate([taught, self._stored[~np.isin(_keys(self._stored), _keys(taught))]])

    def on_feedback(self, feedback: Feedback) -> None:
        """Write what the rows teach into the tables of their domains, and each sequence's next-next tokens."""
        tables, lessons, committed = self.tables, array("q"), array("q")
        if tables is None or feedback.ids.shape[1] < self.feedback:
            return
        starts, states = feedback.starts.tolist(), self.states
        contexts = 2 * len(feedback.tokens)  # at most, in any table
        for sequence, length, start in zip(feedback.sequences, feedback.lengths.tolist(), starts, strict=True):
            tokens, state, domain = sequence.tokens, states.get(sequence.key), self._domain(sequence)
            table = tables.of(domain)
            if table.is_full(contexts):
                tables.make_room(table, domain, contexts)
            if state is not None and state.table is not table:
                state.use_table(table)
            committed.extend(tokens[length:])
            row = 0 if state is None else state.address
            before = tokens[length - 2] if length > 1 else NO_TOKEN_BEFORE
            lessons.extend((table.address, row, start, before, len(committed)))
        ids, probs = feedback.ids, feedback.probs
        pointers = [part.ctypes.data for part in (feedback.tokens, feedback.parents, ids, probs)]
        rows = RowsView(*pointers, ids.strides[0] // ids.itemsize, len(starts))
        places = ctypes.byref(rows), lessons.buffer_info()[0], committed.buffer_info()[0]
        self._teach(*places, len(feedback.tokens), self._base.address)

    def release(self, sequence: Sequence) -> None:
        super().release(sequence)
        if self.tables is not None and not self._lasts(sequence):
            self.tables.drop(sequence.key)

    def _domain(self, sequence: Sequence) -> str:
        """Return the domain whose table a sequence reads and fills; its own, where later requests must not."""
        return sequence.owner.domain if self._lasts(sequence) else sequence.key

    def _lasts(self, sequence: Sequence) -> bool:
        return self.keeps_answers and sequence.owner.lasts


def _keys(entries: Entries) -> npt.NDArray[np.int64]:
    """Return a number for the context of each entry."""
    keys: npt.NDArray[np.int64] = entries["before"].astype(np.int64) << 32 | entries["last"]
    return keys
