"""Suffix decoding (2411.04975): draft what followed the last tokens elsewhere in this text, or in past answers.

Each sequence has an index over its prompt and output; one store over finished answers serves all. Together they keep
within `suffix_bytes`: the store may take three quarters, and a sequence that finds no room left forgets its oldest
tokens. Aborted and preempted sequences teach the store nothing, so nothing is learned twice.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

import numpy as np
import torch

from paceline.draft import Draft
from paceline.drafters.base import Commit, DrafterContext, DraftRow, HostDrafter
from paceline.drafters.suffix_index import MIN_ROWS, Context, SuffixIndex
from paceline.drafters.suffix_store import SuffixStore
from paceline.drafters.suffix_tree import ELSEWHERE, Lookup, Place, Tree, evidence_of, grow, places_of
from paceline.sequence import Sequence

log = logging.getLogger("paceline")


@dataclass
class _State:
    sequence: Sequence
    index: SuffixIndex | None  # None: there was no memory left for it
    indexed: int = 0  # tokens taken in
    match: int = 0  # of the last proposal
    places: list[Place] = field(default_factory=list)  # that foretell the next tokens
    looked_up: tuple[int, int] = (-1, -1)  # at how many tokens and at which version of the store


class SuffixDrafter(HostDrafter):
    name = "suffix"
    source = 1  # in `Draft.source`

    def __init__(self, context: DrafterContext) -> None:
        settings = context.speculation
        for_store = settings.suffix_bytes // 4 * 3
        self._max_local_bytes = settings.suffix_bytes - for_store
        self._local_bytes = 0
        self._states: dict[str, _State] = {}
        self._behind: dict[str, Sequence] = {}  # decoded on, and not indexed yet
        self.store = SuffixStore(for_store, context.config.vocab_size, context.encode, settings.suffix_store)
        self.store.seed(settings.suffix_corpus)
        self.store.load()

    @property
    def nbytes(self) -> int:
        return self.store.nbytes + self._local_bytes

    def propose(self, rows: SequenceOf[DraftRow]) -> Draft:
        trees = [self._best_tree(row.sequence, row.budget) for row in rows]
        for row, tree in zip(rows, trees, strict=True):
            self._states[row.sequence.key].match = tree.match
        counts = [len(tree.tokens) for tree in trees]
        width = max(counts, default=0)
        lists = [([tree.tokens for tree in trees], 0), ([tree.parents for tree in trees], -1)]
        lists.append(([tree.depths for tree in trees], 0))
        table = [[one + [filler] * (width - len(one)) for one in each] for each, filler in lists]
        # Through numpy: after a pass has swept the caches, torch.tensor takes several times as long.
        tokens, parents, depth = map(torch.from_numpy, np.array(table, np.int64).reshape(3, len(rows), width))
        num_nodes, source = map(torch.from_numpy, np.array([counts, [self.source] * len(rows)], np.int64))
        return Draft(tokens=tokens, parents=parents, depth=depth, num_nodes=num_nodes, source=source)

    def match_length(self, sequence: Sequence) -> int:
        """Tokens of context that the last proposal's best source shares; 0: nothing was found."""
        state = self._states.get(sequence.key)
        return 0 if state is None else state.match

    def evidence(self, sequence: Sequence) -> int:
        """Of the proposal it would make now: a function of the committed tokens and of past answers."""
        return evidence_of(self._places(sequence))

    def guess(self, sequence: Sequence, count: int) -> list[int]:
        return self._best_tree(sequence, count).best_path()

    def commit(self, commits: SequenceOf[Commit]) -> None:
        for commit in commits:
            sequence, end = commit.sequence, commit.first + commit.count
            # Of a prompt what was computed is taken in, so that indexing is spread over the chunks; what a decode
            # committed when it is asked for, or while the next pass is under way.
            if end >= len(sequence.tokens) - 1:
                self._behind[sequence.key] = sequence
            else:
                self._caught_up(sequence, end)

    def overlap(self) -> None:
        behind, self._behind = self._behind, {}
        for sequence in behind.values():
            self._caught_up(sequence, len(sequence.tokens))

    def admit(self, sequence: Sequence, start: int, end: int) -> None:
        self._forget(sequence)

    def release(self, sequence: Sequence) -> None:
        known = self._forget(sequence)
        if known and sequence.finish_reason not in (None, "abort"):
            self.store.learn(sequence.output_tokens)

    def save(self) -> None:
        """Keep what was learned in `suffix_store`, if one was named."""
        self.store.save()

    def close(self) -> None:
        try:
            self.save()
        except OSError as problem:
            log.warning("the suffix store was not saved: %s", problem)

    def _best_tree(self, sequence: Sequence, budget: int) -> Tree:
        return grow(self._places(sequence), budget)

    def _places(self, sequence: Sequence) -> list[Place]:
        """In the sequence's own text and in the store; looked up once for whoever asks before the next token."""
        state = self._caught_up(sequence, len(sequence.tokens))
        now = state.indexed, self.store.version
        if state.looked_up != now:
            context, store = Context(sequence.tokens), self.store.index
            lookups = [] if state.index is None else [Lookup(state.index, context)]
            lookups += [] if store is None else [Lookup(store, context, ELSEWHERE)]
            state.places, state.looked_up = places_of(lookups, state.index, context), now
        return state.places

    def _caught_up(self, sequence: Sequence, end: int) -> _State:
        """The sequence's state with tokens[:end] indexed."""
        state = self._states.get(sequence.key)
        if state is None or state.sequence is not sequence:
            self._forget(sequence)
            state = self._states[sequence.key] = _State(sequence, self._new_index())
        if state.indexed < end:
            if state.index is not None:
                spare = self._max_local_bytes - self._local_bytes
                wanted = len(sequence.tokens) - state.indexed  # a prompt's whole length at once
                self._local_bytes += state.index.make_room(wanted, spare)
                state.index.extend(sequence.tokens[state.indexed : end])
            state.indexed = end
        return state

    def _new_index(self) -> SuffixIndex | None:
        if self._local_bytes + SuffixIndex.bytes_for(MIN_ROWS) > self._max_local_bytes:
            return None
        self._local_bytes += SuffixIndex.bytes_for(MIN_ROWS)
        return SuffixIndex()

    def _forget(self, sequence: Sequence) -> bool:
        state = self._states.pop(sequence.key, None)
        behind = self._behind.pop(sequence.key, None)
        if state is not None and state.index is not None:
            self._local_bytes -= state.index.nbytes
        return behind is sequence or (state is not None and state.sequence is sequence)
