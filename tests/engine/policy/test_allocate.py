"""The best prefix of nodes in falling order of expected tokens, against a slow reference."""

from __future__ import annotations

import random

import pytest

from paceline.engine.policy.allocate import Candidate, PlannedStep, RowGroup, best_prefix, token_weights
from paceline.engine.policy.costs import StepTimes
from paceline.engine.policy.priors import CPU
from tests.engine.policy.simulation import DEVICE


def candidate_of(rng, first, *, flat, cut):
    """A few groups of rows, as a drafter's record would have them; `first`: their lowest row; `cut`: some drafts have
    fewer nodes than they might."""
    groups = []
    for _ in range(rng.randint(1, 3)):
        width, count = rng.randint(1, 16), rng.randint(1, 5)
        expected, shares = (sorted([rng.random() for _ in range(width)], reverse=True) for _ in range(2))
        groups.append(RowGroup(list(range(first, first + count)), expected, shares if cut else [1.0] * width, 1.0))
        first += count
    levels = dict.fromkeys([row for group in groups for row in group.rows], 1)
    return Candidate(f"from {first}", groups, rng.random() / 50, rng.random(), flat, levels)


@pytest.mark.parametrize("prior", [CPU, DEVICE], ids=["cpu", "device"])
@pytest.mark.parametrize("seed", range(20))
def test_no_number_of_nodes_taken_one_by_one_has_a_higher_rate(seed, prior):
    rng = random.Random(seed)
    cut = prior is CPU  # on a device trees are not cut
    candidates = [candidate_of(rng, 0, flat=False, cut=False), candidate_of(rng, 50, flat=True, cut=cut)][
        : 1 + seed % 2
    ]
    nodes = [
        (-expected, at, number, depth, row, group.shares[depth])
        for at, of in enumerate(candidates)
        for number, group in enumerate(of.groups)
        for row in group.rows
        for depth, expected in enumerate(group.expected)
    ]
    times = StepTimes(prior)
    step = PlannedStep([None] * 20, [99] * 20, 400.0, times, 20, times.seconds(20), 0, {})
    tokens, drafted, slowest, deepest, highest, rows = 20.0, 0.0, 0.0, {}, (0.0, 0.0), {}
    for expected, at, _, depth, row, share in sorted(nodes):
        tokens, drafted, rows[row] = tokens - expected, drafted + share, depth + 1
        deepest[at] = 1 if candidates[at].is_flat else max(deepest.get(at, 0), depth + 1)
        slowest = max(slowest, step.seconds_with(drafted))
        seconds = slowest + sum(candidates[one].pass_s * most for one, most in deepest.items())
        rate = tokens / (seconds + sum(candidates[one].read_s for one in deepest) * min(tokens / 400, 1))
        if rate > highest[0]:
            highest = rate, drafted, dict(rows)
    found = best_prefix(step, candidates, 0.0)
    assert found.rate == pytest.approx(highest[0])
    assert found.nodes == pytest.approx(highest[1])
    assert {row: count for row, (_, count) in found.by_row().items()} == highest[2]
    most_s = 1.01 * step.plain_s + min(of.pass_s + of.read_s for of in candidates)
    longest = best_prefix(step, candidates, 0.0, risk=0.1)
    assert longest.nodes >= found.nodes
    assert longest.rate >= 0.9 * found.rate
    within = best_prefix(step, candidates, 0.0, 0.0, lambda tokens, seconds, read_s: seconds + read_s <= most_s)
    if within is not None:
        assert within.seconds + within.read_s <= most_s
        assert within.rate <= found.rate


def test_a_token_of_the_slowest_answer_weighs_most_and_the_mean_is_one():
    weights = token_weights([10, 100, 50], [1.0, 1.0, 2.0], ["a", "a", "b"])
    assert weights[1] > 1 > weights[0]
    assert weights[0] + weights[1] == pytest.approx(2)
    assert weights[2] == pytest.approx(1)
    assert token_weights([10, 100], [1.0, 1.0], ["a", "b"]) == {}
