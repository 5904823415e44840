"""The index: growth, full rings, positions near their limit."""

from __future__ import annotations

import random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.drafters.lookup import index as suffix_index
from paceline.drafters.lookup.index import DEPTH, LEVELS, Context, SuffixIndex
from tests.drafters.lookup.naive import common_suffix


@settings(max_examples=150, deadline=None)
@given(st.lists(st.lists(st.integers(0, 3), max_size=70), max_size=8), st.booleans())
def test_one_by_one_in_bulk_and_grown_are_the_same(pieces, grow):
    single, bulk = SuffixIndex(64 if grow else 1024), SuffixIndex(64 if grow else 1024)
    whole = []
    for piece in pieces:
        whole += piece
        for index in (single, bulk):
            if grow:
                index.make_room(len(piece), 1 << 20)
        for token in piece:
            single.extend([token])
        bulk.extend(np.array(piece, np.int32))
    assert single.tokens().tolist() == bulk.tokens().tolist() == whole
    assert single._recent == bulk._recent
    for one, other in zip(single._chains, bulk._chains, strict=True):
        assert one[0].tolist() == other[0].tolist()
        assert one[1].tolist() == other[1].tolist()


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 2), min_size=100, max_size=250), st.lists(st.integers(9, 90), min_size=1))
def test_a_full_ring_forgets_the_oldest_and_finds_the_rest(tokens, sizes):
    index, at = SuffixIndex(64), 0
    while at < len(tokens):
        size = sizes[at % len(sizes)]
        index.extend(tokens[at : at + size])
        at += size
        seen = tokens[:at]
        assert index.tokens().tolist() == seen[-64:]
        for level, n in enumerate(LEVELS):
            matches = {}
            for position in index.occurrences(level, Context(seen), matches):
                match = matches[position]
                start = position - DEPTH  # the text begins at position DEPTH
                assert match >= n
                assert match == common_suffix(seen, start, seen)
                assert start > len(seen) - 64
    assert index.nbytes == SuffixIndex.bytes_for(64)


def test_positions_start_again_before_they_overflow(monkeypatch):
    monkeypatch.setattr(suffix_index, "_LAST_POSITION", 300)
    index = SuffixIndex()
    noise = random.Random(0)
    tokens = [noise.randrange(3) for _ in range(1000)]
    for first in range(0, 1000, 7):
        index.extend(tokens[first : first + 7])
        assert index.tokens().tolist()[-40:] == tokens[: first + 7][-40:]
        assert index.end < 400
    assert index.occurrences(LEVELS.index(1), Context(tokens), {})
