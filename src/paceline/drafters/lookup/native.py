"""Lookup drafters in native code (native/lookup.h): all rows of a step in one call.

The arrays are numpy's; C reads and writes them through views, which are updated when an array is replaced. Only the new
tokens of each text are passed in a call.
"""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from array import array
from collections.abc import Sequence as SequenceOf
from typing import Generic, TypeVar

import numpy as np

from paceline.core.draft import Draft
from paceline.core.sequence import Sequence
from paceline.drafters.lookup.lookup import State
from paceline.native.library import Library

PLANES = 3  # of a draft: tokens, parents and depths


class NativeState(State):
    __slots__ = ("address", "indexed", "room", "view")

    def __init__(self, sequence: Sequence, view: ctypes.Structure) -> None:
        super().__init__(sequence)
        self.view, self.address = view, ctypes.addressof(view)
        self.indexed = 0  # tokens
        self.room = 0  # tokens that fit before the arrays must grow


S = TypeVar("S", bound=NativeState)


class NativeBackend(ABC, Generic[S]):
    """`method` names a pair of native functions, to find and to draft, with `shared` as further arguments of both;
    `append` the one that adds tokens to a text."""

    def __init__(self, library: Library, method: str, append: str, *shared: int | None) -> None:
        self._append = library.function(append)
        self._find, self._draft = library.function(f"{method}_find"), library.function(f"{method}_draft")
        self._shared = shared
        self._out, self._out_at = np.empty(0, np.int64), 0  # the last drafts, and the buffer's address

    def index_up_to(self, state: S, end: int) -> None:
        if end <= state.indexed:  # the last lookup holds positions, which must stay valid
            return
        tokens = state.sequence.tokens
        if len(tokens) > state.room:
            self._make_room(state, len(tokens))
        new = array("q", tokens[state.indexed : end])
        self._append(state.address, new.buffer_info()[0], len(new))
        state.indexed += len(new)

    def find(self, states: SequenceOf[S]) -> None:
        states = list(dict.fromkeys(states))  # the new tokens of a text are passed once
        asked = [state.address for state in states]
        new: list[int] = []
        lengths = []
        for state in states:
            tokens = state.sequence.tokens
            length = len(tokens)
            if length > state.room:
                self._make_room(state, length)
            new += tokens[state.indexed :]
            asked.append(len(new))
            lengths.append(length)
        packed, rows = array("q", asked + new), len(states)
        self._find(packed.buffer_info()[0], rows, *self._shared)
        # Only now: making room may have failed for one of them, and then no text was indexed.
        for state, found, length in zip(states, packed[rows : 2 * rows].tolist(), lengths, strict=True):
            state.level, state.at, state.indexed = found, length, length

    def draft(self, states: SequenceOf[S], max_nodes: SequenceOf[int]) -> Draft:
        """The native function fills a buffer with node counts and planes; it returns the width used, as -1 - width
        where every row is a chain of that width."""
        rows, most = len(states), max(max_nodes, default=0)
        needed = rows * (1 + PLANES * most)
        if needed > len(self._out):
            self._out = np.empty(2 * needed, np.int64)
            self._out_at = self._out.ctypes.data
        asked = array("q", [state.address for state in states])
        asked.extend(max_nodes)
        used: int = self._draft(asked.buffer_info()[0], rows, most, self._out_at, *self._shared)
        width, only_chains = max(used, -1 - used), used < 0
        planes = 1 if only_chains else PLANES
        nodes = self._out[rows : rows + planes * rows * width].reshape(planes, rows, width).copy()
        if only_chains:
            depth = np.empty_like(nodes[0])
            depth[:] = np.arange(1, width + 1)
            return Draft.of_arrays(nodes[0], depth - 2, depth, np.full(rows, width))
        tokens, parents, depth = nodes
        return Draft.of_arrays(tokens, parents, depth, self._out[:rows].copy())

    @abstractmethod
    def _make_room(self, state: S, length: int) -> None:
        """For a text of so many tokens."""
