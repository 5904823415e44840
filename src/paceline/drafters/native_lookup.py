"""Lookup drafters in native code (models/native/lookup.h): all rows of a step in one call.

The arrays are numpy's, and C sees them through views, kept up to date where arrays are replaced. Of the texts only
tokens that are new cross over.
"""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from array import array
from collections.abc import Sequence as SequenceOf
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from paceline.draft import Draft
from paceline.drafters.lookup import State
from paceline.models.native_kernels import Library
from paceline.sequence import Sequence

Nodes = npt.NDArray[np.int64]


class NativeState(State):
    __slots__ = ("address", "indexed", "room", "view")

    def __init__(self, sequence: Sequence, view: ctypes.Structure) -> None:
        super().__init__(sequence)
        self.view, self.address = view, ctypes.addressof(view)
        self.indexed = 0  # tokens taken in
        self.room = 0  # tokens it may have before room is to be made


S = TypeVar("S", bound=NativeState)


class NativeForm(ABC, Generic[S]):
    def __init__(self, library: Library, method: str, source: int, planes: int) -> None:
        """`planes`: arrays of nodes that a draft is made of; 1: chains."""
        self._find, self._draft = library.function(f"{method}_find"), library.function(f"{method}_draft")
        self._source, self._planes = source, planes

    def find(self, states: SequenceOf[S]) -> None:
        new: list[int] = []
        ends: list[int] = []
        for state in states:
            tokens = state.sequence.tokens
            if len(tokens) > state.room:
                self._make_room(state)
            new += tokens[state.indexed :]
            ends.append(len(new))
            state.indexed = state.at = len(tokens)
        given = [array("q", [state.address for state in states]), array("i", new), array("q", ends)]
        evidence = array("q", ends)
        self._find(*map(_address, given), len(states), _address(evidence), *self._shared())
        for state, found in zip(states, evidence, strict=True):
            state.evidence = found

    def draft(self, states: SequenceOf[S], budgets: SequenceOf[int]) -> Draft:
        nodes, counts, is_even = self._nodes(states, budgets)
        tokens = torch.from_numpy(nodes[0])
        if is_even:
            return Draft.even(tokens, self._source)
        num_nodes = torch.from_numpy(counts)
        if self._planes == 1:
            return Draft.chains(tokens, num_nodes, self._source)
        parents, depth = map(torch.from_numpy, nodes[1:])
        source = torch.from_numpy(np.full(len(states), self._source))
        return Draft(tokens=tokens, parents=parents, depth=depth, num_nodes=num_nodes, source=source)

    def _nodes(self, states: SequenceOf[S], budgets: SequenceOf[int]) -> tuple[list[Nodes], Nodes, bool]:
        """Planes of nodes, how many each row has, and whether all are chains of all the width."""
        rows, width = len(states), max(budgets, default=0)
        plane = rows * width
        out = np.empty(self._planes * plane + rows, np.int64)
        given = [array("q", [state.address for state in states]), array("q", budgets)]
        first = out.ctypes.data
        counts = first + out.itemsize * self._planes * plane
        used: int = self._draft(*map(_address, given), rows, width, first, counts, *self._shared())
        width = max(used, -1 - used)
        nodes = [out[at * plane : at * plane + rows * width].reshape(rows, width) for at in range(self._planes)]
        return nodes, out[self._planes * plane :], used < 0

    @abstractmethod
    def _make_room(self, state: S) -> None:
        """For all tokens of its sequence."""

    def _shared(self) -> tuple[int | None, ...]:
        """What both functions are given besides."""
        return ()


def _address(numbers: array[int]) -> int:
    return numbers.buffer_info()[0]
