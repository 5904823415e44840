"""Prompt lookup in native code (native/ngram.h), and the arrays it uses."""

from __future__ import annotations

import ctypes
from ctypes import c_int64, c_void_p

import numpy as np

from paceline.core.sequence import Sequence
from paceline.drafters.lookup.native import NativeBackend, NativeState
from paceline.native.library import Library

MIN_ROOM = 256  # tokens


class _View(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("tokens", "tables")),
        *((name, c_int64) for name in ("slots", "least", "most", "length", "match", "start")),
    )


class NgramState(NativeState):
    __slots__ = ("tables", "tokens")
    view: _View

    def __init__(self, sequence: Sequence, ngram_min: int, ngram_max: int) -> None:
        super().__init__(sequence, _View(least=ngram_min, most=ngram_max))
        self.tokens = self.tables = np.empty(0, np.int32)


class NativeNgrams(NativeBackend[NgramState]):
    def __init__(self, library: Library, ngram_min: int, ngram_max: int) -> None:
        super().__init__(library, "ngram", "ngram_extend")
        self._min, self._max = ngram_min, ngram_max
        self._index = library.function("ngram_index")

    def new(self, sequence: Sequence) -> NgramState:
        return NgramState(sequence, self._min, self._max)

    def drop(self, state: NgramState) -> None:
        pass

    def _make_room(self, state: NgramState, length: int) -> None:
        """Twice as much until the text fits, and all of it indexed again."""
        room = max(state.room, MIN_ROOM)
        while room < length:
            room *= 2
        tokens, tables = np.empty(room, np.int32), np.full((self._max - self._min + 1) * 2 * room, -1, np.int32)
        tokens[: state.indexed] = state.tokens[: state.indexed]
        state.room, state.tokens, state.tables = room, tokens, tables
        view = state.view
        view.tokens, view.tables, view.slots = tokens.ctypes.data, tables.ctypes.data, 2 * room
        self._index(state.address, state.indexed)
