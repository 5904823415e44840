"""The order in which nodes of all rows are drafted: falling expected tokens. A plan is a prefix of it.

Expected tokens fall with each node of a draft, so a prefix leaves no gaps in any draft. Nodes are taken one by one, and
no further than a plan could still be better for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace
from typing import NamedTuple

from paceline.core.sequence import Sequence
from paceline.engine.policy.costs import StepTimes

MOST_NODES = 1024  # of a plan
BELIEF = 0.55  # share of token weights, against weight 1 for every token: which answer ends last is a guess


class RowGroup(NamedTuple):
    """Rows of a candidate whose drafts have equal expectations."""

    rows: list[int]  # in the batch
    expected: list[float]  # tokens by node, non-increasing; as long as a draft of these rows may be
    shares: list[float]  # of drafts in which a node is drafted at all
    drafts: float  # that the expectations come from


@dataclass(eq=False, slots=True)
class Candidate:
    """The drafts that one method could make for some rows."""

    method: str
    groups: list[RowGroup]
    pass_s: float  # seconds of a pass of the drafter
    read_s: float  # seconds that it reads before it drafts
    is_flat: bool  # one pass makes the whole draft; else one pass a node
    levels: dict[int, int]  # by row
    best: Prefix | None = None  # for the only row of a step, once it was searched for

    @property
    def drafts(self) -> float:
        """Return the drafts that its expectations come from."""
        return min([group.drafts for group in self.groups])


class PlannedStep(NamedTuple):
    """The step that is planned."""

    sequences: SequenceOf[Sequence]
    remaining: list[int]  # tokens that each row may still commit
    left: float  # tokens that all rows are expected to commit, at least 1
    times: StepTimes
    base: int  # decode rows, plus nodes of rows whose k is fixed
    plain_s: float
    other_rows: int  # of prompts
    weights: Mapping[int, float]  # of tokens, by row; empty: 1 each

    def seconds_with(self, nodes: float) -> float:
        """Return the seconds of the pass with a mean number of drafted nodes. Prompt rows are computed whatever is
        drafted, so only the time that nodes add to them counts."""
        whole = max(int(nodes), 1)
        seconds = self._seconds(whole)
        if nodes > whole:
            seconds += (nodes - whole) * (self._seconds(whole + 1) - seconds)
        return seconds

    def _seconds(self, nodes: int) -> float:
        seconds = self.times.seconds(self.base + self.other_rows + nodes, drafted=True)
        if self.other_rows:
            seconds -= self.times.seconds(self.base + self.other_rows + 1, drafted=True)
            seconds += self.times.seconds(self.base + 1, drafted=True)
        return seconds

    def free_nodes(self, nodes: int) -> int:
        """Return how many nodes behind these a pass computes in equal time, since it is padded; at least 1."""
        rows = self.base + self.other_rows + nodes
        return max(self.times.padded(rows + 1) - rows, 1)


class Prefix(NamedTuple):
    """The first nodes of some candidates."""

    rate: float  # tokens per second
    nodes: float  # mean number that is drafted
    tokens: float  # expected of the step
    seconds: float  # of the step without reading
    read_s: float
    groups: list[tuple[Candidate, RowGroup]]
    taken: list[tuple[int, int]]  # group and nodes, in order

    def by_row(self) -> dict[int, tuple[Candidate, int]]:
        """Return candidate and nodes of each row that drafts."""
        counts, plans = [0] * len(self.groups), dict[int, tuple[Candidate, int]]()
        for at, count in self.taken:
            counts[at] += count
        for (candidate, group), count in zip(self.groups, counts, strict=True):
            each, further = divmod(count, len(group.rows))
            drafting = group.rows if each else group.rows[:further]
            plans.update((row, (candidate, each + (at < further))) for at, row in enumerate(drafting))
        return plans


def best_prefix(
    step: PlannedStep,
    candidates: SequenceOf[Candidate],
    least: float,
    risk: float = 0.0,
    is_allowed: Callable[[float, float, float], bool] | None = None,
) -> Prefix | None:
    """Return the prefix of the highest rate, or with `risk` the longest one whose rate is lower by that share at most.
    The search ends where no further node could lead to a rate of `least` or of what was found.

    `is_allowed`: of the tokens of the step, its seconds without reading, and those of reading; None: all are allowed.
    """
    groups = [(candidate, group) for candidate in candidates for group in candidate.groups]
    heap = [(-group.expected[0], at, 0) for at, (_, group) in enumerate(groups)]
    heapify(heap)
    rest = sum([len(group.rows) * sum(group.expected) for _, group in groups])  # tokens of the nodes not yet taken
    deepest: dict[str, int] = {}  # by method
    tokens, nodes, drafted, draft_s, read_s, pass_s = float(len(step.sequences)), 0, 0.0, 0.0, 0.0, 0.0
    taken, best, highest = list[tuple[int, int]](), None, 0.0
    while heap and nodes < MOST_NODES:
        expected, at, depth = heap[0]
        candidate, group = groups[at]
        if depth == deepest.get(candidate.method, 0):
            deepest[candidate.method] = depth + 1
            draft_s += candidate.pass_s if depth == 0 or not candidate.is_flat else 0.0
            read_s += candidate.read_s if depth == 0 else 0.0
        waiting = len(group.rows)
        while waiting:
            count = min(step.free_nodes(nodes), waiting) if waiting > 1 else 1
            waiting, nodes, drafted = waiting - count, nodes + count, drafted + count * group.shares[depth]
            tokens, rest = tokens - count * expected, rest + count * expected
            taken.append((at, count))
            pass_s = max(pass_s, step.seconds_with(drafted))
            rate = tokens / (pass_s + draft_s + read_s * min(tokens / step.left, 1.0))
            if rate < (1 - risk) * highest or (is_allowed and not is_allowed(tokens, pass_s + draft_s, read_s)):
                continue
            best, highest = (rate, drafted, tokens, pass_s + draft_s, read_s, len(taken)), max(rate, highest)
        if depth + 1 < len(group.expected):
            heapreplace(heap, (-group.expected[depth + 1], at, depth + 1))
        else:
            heappop(heap)
        if tokens + rest < (1 - risk) * max(least, highest) * (pass_s + draft_s):
            break
    return best and Prefix(*best[:5], groups, taken[: best[5]])


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
