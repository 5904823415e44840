"""Filters of sequences: repetitions are found for a whole shard at once.

A small model at temperature 0 often repeats itself to the end. Such text is easy to draft and teaches little, so an
answer ends where its loop is established. All in numpy over the whole shard: a loop in Python over tokens would take
longer than generating them.
"""

from __future__ import annotations

import numpy as np

from paceline.training.data.store import Array, Sequences

GRAM = 16  # tokens; shortest passage whose repetition counts as a loop
TIMES = 3  # occurrences of a passage, after which a sequence ends


def gram_hashes(tokens: Array, size: int) -> Array:
    """Return (N - size + 1,) 64-bit hashes, one for every run of `size` tokens."""
    mixed = (tokens.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    mixed ^= mixed >> np.uint64(29)
    factor, total = np.uint64(0xD1342543DE82EF95), np.zeros(max(len(tokens) - size + 1, 0), np.uint64)
    for at in range(size):
        total = total * factor + mixed[at : at + len(total)]
    return total


def loop_ends(sequences: Sequences, size: int = GRAM) -> Array:
    """Return (S,) tokens of each sequence up to the end of the first passage that occurs `TIMES` times."""
    lengths, count = sequences.lengths, len(sequences.tokens)
    if count < size:
        return lengths
    owner = np.repeat(np.arange(len(sequences)), lengths)
    place = np.arange(count) - np.repeat(sequences.ends - lengths, lengths)
    hashes = gram_hashes(sequences.tokens, size)
    inside = owner[: len(hashes)] == owner[size - 1 :]
    inside &= sequences.answer[: len(hashes)]  # a prompt may repeat itself
    starts = np.flatnonzero(inside)
    keys = hashes[starts] ^ (owner[starts].astype(np.uint64) * np.uint64(0xC2B2AE3D27D4EB4F))
    order = np.argsort(keys, kind="stable")  # equal keys stay in the order of the text
    first = np.concatenate(([True], keys[order][1:] != keys[order][:-1])) if len(order) else np.zeros(0, bool)
    group = np.maximum.accumulate(np.where(first, np.arange(len(order)), 0))
    late = starts[order[np.arange(len(order)) - group >= TIMES - 1]]
    ends: Array = lengths.copy()
    np.minimum.at(ends, owner[late], place[late] + size)
    return ends


def without_loops(sequences: Sequences) -> Sequences:
    return sequences.cut(loop_ends(sequences))


def repeats(answer: Array) -> bool:
    """Return whether a passage of an answer occurs twice: these answers are reported apart."""
    hashes = gram_hashes(answer, GRAM)
    return len(np.unique(hashes)) < len(hashes)
