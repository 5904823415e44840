"""Prompt lookup: find the last few tokens earlier in the same text and propose what followed them there.

For n from `ngram_max` down to `ngram_min` the most recent earlier occurrence of the last n tokens wins. The index maps
every n-gram to where its most recent continuation begins, exactly: a step costs the same however long the context is.
Invariant: it holds the n-grams that end before the last indexed token, so the end of the text never finds itself.
Tokens that a step committed are indexed when a draft is needed.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from functools import partial
from typing import Any

import numpy as np
import torch

from paceline.core.draft import Draft
from paceline.core.sequence import Sequence
from paceline.drafters.base import DrafterContext
from paceline.drafters.lookup.lookup import LookupDrafter, State
from paceline.drafters.lookup.native_ngram import NativeNgrams
from paceline.drafters.methods import NGRAM
from paceline.native.library import load_library

MATCH_LIMIT = 16  # longer matches count as this long


class NgramIndex:
    """Where the continuations of a growing text's n-grams begin; each n-gram packed into one integer."""

    def __init__(self, ngram_min: int, ngram_max: int, vocab_size: int) -> None:
        self._bits = max(vocab_size - 1, 1).bit_length()
        self._key = 0  # the last ngram_max indexed tokens, the newest in the low bits
        # (n, mask of n tokens, packed n-gram -> its continuation), the longest first
        self._tables: list[tuple[int, int, dict[int, int]]] = [
            (n, (1 << n * self._bits) - 1, {}) for n in range(ngram_max, ngram_min - 1, -1)
        ]
        self.length = 0  # tokens indexed

    def extend(self, tokens: SequenceOf[int], end: int) -> None:
        """Take in tokens[length:end]; the n-grams that end before each of them gain a continuation."""
        if end <= self.length:
            return
        key, bits, tables, longest = self._key, self._bits, self._tables, self._tables[0][1]
        for at, token in enumerate(tokens[self.length : end], self.length):
            for n, mask, table in tables:
                if at >= n:
                    table[key & mask] = at
            key = (key << bits | token) & longest
        self._key, self.length = key, end

    def find(self, tokens: list[int]) -> tuple[int, int]:
        """(n, where the continuation begins) of the longest n-gram that ends the text and was seen before; (0, 0) if
        there is none. The whole text is indexed then."""
        self.extend(tokens, len(tokens))
        for n, mask, table in self._tables:
            if len(tokens) > n and (at := table.get(self._key & mask)) is not None:
                return n, at
        return 0, 0


def continuation(tokens: SequenceOf[int], start: int, count: int) -> list[int]:
    """The tokens from `start` on; past the end of the text the draft continues from itself, so a repetition goes on."""
    piece = list(tokens[start : start + count])
    while len(piece) < count:
        piece += piece[: count - len(piece)]
    return piece


def match_length(tokens: SequenceOf[int], start: int, known: int) -> int:
    """How many tokens before `start` equal the text's last ones, up to `MATCH_LIMIT`; `known` of them do."""
    most, length = min(start, MATCH_LIMIT), known
    if tokens[start - most : start] == tokens[len(tokens) - most :]:  # a long copy under way
        return most
    while length < most and tokens[start - 1 - length] == tokens[-1 - length]:
        length += 1
    return length


class _State(State):
    __slots__ = ("index", "start")

    def __init__(self, sequence: Sequence, index: NgramIndex) -> None:
        super().__init__(sequence)
        self.index = index
        self.start = 0  # where the continuation begins


class PythonNgrams:
    """In Python: where there is no native library, and as the reference in tests."""

    def __init__(self, ngram_min: int, ngram_max: int, vocab_size: int) -> None:
        self._new_index = partial(NgramIndex, ngram_min, ngram_max, vocab_size)

    def new(self, sequence: Sequence) -> _State:
        return _State(sequence, self._new_index())

    def index_up_to(self, state: _State, end: int) -> None:
        state.index.extend(state.sequence.tokens, end)

    def find(self, states: SequenceOf[_State]) -> None:
        for state in states:
            tokens = state.sequence.tokens
            n, state.start = state.index.find(tokens)
            state.level, state.at = match_length(tokens, state.start, n) if n else 0, len(tokens)

    def draft(self, states: SequenceOf[_State], max_nodes: SequenceOf[int]) -> Draft:
        chains = [
            continuation(state.sequence.tokens, state.start, max_nodes) if state.level else []
            for state, max_nodes in zip(states, max_nodes, strict=True)
        ]
        counts = [len(chain) for chain in chains]
        width = max(counts, default=0)
        padded = [chain if len(chain) == width else chain + [0] * (width - len(chain)) for chain in chains]
        tokens = torch.from_numpy(np.array(padded, np.int64).reshape(len(states), width))
        return Draft.chains(tokens, torch.from_numpy(np.array(counts, np.int64)))

    def drop(self, state: _State) -> None:
        pass


class NgramDrafter(LookupDrafter[Any]):
    """Evidence is the number of context tokens shared with the place found, up to `MATCH_LIMIT`."""

    name = NGRAM

    def __init__(self, context: DrafterContext, native: bool = True) -> None:
        """`native`: use the native library where there is one."""
        lengths = context.speculation.ngram_min, context.speculation.ngram_max
        library = load_library() if native else None
        if library is None:
            super().__init__(PythonNgrams(*lengths, context.config.vocab_size))
        else:
            super().__init__(NativeNgrams(library, *lengths))
