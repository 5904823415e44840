"""Suffix decoding in native code (native/suffix.h), on the arrays of `SuffixIndex`."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from ctypes import c_double, c_int32, c_int64, c_void_p
from typing import Any

import numpy as np

from paceline.core.sequence import Sequence
from paceline.drafters.lookup.index import DEPTH, LEVELS, LIMIT, MIN_ROWS, Ints, Memory, SuffixIndex
from paceline.drafters.lookup.native import NativeBackend, NativeState
from paceline.drafters.lookup.store import SuffixStore
from paceline.drafters.lookup.tree import EVIDENCE_STEPS, HIT_RATE, INSERTED, STORE_WEIGHT, SUBSTITUTED, THRESHOLD
from paceline.native.library import Library

_MOST_PLACES = 2 * (len(LEVELS) - 1) * LIMIT + 2


class _Weights(ctypes.Structure):
    _fields_ = (
        ("foretold", c_double * len(HIT_RATE)),
        *((name, c_double) for name in ("threshold", "elsewhere", "behind", "with")),
        ("sure", c_double * len(EVIDENCE_STEPS)),
    )


class _Index(ctypes.Structure):
    _fields_ = (
        ("text", c_void_p),
        ("heads", c_void_p * len(LEVELS)),
        ("links", c_void_p * len(LEVELS)),
        ("rows", c_int64),
        ("end", c_int64),
    )


class _Place(ctypes.Structure):
    _fields_ = (*((name, c_int64) for name in ("match", "elsewhere", "start")), ("votes", c_double))


class _Row(ctypes.Structure):
    _fields_ = (
        ("own", c_void_p),
        ("known", c_int64),
        ("tail", c_int32 * (DEPTH + 2)),
        ("count", c_int64),
        ("places", _Place * _MOST_PLACES),
    )


class NativeIndex(SuffixIndex):
    """The same arrays, to which native code appends."""

    def __init__(self, extend: Callable[..., Any], rows: int = MIN_ROWS) -> None:
        self._native_extend, self._view = extend, _Index()
        self.address = ctypes.addressof(self._view)
        super().__init__(rows)

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

    def _work_on(self, rows: int, text: Ints, heads: list[Ints], links: list[Ints]) -> None:
        super()._work_on(rows, text, heads, links)
        view = self._view
        view.text, view.rows = text.ctypes.data, rows
        view.heads[:] = [one.ctypes.data for one in heads]
        view.links[:] = [one.ctypes.data for one in links]


class SuffixState(NativeState):
    __slots__ = ("index",)
    view: _Row

    def __init__(self, sequence: Sequence, index: NativeIndex | None) -> None:
        super().__init__(sequence, _Row(own=None if index is None else index.address))
        self.index = index


class NativeSuffixes(NativeBackend[SuffixState]):
    def __init__(self, library: Library, memory: Memory[NativeIndex], store: SuffixStore) -> None:
        past, weights = store.index, _Weights(HIT_RATE, THRESHOLD, STORE_WEIGHT, SUBSTITUTED, INSERTED, EVIDENCE_STEPS)
        assert past is None or isinstance(past, NativeIndex)
        address = None if past is None else past.address
        super().__init__(library, "suffix", "suffix_append", address, ctypes.addressof(weights))
        self._memory, self._kept = memory, (past, weights)

    def new(self, sequence: Sequence) -> SuffixState:
        return SuffixState(sequence, self._memory.new_index())

    def drop(self, state: SuffixState) -> None:
        self._memory.give_back(state.index)

    def _make_room(self, state: SuffixState, length: int) -> None:
        if state.index is None:
            state.room = sys.maxsize
            return
        self._memory.make_room(state.index, length - state.indexed)
        state.index.number_afresh()
        state.room = state.indexed + state.index.room
