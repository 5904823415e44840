"""Attention's work is dealt by the lengths of contexts: all of it once, and to no program much more than to another."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.models.backends.cuda.attention.division import KEYS, PROGRAMS, Division, chunks_of, tiles_of

GROUP, KV_HEADS, LONGEST = 4, 8, 8192
DECODES = np.linspace(100, 600, 31).astype(int).tolist()


def divided(counts: list[int], ends: list[int], tiles: int | None = None, path: int = 0) -> tuple[Division, np.ndarray]:
    """The division of a pass of so many rows of each sequence, and its shares (4, S). `tiles`: of its bucket."""
    tile, begin, count = tiles_of(np.arange(len(counts)).repeat(counts), GROUP)
    division = Division.of(sum(counts) * GROUP, tiles or len(begin), tile, path, KV_HEADS, LONGEST)
    pairs = zip(ends, counts, strict=True)
    reach = np.concatenate([np.arange(end - rows, end) + 1 for end, rows in pairs]).astype(np.int32)
    return division, division.dealt(begin, count, reach, max(ends)).reshape(4, -1)


def blocks_of(shares: np.ndarray, counts: list[int], ends: list[int]) -> np.ndarray:
    """(S,) about how many blocks each share has."""
    first = np.cumsum(counts) - counts
    owner = np.searchsorted(first, shares[0], side="right") - 1
    reach = np.array(ends)[owner] - np.array(counts)[owner] + shares[0] + shares[1] - first[owner]
    return np.where(shares[1] > 0, -(-reach // KEYS) / np.maximum(shares[3], 1), 0)


@pytest.mark.parametrize("tiles", [None, 64, 128])
@pytest.mark.parametrize("path", [0, 64])
@pytest.mark.parametrize("prefix", [0, 1900, 3870, 7900])
def test_each_turn_of_each_tile_is_dealt_once(prefix: int, path: int, tiles: int | None) -> None:
    counts, ends = [*[1] * 31, 225], [*DECODES, prefix + 225]
    _, begin, count = tiles_of(np.arange(32).repeat(counts), GROUP)
    division, shares = divided(counts, ends, tiles, path)
    dealt = [tuple(share) for share in shares.T.tolist() if share[1]]
    turns = {first: of for first, _, _, of in dealt}
    expected = [
        (first, rows, turn, turns[first])
        for first, rows in zip(begin.tolist(), count.tolist(), strict=True)
        for turn in range(turns[first])
    ]
    assert sorted(dealt) == expected
    assert shares.shape[1] == division.shares


def test_a_chunk_of_a_long_prompt_beside_decodes_is_spread_over_all_programs() -> None:
    counts, ends = [*[1] * 31, 225], [*DECODES, 4095]
    division, shares = divided(counts, ends, tiles=64)
    blocks = blocks_of(shares, counts, ends)
    assert not division.direct
    assert blocks.max() <= blocks.sum() / (PROGRAMS // KV_HEADS) + 1
    assert (np.diff(blocks) <= 0).all()  # the largest begin first


def test_the_tiles_of_a_bucket_that_are_padding_take_no_program_from_the_others() -> None:
    counts, ends = [*[1] * 31, 225], [*DECODES, 4095]
    few, many = (divided(counts, ends, tiles)[1] for tiles in (None, 64))
    used = int((few[1] > 0).sum())
    assert (few[:, :used] == many[:, :used]).all()
    assert not many[1, used:].any()


def test_one_long_context_among_trees_has_most_of_the_programs() -> None:
    _, shares = divided([5] * 8, [*[200] * 7, 8000], path=64)
    assert (shares[0] == 35).sum() == chunks_of(125) == 18
    assert shares[1, :18].tolist() == [5] * 18  # and they come first


@pytest.mark.parametrize("sequences", [128, 256])
def test_many_decodes_have_a_program_each_and_merge_nothing(sequences: int) -> None:
    division, shares = divided([1] * sequences, [512] * sequences)
    assert division.direct
    assert shares.tolist() == [list(range(sequences)), *([value] * sequences for value in (1, 0, 1))]


def test_scratch_does_not_grow_with_the_context_without_end() -> None:
    """Parts of 512 rows would take 2.1 GB with room for 131,072 tokens."""
    for longest, direct in ((8192, False), (131_072, True)):
        assert Division.of(512 * GROUP, 64, 128, 0, KV_HEADS, longest).direct == direct


def test_one_long_context_among_decodes_is_spread_over_all_programs() -> None:
    counts, ends = [1] * 32, [*[512] * 31, 8000]
    division, shares = divided(counts, ends)
    assert not division.direct
    assert blocks_of(shares, counts, ends).max() <= 16  # of 125


@pytest.mark.parametrize("rows", [1024, 2048])
def test_a_pass_full_of_prompt_has_programs_enough_and_merges_nothing(rows: int) -> None:
    assert divided([rows], [4096])[0].direct
    assert divided([*[1] * 31, rows], [*DECODES, 4096])[0].direct


def test_an_estimate_of_a_length_that_nothing_is_known_of_still_deals_every_tile() -> None:
    division = Division.of(2 * GROUP, 2, 64, 0, KV_HEADS, LONGEST)
    shares = division.dealt(np.array([0, 1]), np.array([1, 1]), np.zeros(2, np.int32), 2).reshape(4, -1)
    assert shares[:, :3].tolist() == [[0, 1, 0], [1, 1, 0], [0, 0, 0], [1, 1, 0]]
