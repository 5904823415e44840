"""Prompt lookup: find the last few tokens earlier in the same text and propose what followed them there.

For n from `ngram_max` down to `ngram_min` the most recent earlier occurrence of the last n tokens wins. The index maps
every n-gram, packed exactly into one integer, to where its most recent continuation begins: a step costs the same
however long the context is. Invariant: it holds the n-grams that end before the last indexed token, so the end of the
text never finds itself. What a step committed is indexed while the next pass is under way.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np
import torch

from paceline.draft import Draft
from paceline.drafters.base import Commit, DrafterContext, DraftRow, HostDrafter
from paceline.sequence import Sequence

MATCH_LIMIT = 16  # matches longer than this are not told apart
FEW = 16  # tokens that are looked through rather than indexed on the spot


class NgramIndex:
    """Where the continuations of a growing text's n-grams begin."""

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
        there is none. The last few tokens need not be indexed for it, unless one of them equals the very last: then a
        continuation may begin among them.
        """
        end, indexed = len(tokens), self.length
        last, bits, longest = tokens[-1], self._bits, self._tables[0][1]
        if end - indexed > FEW or tokens.index(last, indexed - 1 if indexed else 0) < end - 1:
            self.extend(tokens, end)
        key = self._key
        for token in tokens[self.length :]:
            key = (key << bits | token) & longest
        _, mask, table = self._tables[-1]
        if key & mask in table:  # else no longer one was seen either
            for n, mask, table in self._tables:
                if end > n and (at := table.get(key & mask)) is not None:
                    return n, at
        return 0, 0


def continuation(tokens: SequenceOf[int], start: int, count: int) -> list[int]:
    """What followed from `start` on; where the text ends the draft follows itself, so a repetition goes on."""
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


@dataclass(slots=True)
class _State:
    sequence: Sequence
    index: NgramIndex
    match: int = 0  # of the last proposal
    found: tuple[int, int, int] = (0, 0, 0)  # length of the text, match and where its continuation begins


class NgramDrafter(HostDrafter):
    name = "ngram"
    source = 0  # in `Draft.source`

    def __init__(self, context: DrafterContext) -> None:
        self._min, self._max = context.speculation.ngram_min, context.speculation.ngram_max
        self._vocab_size = context.config.vocab_size
        self._states: dict[str, _State] = {}
        self._behind: dict[str, Sequence] = {}  # decoded on, and not indexed yet

    def propose(self, rows: SequenceOf[DraftRow]) -> Draft:
        chains = [self._chain(row.sequence, row.budget) for row in rows]
        counts = [len(chain) for chain in chains]
        width = max(counts, default=0)
        if counts.count(width) == len(rows):
            return Draft.even(torch.from_numpy(np.array(chains, np.int64).reshape(len(rows), width)), self.source)
        padded = [chain if len(chain) == width else chain + [0] * (width - len(chain)) for chain in chains]
        tokens = torch.from_numpy(np.array(padded, np.int64))
        return Draft.chains(tokens, torch.from_numpy(np.array(counts, np.int64)), self.source)

    def match_length(self, sequence: Sequence) -> int:
        """Tokens of context that the last proposal's source shares, up to `MATCH_LIMIT`; 0: nothing was found."""
        state = self._states.get(sequence.key)
        return 0 if state is None else state.match

    def evidence(self, sequence: Sequence) -> int:
        """The same for the proposal it would make now: a function of the committed tokens alone."""
        return self._find(self._state(sequence))[0]

    def guess(self, sequence: Sequence, count: int) -> list[int]:
        return self._chain(sequence, count)

    def commit(self, commits: SequenceOf[Commit]) -> None:
        for commit in commits:
            sequence, end = commit.sequence, commit.first + commit.count
            # Of a prompt what was computed is taken in, so that indexing is spread over the chunks; what a decode
            # committed when it is asked for, or while the next pass is under way.
            if end >= len(sequence.tokens) - 1:
                self._behind[sequence.key] = sequence
            else:
                self._state(sequence).index.extend(sequence.tokens, end)

    def overlap(self) -> None:
        behind, self._behind = self._behind, {}
        for sequence in behind.values():
            self._state(sequence).index.extend(sequence.tokens, len(sequence.tokens))

    def admit(self, sequence: Sequence, start: int, end: int) -> None:
        self._states.pop(sequence.key, None)

    def release(self, sequence: Sequence) -> None:
        self._states.pop(sequence.key, None)
        self._behind.pop(sequence.key, None)

    def _state(self, sequence: Sequence) -> _State:
        state = self._states.get(sequence.key)
        if state is None or state.sequence is not sequence:
            state = _State(sequence, NgramIndex(self._min, self._max, self._vocab_size))
            self._states[sequence.key] = state
        return state

    def _find(self, state: _State) -> tuple[int, int]:
        """(match, where its continuation begins): asked when the policy plans and again when it drafts."""
        tokens = state.sequence.tokens
        length, match, start = state.found
        if length != len(tokens):
            n, start = state.index.find(tokens)
            match = match_length(tokens, start, n) if n else 0
            state.found = len(tokens), match, start
        return match, start

    def _chain(self, sequence: Sequence, budget: int) -> list[int]:
        state = self._state(sequence)
        state.match, start = self._find(state)
        return continuation(sequence.tokens, start, budget) if state.match else []
