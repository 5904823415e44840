"""The number of nodes each row of a step drafts: the allocation with the most expected tokens per second.

The rate of an allocation is (rows + sum of expected tokens over its nodes) / (step seconds(rows + nodes) + draft
seconds). Nodes of all rows are taken in falling order of expected tokens while the rate rises. Rows with equal
expectations form a `RowGroup`; the n-th nodes of its rows are one level. Levels are taken whole, and the last one row
by row where the best number may lie inside it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from collections.abc import Sequence as SequenceOf
from functools import lru_cache
from itertools import compress
from typing import NamedTuple

import numpy as np

from paceline.config import MAX_K
from paceline.engine.policy.costs import MAX_NODES, Floats, Ints

LEAST = 0.005  # expected tokens of a node below which it is never drafted
RISK = 0.05  # share of the best rate that an exploring plan may give up to learn the cost of more nodes
BELIEF = 0.7  # share of token weights, against weight 1 for every token: which answer ends last is a guess
COUNTS, ONES = np.arange(1.0, MAX_NODES + 1), np.ones(MAX_K)


class RowGroup(NamedTuple):
    """Rows of a candidate whose drafts have equal expectations."""

    expected_tokens: Floats  # by node, non-increasing; as long as a draft of these rows may be
    shares: Floats | None  # of drafts in which a node is drafted at all; None: 1 each
    total: float  # expected tokens of a draft with all nodes
    rows: int


class Candidate(NamedTuple):
    """The drafts that one method could make for some rows."""

    method: str
    rows: SequenceOf[int]  # in the batch
    levels: SequenceOf[int]  # by row
    group_of: list[int]  # by row
    groups: list[RowGroup]
    line: tuple[float, float]  # seconds of the draft: a + b depth; of trees, made in one pass, b is 0
    token_weights: dict[int, float]  # by row of the batch; empty: 1 each
    key: Hashable = None  # candidates of one key are equal until the policy learns; None: compare nothing


class Allocation(NamedTuple):
    rate: float = 0.0  # tokens per second
    nodes: SequenceOf[int] = ()  # of each row, by group of all candidates
    further: tuple[int, int] = 0, 0  # a group, and the number of its rows that have one node more
    drafted: float = 0.0  # mean number of these nodes that are drafted


class _Levels(NamedTuple):
    """Columns by level, in the order in which levels are taken."""

    expected: Floats
    share: Floats
    rows: Floats
    group: Ints
    draft_s: Floats  # seconds of all drafts once this level and those before it are taken


NOTHING = Allocation()


def best(
    num_sequences: int,
    with_nodes: Floats,
    candidates: SequenceOf[Candidate],
    *,
    beat: float = 0.0,
    explore: bool = False,
) -> Allocation:
    """Return the allocation of the highest rate; NOTHING if no allocation can exceed the rate `beat`.

    `with_nodes`: seconds of a step with 1, 2, ... nodes. `explore`: the largest allocation whose rate is within RISK of
    the best, with every node drafted. Expected tokens fall with each node, so the best nodes leave no gaps in a draft.
    """
    groups = [group for candidate in candidates for group in candidate.groups]
    most = num_sequences + sum([group.total * group.rows for group in groups])
    if not groups or most <= beat * (with_nodes.item(0) + min([sum(each.line) for each in candidates])):
        return NOTHING
    expected, share, rows, group_of, draft_s = _levels(candidates, groups, len(with_nodes), explore)
    if not len(expected):
        return NOTHING
    at, tokens, drafted = COUNTS[: len(with_nodes)], (expected * rows).cumsum(), (share * rows).cumsum()
    tokens += num_sequences
    pass_s = np.interp(drafted, at, with_nodes)
    rates = tokens / (pass_s + draft_s)
    last, left_out = int(rates.argmax()), 0  # the last level, and its rows without a node
    rate, number = rates.item(last), drafted.item(last)
    if explore or len(groups) < sum([group.rows for group in groups]):
        # The last level may be given to some rows only: try every number of rows, where the seconds of the level before
        # would be enough to match the best rate.
        pass_s[1:] = pass_s[:-1].copy()
        pass_s[0] = with_nodes[0]
        levels = np.flatnonzero(tokens / (pass_s + draft_s) >= rate * (1 - RISK if explore else 1))
        each = rows[levels].astype(np.int64)
        levels = levels.repeat(each)
        out = each.cumsum().repeat(each) - np.arange(1, len(levels) + 1)
        drafted = drafted[levels] - out * share[levels]
        rates = (tokens[levels] - out * expected[levels]) / (np.interp(drafted, at, with_nodes) + draft_s[levels])
        place = int(rates.argmax())
        if explore:
            place = int(np.flatnonzero(rates >= (1 - RISK) * rates[place])[-1])
        last, left_out, rate, number = levels.item(place), out.item(place), rates.item(place), drafted.item(place)
    nodes: list[int] = np.bincount(group_of[:last], minlength=len(groups)).tolist()
    return Allocation(rate, nodes, (group_of.item(last), int(rows.item(last)) - left_out), number)


def _levels(candidates: SequenceOf[Candidate], groups: SequenceOf[RowGroup], limit: int, explore: bool) -> _Levels:
    """Return the levels above LEAST, at most `limit` nodes."""
    expected = groups[0].expected_tokens
    group_of, depth = _columns(tuple([len(group.expected_tokens) for group in groups]))
    share = np.concatenate(
        [ONES[: len(group.expected_tokens)] if explore or group.shares is None else group.shares for group in groups]
    )
    if len(groups) > 1:
        expected = np.concatenate([group.expected_tokens for group in groups])
        order = (-expected).argsort(kind="stable")
        expected, share, group_of, depth = expected[order], share[order], group_of[order], depth[order]
    count = int(np.count_nonzero(expected >= LEAST))
    rows = np.array([float(group.rows) for group in groups])[group_of[:count]]
    if sum([group.rows for group in groups]) * MAX_K > limit:
        total = rows.cumsum()
        if count and total[-1] > limit:
            count = int(total.searchsorted(limit)) + 1
            rows = rows[:count]
            rows[-1] -= total[count - 1] - limit
    expected, share, group_of, depth = expected[:count], share[:count], group_of[:count], depth[:count]
    return _Levels(expected, share, rows, group_of, _draft_seconds(candidates, group_of, depth))


def _draft_seconds(candidates: SequenceOf[Candidate], group_of: Ints, depth: Floats) -> Floats:
    """Return, for each level, the draft seconds once that level and all before it are taken."""
    if len(candidates) == 1:
        a, b = candidates[0].line
        return a + b * np.maximum.accumulate(depth)
    seconds, first = np.zeros(len(depth)), 0
    for candidate in candidates:
        (a, b), end = candidate.line, first + len(candidate.groups)
        its_own = (first <= group_of) & (group_of < end)
        seconds += np.maximum.accumulate(np.where(its_own, a + b * depth, 0.0))
        first = end
    return seconds


@lru_cache(256)
def _columns(sizes: tuple[int, ...]) -> tuple[Ints, Floats]:
    """Return the group and the depth of each node of groups with these numbers of nodes."""
    return np.arange(len(sizes)).repeat(sizes), np.concatenate([COUNTS[:size] for size in sizes])


def by_row(candidates: SequenceOf[Candidate], allocation: Allocation) -> list[list[int]]:
    """Return the nodes of each row of each candidate; the first rows of a group have the further node."""
    nodes_of, nodes, (further, left) = [], iter(allocation.nodes), allocation.further
    for candidate in candidates:
        each = [next(nodes) for _ in candidate.groups]
        of_rows = [each[group] for group in candidate.group_of]
        if 0 <= further < len(each):
            for at, group in enumerate(candidate.group_of):
                if group == further and left:
                    of_rows[at] += 1
                    left -= 1
        further -= len(each)
        nodes_of.append(of_rows)
    return nodes_of


def mixed(candidates: SequenceOf[Candidate]) -> list[Candidate]:
    """Return candidates in which each row has the method with the most expected tokens; none where that is one method
    for all rows."""
    if len(candidates) < 2:
        return []
    best_of: dict[int, tuple[float, int]] = {}
    for which, candidate in enumerate(candidates):
        totals = [(group.total, which) for group in candidate.groups]
        for row, group in zip(candidate.rows, candidate.group_of, strict=True):
            if row not in best_of or totals[group] > best_of[row]:
                best_of[row] = totals[group]
    method_of = {row: which for row, (_, which) in best_of.items()}
    used = sorted(set(method_of.values()))
    if len(used) < 2:
        return []
    return [_part(candidates[at], [method_of[row] == at for row in candidates[at].rows]) for at in used]


def _part(candidate: Candidate, chosen: list[bool]) -> Candidate:
    """Return the candidate with its chosen rows alone."""
    columns = candidate.rows, candidate.levels, candidate.group_of
    rows, levels, of_rows = (list(compress(column, chosen)) for column in columns)
    place = {group: at for at, group in enumerate(dict.fromkeys(of_rows))}
    groups = [candidate.groups[group]._replace(rows=of_rows.count(group)) for group in place]
    key = None if candidate.key is None else (candidate.key, *chosen)
    group_of = [place[group] for group in of_rows]
    return Candidate(candidate.method, rows, levels, group_of, groups, candidate.line, candidate.token_weights, key)


def token_weights(
    remaining: SequenceOf[int], pace: SequenceOf[float], wait_groups: Iterable[SequenceOf[int]]
) -> dict[int, float]:
    """Return the weight of a token by row, 1 on average over each wait group: a token of an answer that will end long
    before the others saves its caller little time.

    `remaining`: tokens that each row may still commit; `pace`: its tokens per step; `wait_groups`: rows of each. The
    probability that an answer ends last is taken to grow with the square of the steps it still needs.
    """
    weights: dict[int, float] = {}
    for rows in wait_groups:
        squares = [(remaining[row] / pace[row]) ** 2 for row in rows]
        scale = BELIEF * len(rows) / max(sum(squares), 1e-9)
        weights.update((row, 1 - BELIEF + scale * one) for row, one in zip(rows, squares, strict=True))
    return weights
