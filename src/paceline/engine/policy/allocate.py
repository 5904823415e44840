"""The order in which nodes of all rows are drafted: falling expected tokens. A plan is a prefix of it.

Expected tokens fall with each node of a draft, so a prefix leaves no gaps in any draft.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
MOST_ROWS = 4096  # rows; larger steps are timed as ones of this size, and no plan has more than a quarter as nodes
BELIEF = 0.55  # share of token weights, against weight 1 for every token: which answer ends last is a guess


class RowGroup(NamedTuple):
    """Rows of a candidate whose drafts have equal expectations."""

    rows: list[int]  # in the batch
    expected: Floats  # tokens by node, non-increasing; as long as a draft of these rows may be
    shares: Floats  # of drafts in which a node is drafted at all
    drafts: float  # that the expectations come from

    @property
    def total(self) -> float:
        return float(self.expected.sum())


class Candidate(NamedTuple):
    """The drafts that one method could make for some rows."""

    method: str
    groups: list[RowGroup]
    pass_s: float  # seconds of a pass of the drafter
    read_s: float  # seconds that it reads before it drafts
    is_flat: bool  # one pass makes the whole draft; else one pass a node
    levels: dict[int, int]  # by row


class Prefixes(NamedTuple):
    """Columns by number of nodes taken: 1, 2, ..."""

    tokens: Floats  # expected of all nodes
    nodes: Floats  # mean number that is drafted
    draft_s: Floats  # seconds of the drafters' passes
    read_s: Floats  # seconds of reading before them
    owner: Any  # the group of the node, over all candidates
    groups: list[tuple[Candidate, RowGroup]]

    def by_row(self, count: int) -> dict[int, tuple[Candidate, int]]:
        """Return candidate and nodes of each row that drafts, with the first `count` nodes taken."""
        plans: dict[int, tuple[Candidate, int]] = {}
        for (candidate, group), nodes in zip(self.groups, np.bincount(self.owner[:count]).tolist(), strict=False):
            each, further = divmod(nodes, len(group.rows))
            plans.update((row, (candidate, each + (at < further))) for at, row in enumerate(group.rows))
        return {row: plan for row, plan in plans.items() if plan[1]}


def prefixes(candidates: SequenceOf[Candidate]) -> Prefixes:
    groups = [(candidate, group) for candidate in candidates for group in candidate.groups]
    rows, sizes = [len(group.rows) for _, group in groups], [len(group.expected) for _, group in groups]
    expected = _joined([group.expected for _, group in groups], rows)
    share = _joined([group.shares for _, group in groups], rows)
    depth = _joined([np.arange(1.0, size + 1) for size in sizes], rows)
    owner = np.arange(len(groups)).repeat(np.multiply(rows, sizes))
    if sum(rows) > 1:
        order = (-expected).argsort(kind="stable")[: MOST_ROWS // 4]
        expected, share, depth, owner = expected[order], share[order], depth[order], owner[order]
    draft_s, read_s, first = np.zeros(len(owner)), np.zeros(len(owner)), 0
    for candidate in candidates:
        last = first + len(candidate.groups)
        its_own, first = (first <= owner) & (owner < last), last
        deepest = np.maximum.accumulate(its_own * (1.0 if candidate.is_flat else depth))
        draft_s, read_s = draft_s + candidate.pass_s * deepest, read_s + candidate.read_s * (deepest > 0)
    return Prefixes(expected.cumsum(), share.cumsum(), draft_s, read_s, owner, groups)


def _joined(columns: list[Floats], times: list[int]) -> Floats:
    """Join columns, each repeated as a whole."""
    if len(columns) == times[0] == 1:
        return columns[0]
    return np.concatenate([column for column, count in zip(columns, times, strict=True) for _ in range(count)])


def token_weights(remaining: list[int], pace: list[float], wait_groups: SequenceOf[str]) -> dict[int, float]:
    """Return the weight of a token by row, 1 on average over each wait group; none where no answer waits for another. A
    token of an answer that will end long before the others saves its caller little time: the probability that an answer
    ends last is taken to grow with the square of the steps that it still needs."""
    weights: dict[int, float] = {}
    for name in dict.fromkeys(wait_groups) if len(set(wait_groups)) < len(remaining) else ():
        rows = [row for row, of in enumerate(wait_groups) if of == name]
        squares = [(remaining[row] / pace[row]) ** 2 for row in rows]
        scale = BELIEF * len(rows) / max(sum(squares), 1e-9)
        weights.update((row, 1 - BELIEF + scale * one) for row, one in zip(rows, squares, strict=True))
    return weights
