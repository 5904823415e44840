"""The number of nodes that is found is the best of all numbers, each of them tried."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.engine.policy import allocate
from paceline.engine.policy.allocate import LEAST, RISK, Candidate, RowGroup


def offer_of(rng, rows, *, tree):
    """Rows of a few groups, as a drafter's record would have them."""
    groups, group_of = [], []
    for which in range(rng.integers(1, 4)):
        width = int(rng.integers(1, 65 if tree else 17))
        worth = np.sort(rng.random(width) ** 3)[::-1].copy()
        if tree and rng.random() < 0.5:
            worth[width // 2 :] = worth[width // 2]  # nodes that are worth the same
        shares = np.sort(rng.random(width))[::-1].copy() if tree else None
        count = int(rng.integers(1, rows + 1))
        groups.append(RowGroup(worth, shares, float(worth.sum()), count))
        group_of += [which] * count
    line = (float(rng.random()), 0.0 if tree else float(rng.random() / 8))
    rows = list(range(len(group_of)))
    return Candidate("tree" if tree else "chain", rows, [1] * len(rows), group_of, groups, line, {})


def rates_of(number, with_nodes, offers, explore):
    """Apply the formula, node by node: (tokens per second, nodes drafted on average)."""
    nodes = []
    for at, offer in enumerate(offers):
        for which, group in enumerate(offer.groups):
            for depth, worth in enumerate(group.expected_tokens):
                share = 1.0 if explore or group.shares is None else group.shares[depth]
                nodes += [(-worth, at, which, depth, share)] * group.rows
    tokens, drafted, deepest, rates = float(number), 0.0, {}, []
    for worth, at, _, depth, share in sorted(node for node in nodes if -node[0] >= LEAST)[: len(with_nodes)]:
        tokens, drafted, deepest[at] = tokens - worth, drafted + share, max(deepest.get(at, 0), depth + 1)
        seconds = np.interp(drafted, np.arange(1, len(with_nodes) + 1), with_nodes)
        seconds += sum(offers[one].line[0] + offers[one].line[1] * depth for one, depth in deepest.items())
        rates.append((tokens / seconds, drafted))
    return rates


@pytest.mark.parametrize("explore", [False, True])
@pytest.mark.parametrize("padded", [False, True])
def test_no_other_number_of_nodes_promises_more(padded, explore):
    rng = np.random.default_rng(int(padded))
    for _ in range(150):
        rows = int(rng.choice([1, 3, 16]))
        offers = [offer_of(rng, rows, tree=bool(tree)) for tree in rng.integers(0, 2, rng.integers(1, 3))]
        with_nodes = 1 + np.cumsum(rng.random(int(rng.choice([40, 1024]))) ** 4 / 10)
        if padded:
            with_nodes = with_nodes[np.minimum(np.arange(len(with_nodes)) // 16 * 16 + 15, len(with_nodes) - 1)]
        found = allocate.best(rows, with_nodes, offers, explore=explore)
        rates = rates_of(rows, with_nodes, offers, explore)
        if not rates:
            assert found == allocate.NOTHING
            continue
        given = [nodes for each in allocate.by_row(offers, found) for nodes in each]
        at = max(range(len(rates)), key=lambda at: rates[at][0])
        if explore:
            at = max(n for n, (rate, _) in enumerate(rates) if rate >= (1 - RISK) * rates[at][0] - 1e-12)
        assert found.rate == pytest.approx(rates[at][0], rel=1e-9)
        assert found.drafted == pytest.approx(rates[at][1], rel=1e-9)
        assert sum(given) == at + 1
        if not explore:
            promised = rows + sum(group.total * group.rows for offer in offers for group in offer.groups)
            hopeless = promised / (with_nodes[0] + min(sum(offer.line) for offer in offers))
            assert allocate.best(rows, with_nodes, offers, beat=found.rate * 0.999) == found
            assert allocate.best(rows, with_nodes, offers, beat=hopeless * 1.000001) == allocate.NOTHING


def test_each_row_drafts_by_the_method_that_promises_it_most():
    worth = np.array([0.5, 0.25])
    tree = Candidate("tree", [0, 1, 2], [1] * 3, [0, 0, 0], [RowGroup(worth, worth, 0.75, 3)], (1.0, 0.0), {})
    groups = [RowGroup(2 * worth, None, 1.5, 1), RowGroup(worth / 2, None, 0.375, 1)]
    chain = Candidate("chain", [1, 2], [9, 2], [0, 1], groups, (0.1, 0.1), {})
    first, second = allocate.mixed([tree, chain])
    assert (first.rows, first.group_of, first.groups[0].rows) == ([0, 2], [0, 0], 2)
    assert (second.rows, second.levels, [group.rows for group in second.groups]) == ([1], [9], [1])
    assert allocate.mixed([tree]) == allocate.mixed([chain._replace(rows=[7, 8])]) == []
    assert allocate.mixed([tree, chain._replace(rows=[2, 2], group_of=[1, 1])]) == []
