"""Lookup in native code (native/lookup.h), on the arrays of `SuffixIndex`: all rows of a step in one call.

The arrays are numpy's; C reads and writes them through views, which are updated when an array is replaced. Only the new
tokens of each text are passed in a call.
"""

from __future__ import annotations

import ctypes
import sys
from array import array
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from ctypes import c_double, c_int32, c_int64, c_void_p
from functools import partial
from typing import Any

import numpy as np

from paceline.core.draft import Draft, HostDraft
from paceline.core.sequence import Sequence
from paceline.drafters.lookup.index import DEPTH, LEVELS, LIMIT, MIN_ROWS, Ints, LookupState, Memory, SuffixIndex
from paceline.drafters.lookup.store import SuffixStore
from paceline.drafters.lookup.tree import HIT_RATE, INSERTED, LEVEL_STEPS, STORE_WEIGHT, SUBSTITUTED, THRESHOLD
from paceline.native.library import Library

PLANES = 3  # arrays of a draft: tokens, parents and depths
TEXTS = 3  # texts with places: the own one, past answers, the corpus
MOST_PLACES = TEXTS * (len(LEVELS) - 1) * LIMIT + 2


class WeightsView(ctypes.Structure):
    _fields_ = (
        ("hit_rate", c_double * len(HIT_RATE)),
        *((name, c_double) for name in ("threshold", "store_weight", "substituted", "inserted")),
        ("level_steps", c_double * len(LEVEL_STEPS)),
    )


class RuleView(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("corpus", "weights")),
        *((name, c_int64) for name in ("ngram_min", "ngram_max")),
        ("survival", c_void_p),
        ("least", c_double),
    )


class IndexView(ctypes.Structure):
    _fields_ = (
        ("text", c_void_p),
        ("heads", c_void_p * len(LEVELS)),
        ("links", c_void_p * len(LEVELS)),
        ("rows", c_int64),
        ("end", c_int64),
    )


class PlaceView(ctypes.Structure):
    _fields_ = (*((name, c_int64) for name in ("match", "text", "start")), ("votes", c_double))


class RowView(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("own", "past")),
        ("tail_size", c_int64),
        ("tail", c_int32 * (DEPTH + 2)),
        ("count", c_int64),
        ("places", PlaceView * MOST_PLACES),
    )


class NativeIndex(SuffixIndex):
    """An index to whose arrays native code appends."""

    def __init__(self, extend: Callable[..., Any], rows: int = MIN_ROWS) -> None:
        self._native_extend, self._view = extend, IndexView()
        self.address = ctypes.addressof(self._view)
        super().__init__(rows)

    @classmethod
    def maker(cls, library: Library) -> Callable[[], NativeIndex]:
        return partial(cls, library.function("index_extend"))

    @property
    def end(self) -> int:
        end: int = self._view.end
        return end

    @end.setter
    def end(self, end: int) -> None:
        self._view.end = end

    def _extend(self, tokens: Ints) -> None:
        tokens = np.ascontiguousarray(tokens)
        self._native_extend(self.address, tokens.ctypes.data, len(tokens))

    def _use(self, rows: int, text: Ints, heads: list[Ints], links: list[Ints]) -> None:
        super()._use(rows, text, heads, links)
        view = self._view
        view.text, view.rows = text.ctypes.data, rows
        view.heads[:] = [table.ctypes.data for table in heads]
        view.links[:] = [table.ctypes.data for table in links]


class NativeState(LookupState[NativeIndex]):
    __slots__ = ("address", "room", "view")

    def __init__(self, sequence: Sequence, index: NativeIndex | None) -> None:
        super().__init__(sequence, index)
        self.view = self.make_view(index)
        self.address = ctypes.addressof(self.view)
        self.room = 0  # length of the text up to which the arrays need not grow

    def make_view(self, index: NativeIndex | None) -> RowView:
        return RowView(own=None if index is None else index.address)

    def use_past(self, past: NativeIndex | None) -> None:
        super().use_past(past)
        self.view.past = None if past is None else past.address


class NativeLookup:
    def __init__(
        self,
        library: Library,
        memory: Memory[NativeIndex],
        rule: RuleView,
        owners: object = None,
        state: type[NativeState] = NativeState,
    ) -> None:
        """`owners`: objects that `rule` points into; `state`: the state of a row."""
        self._state = state
        self._append = library.function("lookup_append")
        self._find, self._draft = library.function("lookup_find"), library.function("lookup_draft")
        self._memory, self._rule, self._owners = memory, rule, owners
        self._rule_at = ctypes.addressof(rule)
        self._out, self._out_at = np.empty(0, np.int64), 0  # the last drafts, and the buffer's address

    @classmethod
    def by_suffix(
        cls,
        library: Library,
        memory: Memory[NativeIndex],
        store: SuffixStore,
        state: type[NativeState] = NativeState,
        survival: ctypes.Structure | None = None,
    ) -> NativeLookup:
        """`survival`: of `recycling`, whose rows are of another `state`."""
        corpus, weights = (
            store.corpus,
            WeightsView(HIT_RATE, THRESHOLD, STORE_WEIGHT, SUBSTITUTED, INSERTED, LEVEL_STEPS),
        )
        assert corpus is None or isinstance(corpus, NativeIndex)
        rule = RuleView(
            corpus=None if corpus is None else corpus.address,
            weights=ctypes.addressof(weights),
            survival=None if survival is None else ctypes.addressof(survival),
        )
        return cls(library, memory, rule, (corpus, weights, survival), state)

    @classmethod
    def by_longest(cls, library: Library, memory: Memory[NativeIndex], lengths: tuple[int, int]) -> NativeLookup:
        return cls(library, memory, RuleView(ngram_min=lengths[0], ngram_max=lengths[1]))

    def new(self, sequence: Sequence) -> NativeState:
        return self._state(sequence, self._memory.new_index())

    @property
    def least(self) -> float:
        """The probability of a node of `recycling` below which none is drafted."""
        least: float = self._rule.least
        return least

    @least.setter
    def least(self, least: float) -> None:
        self._rule.least = least

    def drop(self, state: NativeState) -> None:
        self._memory.give_back(state.index)

    def index_up_to(self, state: NativeState, end: int) -> None:
        if end <= state.indexed:  # the last lookup holds positions, which must stay valid
            return
        tokens = state.sequence.tokens
        if len(tokens) > state.room:
            self._make_room(state, len(tokens))
        new = array("q", tokens[state.indexed : end])
        self._append(state.address, new.buffer_info()[0], len(new))
        state.indexed += len(new)

    def find(self, states: SequenceOf[NativeState]) -> None:
        states = list(dict.fromkeys(states))  # the new tokens of a text are passed once
        rows = [state.address for state in states]
        new: list[int] = []
        lengths = []
        for state in states:
            tokens = state.sequence.tokens
            length = len(tokens)
            if length > state.room:
                self._make_room(state, length)
            new += tokens[state.indexed :]
            rows.append(len(new))
            lengths.append(length)
        packed, count = array("q", rows + new), len(states)
        self._find(self._rule_at, packed.buffer_info()[0], count)
        # Only now: making room may have failed for one of them, and then no text was indexed.
        for state, level, length in zip(states, packed[count : 2 * count].tolist(), lengths, strict=True):
            state.level, state.at, state.indexed = level, length, length

    def draft(self, states: SequenceOf[NativeState], max_nodes: SequenceOf[int]) -> Draft:
        """Return the drafts of what `find` found.

        The native function fills a buffer with node counts and planes. It returns the width used, as -1 - width if
        every row is a chain of that width.
        """
        rows, most = len(states), max(max_nodes, default=0)
        size = rows * (1 + PLANES * most)
        if size > len(self._out):
            self._out = np.empty(2 * size, np.int64)
            self._out_at = self._out.ctypes.data
        packed = array("q", [state.address for state in states])
        packed.extend(max_nodes)
        used: int = self._draft(self._rule_at, packed.buffer_info()[0], rows, most, self._out_at)
        width, only_chains = max(used, -1 - used), used < 0
        planes = 1 if only_chains else PLANES
        nodes = self._out[rows : rows + planes * rows * width].reshape(planes, rows, width).copy()
        if only_chains:
            depth = np.empty_like(nodes[0])
            depth[:] = np.arange(1, width + 1)
            return HostDraft.of_arrays(nodes[0], depth - 2, depth, np.full(rows, width))
        tokens, parents, depth = nodes
        return HostDraft.of_arrays(tokens, parents, depth, self._out[:rows].copy())

    def _make_room(self, state: NativeState, length: int) -> None:
        """Make room for a text of `length` tokens."""
        if state.index is None:
            state.room = sys.maxsize
            return
        self._memory.make_room(state.index, length - state.indexed)
        state.index.renumber()
        state.room = state.indexed + state.index.room
