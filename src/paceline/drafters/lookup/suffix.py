"""Suffix decoding (2411.04975): propose what followed the last tokens elsewhere in this text, or in past answers.

Each sequence has an index over its prompt and output; one store over finished answers serves all. Together they keep
within `suffix_bytes`: the store may take three quarters, and a sequence that finds no room left forgets its oldest
tokens. Aborted and preempted sequences add nothing to the store, so nothing is learned twice.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence as SequenceOf
from functools import partial
from typing import Any

import numpy as np
import torch

from paceline.core.draft import Draft
from paceline.core.sequence import Sequence
from paceline.drafters.base import DrafterContext
from paceline.drafters.lookup.index import Context, Memory, SuffixIndex
from paceline.drafters.lookup.lookup import LookupDrafter, State
from paceline.drafters.lookup.native_suffix import NativeIndex, NativeSuffixes
from paceline.drafters.lookup.store import SuffixStore
from paceline.drafters.lookup.tree import STORE_WEIGHT, Lookup, Place, evidence_of, grow, places_of
from paceline.drafters.methods import METHODS, SUFFIX
from paceline.native.library import load_library

log = logging.getLogger("paceline")


class _State(State):
    __slots__ = ("index", "indexed", "places")

    def __init__(self, sequence: Sequence, index: SuffixIndex | None) -> None:
        super().__init__(sequence)
        self.index = index  # None: there was no memory left for it
        self.indexed = 0  # tokens
        self.places: list[Place] = []  # that vote for the next tokens


class PythonSuffixes:
    """In Python: where there is no native library, and as the reference in tests."""

    def __init__(self, memory: Memory[SuffixIndex], store: SuffixStore) -> None:
        self._memory, self._store = memory, store

    def new(self, sequence: Sequence) -> _State:
        return _State(sequence, self._memory.new_index())

    def index_up_to(self, state: _State, end: int) -> None:
        if state.indexed < end:
            tokens = state.sequence.tokens
            if state.index is not None:
                self._memory.make_room(state.index, len(tokens) - state.indexed)  # a prompt's whole length at once
                state.index.extend(tokens[state.indexed : end])
            state.indexed = end

    def find(self, states: SequenceOf[_State]) -> None:
        for state in states:
            tokens = state.sequence.tokens
            self.index_up_to(state, len(tokens))
            context, store = Context(tokens), self._store.index
            lookups = [] if state.index is None else [Lookup(state.index, context)]
            lookups += [] if store is None else [Lookup(store, context, STORE_WEIGHT)]
            state.places, state.at = places_of(lookups, state.index, context), len(tokens)
            state.level = evidence_of(state.places)

    def draft(self, states: SequenceOf[_State], max_nodes: SequenceOf[int]) -> Draft:
        trees = [grow(state.places, max_nodes) for state, max_nodes in zip(states, max_nodes, strict=True)]
        counts = [len(tree.tokens) for tree in trees]
        width = max(counts, default=0)
        lists = [([tree.tokens for tree in trees], 0), ([tree.parents for tree in trees], -1)]
        lists.append(([tree.depths for tree in trees], 0))
        table = [[one + [filler] * (width - len(one)) for one in each] for each, filler in lists]
        # Through numpy: after a pass has evicted the CPU caches, torch.tensor takes several times as long.
        tokens, parents, depth = map(torch.from_numpy, np.array(table, np.int64).reshape(3, len(states), width))
        num_nodes = torch.from_numpy(np.array(counts, np.int64))
        return Draft(tokens=tokens, parents=parents, depth=depth, num_nodes=num_nodes)

    def drop(self, state: _State) -> None:
        self._memory.give_back(state.index)


class SuffixDrafter(LookupDrafter[Any]):
    name = SUFFIX
    covers = METHODS[SUFFIX].covers

    def __init__(self, context: DrafterContext, native: bool = True) -> None:
        """`native`: use the native library where there is one."""
        settings = context.speculation
        for_store = settings.suffix_bytes // 4 * 3
        library = load_library() if native else None
        make = SuffixIndex if library is None else partial(NativeIndex, library.function("suffix_extend"))
        self.store = SuffixStore(for_store, context.config.vocab_size, context.encode, settings.suffix_store, make)
        self.store.seed(settings.suffix_corpus)
        self.store.load()
        self._memory: Memory[Any] = Memory(settings.suffix_bytes - for_store, make)
        backend: Any = PythonSuffixes if library is None else partial(NativeSuffixes, library)
        super().__init__(backend(self._memory, self.store))

    @property
    def nbytes(self) -> int:
        return self.store.nbytes + self._memory.nbytes

    def release(self, sequence: Sequence) -> None:
        known = self._forget(sequence)
        if known and sequence.finish_reason not in (None, "abort", "error"):
            self.store.learn(sequence.output_tokens)
            for state in self.states.values():
                state.at = -1  # more may be found now

    def save(self) -> None:
        """Write the learned answers to `suffix_store`, if it is set."""
        self.store.save()

    def close(self) -> None:
        try:
            self.save()
        except OSError as problem:
            log.warning("the suffix store was not saved: %s", problem)
