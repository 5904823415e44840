"""The text that a request's grammar forces, as a chain: keys, brackets, tails of enums (jump-forward decoding).

It drafts only for requests with structured outputs, and only where the grammar leaves the next token hardly a choice.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

import numpy as np

from paceline.core.draft import Draft, HostDraft, chain_shape
from paceline.core.sequence import Sequence
from paceline.drafters.base import DrafterContext, DraftRequest, HostDrafter
from paceline.drafters.methods import GRAMMAR


def forced_tokens(sequence: Sequence) -> list[int]:
    return [] if sequence.matcher is None else sequence.matcher.forced(sequence)


class _Forced(NamedTuple):
    """The tokens forced behind the first `length` of a sequence."""

    sequence: Sequence
    length: int
    tokens: list[int]


class GrammarDrafter(HostDrafter):
    name = GRAMMAR
    trees = True  # a chain of which all nodes are made at once, and whose length is known before

    def __init__(self, context: DrafterContext, forced: Callable[[Sequence], list[int]] = forced_tokens) -> None:
        self._forced, self._known = forced, dict[str, _Forced]()

    def levels(self, sequences: SequenceOf[Sequence]) -> list[int]:
        return [self.level(sequence) for sequence in sequences]

    def level(self, sequence: Sequence) -> int:
        """Return the number of tokens that are forced."""
        return len(self._tokens(sequence))

    def propose(self, rows: SequenceOf[DraftRequest]) -> Draft:
        chains = [self._tokens(row.sequence)[: row.max_nodes] for row in rows]
        counts = np.array([len(chain) for chain in chains], np.int64)
        used, parents, depth = chain_shape(counts, int(counts.max(initial=0)))
        tokens = np.zeros(used.shape, np.int64)
        tokens[used] = [token for chain in chains for token in chain]
        return HostDraft.of_arrays(tokens, parents, depth, counts)

    def release(self, sequence: Sequence) -> None:
        self._known.pop(sequence.key, None)

    def _tokens(self, sequence: Sequence) -> list[int]:
        known, length = self._known.get(sequence.key), len(sequence.tokens)
        if known is None or known.sequence is not sequence or known.length != length:
            known = self._known[sequence.key] = _Forced(sequence, length, self._forced(sequence))
        return known.tokens
