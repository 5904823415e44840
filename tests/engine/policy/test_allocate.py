"""Prefixes of nodes in falling order of expected tokens, against a slow reference."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.engine.policy.allocate import Candidate, RowGroup, prefixes, token_weights


def candidate_of(rng, first, *, flat):
    """A few groups of rows, as a drafter's record would have them; `first`: their lowest row."""
    groups = []
    for _ in range(rng.integers(1, 4)):
        width, count = int(rng.integers(1, 17)), int(rng.integers(1, 6))
        expected, shares = (np.sort(rng.random(width))[::-1].copy() for _ in range(2))
        groups.append(RowGroup(list(range(first, first + count)), expected, shares, 1.0))
        first += count
    levels = dict.fromkeys([row for group in groups for row in group.rows], 1)
    return Candidate(f"from {first}", groups, rng.random(), rng.random(), flat, levels)


@pytest.mark.parametrize("seed", range(20))
def test_columns_and_rows_are_those_of_nodes_taken_one_by_one(seed):
    rng = np.random.default_rng(seed)
    candidates = [candidate_of(rng, 0, flat=False), candidate_of(rng, 50, flat=True)][: 1 + seed % 2]
    nodes = [
        (-expected, at, row, depth, group.shares[depth])
        for at, of in enumerate(candidates)
        for group in of.groups
        for row in group.rows
        for depth, expected in enumerate(group.expected)
    ]
    found = prefixes(candidates)
    tokens = drafted = 0.0
    deepest, of_row = {}, {}
    for count, (expected, at, row, depth, share) in enumerate(sorted(nodes)):
        tokens, drafted, of_row[row] = tokens - expected, drafted + share, depth + 1
        deepest[at] = 1 if candidates[at].is_flat else max(deepest.get(at, 0), depth + 1)
        assert found.tokens[count] == pytest.approx(tokens)
        assert found.draft_s[count] == pytest.approx(sum(candidates[one].pass_s * d for one, d in deepest.items()))
        assert found.read_s[count] == pytest.approx(sum(candidates[one].read_s for one in deepest))
        given = found.by_row(count + 1)
        assert sum(number for _, number in given.values()) == count + 1
        if seed % 2 == 0 and all(len(group.rows) == 1 for group in candidates[0].groups):
            assert {row: number for row, (_, number) in given.items()} == of_row
            assert found.nodes[count] == pytest.approx(drafted)
    assert found.nodes[-1] == pytest.approx(drafted)


def test_a_token_of_the_slowest_answer_weighs_most_and_the_mean_is_one():
    weights = token_weights([10, 100, 50], [1.0, 1.0, 2.0], ["a", "a", "b"])
    assert weights[1] > 1 > weights[0]
    assert weights[0] + weights[1] == pytest.approx(2)
    assert weights[2] == pytest.approx(1)
    assert token_weights([10, 100], [1.0, 1.0], ["a", "b"]) == {}
