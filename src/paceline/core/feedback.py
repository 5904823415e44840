"""Feedback, from the target's logits to the drafters: the likeliest tokens at every verified row of a step.

A verified row is a sequence's last token (its root row) or a node of its draft, also a rejected one. Probabilities are
of the raw logits at temperature 1, before any processor.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from paceline.core.sequence import Sequence

Ints = np.ndarray[Any, np.dtype[np.int64]]
Int32s = np.ndarray[Any, np.dtype[np.int32]]
Floats = np.ndarray[Any, np.dtype[np.float32]]
NO_TOKEN = -1


@dataclass(frozen=True, eq=False)
class Feedback:
    """The M verified rows of S sequences: by sequence, a root row and the nodes of its draft in order."""

    sequences: SequenceOf[Sequence]
    lengths: Ints  # (S,) tokens of each sequence when the step began; the last of them is the root row's
    starts: Ints  # (S,) root rows
    tokens: Int32s  # (M,) token of each row
    parents: Int32s  # (M,) row of the parent; -1: a root row
    ids: Int32s  # (M, n) likeliest tokens, likeliest first; -1 behind the last token of p > 0
    probs: Floats  # (M, n)
    rest: Floats  # (M,) mass of the tokens that are not in `ids`

    @functools.cached_property
    def before(self) -> Int32s:
        """(M,) the token before each row's token; NO_TOKEN where a sequence has only one."""
        before = self.tokens[self.parents]  # root rows are overwritten
        lengths = self.lengths.tolist()
        before[self.starts] = [
            one.tokens[length - 2] if length > 1 else NO_TOKEN
            for one, length in zip(self.sequences, lengths, strict=True)
        ]
        return before

    @property
    def ends(self) -> Ints:
        """(S,) the end of each sequence's rows."""
        return np.append(self.starts[1:], len(self.tokens))

    def first(self, n: int) -> Feedback:
        """Return the `n` likeliest tokens of each row."""
        if n >= self.ids.shape[1]:
            return self
        rest = self.rest + self.probs[:, n:].sum(1)
        return replace(self, ids=self.ids[:, :n], probs=self.probs[:, :n], rest=rest)

    def of(self, chosen: SequenceOf[int]) -> Feedback:
        """Return the rows of some of the sequences."""
        starts, ends = self.starts[chosen], self.ends[chosen]
        rows = np.concatenate([np.arange(start, end) for start, end in zip(starts, ends, strict=True)] or [starts])
        counts = ends - starts
        first = counts.cumsum() - counts
        parents = self.parents[rows]
        moved = np.where(parents < 0, -1, parents + (first - starts).repeat(counts)).astype(np.int32)
        return Feedback(
            [self.sequences[at] for at in chosen],
            self.lengths[chosen],
            first,
            self.tokens[rows],
            moved,
            self.ids[rows],
            self.probs[rows],
            self.rest[rows],
        )
