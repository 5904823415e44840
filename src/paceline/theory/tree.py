"""Token trees: several guesses at one position, checked in the same pass.

A node is reached when every node on its path is accepted, and at most one child of a reached node can be accepted, so
siblings' conditional rates sum to 1 at most. Acceptance counts by depth: the accepted path reaches depth d if any node
there is reached, with the sum of their probabilities.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.errors import InvalidParameter
from paceline.theory import checks
from paceline.theory.acceptance import tokens_from_survival
from paceline.theory.speedup import Cost, cost_at

ROUNDING = 1e-9  # probability by which siblings may exceed 1


@dataclass(frozen=True)
class TokenTree:
    """Nodes in the order chosen, parents first; parent -1 is the last committed token, depth 1 its children."""

    parents: tuple[int, ...]
    depths: tuple[int, ...]
    reach: tuple[float, ...]  # probability that the node is accepted

    @property
    def depth(self) -> int:
        return max(self.depths, default=0)

    @property
    def survival(self) -> list[float]:
        """Return, by depth as a chain's, the probability that the accepted path reaches it."""
        levels = [
            math.fsum(reach for reach, depth in zip(self.reach, self.depths, strict=True) if depth == level)
            for level in range(1, self.depth + 1)
        ]
        return [min(1.0, reached) for reached in levels]

    @property
    def tokens(self) -> float:
        """Return tokens per pass, the one after the accepted path included."""
        return tokens_from_survival(self.survival)


def tree_tokens(parents: Sequence[int], conditional: Sequence[float]) -> float:
    """Return tokens per pass of any tree; `conditional[j]` is node j's rate given that its parent was accepted."""
    if len(parents) != len(conditional):
        raise InvalidParameter("conditional", f"has {len(conditional)} entries for {len(parents)} nodes")
    reach: list[float] = []
    depths: list[int] = []
    children: dict[int, float] = {}
    for node, (parent, rate) in enumerate(zip(parents, checks.probabilities("conditional", conditional), strict=True)):
        if not -1 <= parent < node:
            raise InvalidParameter("parents", f"node {node} has parent {parent}; parents come before their children")
        children[parent] = children.get(parent, 0.0) + rate
        _check_siblings(children[parent])
        reach.append(rate * (reach[parent] if parent >= 0 else 1.0))
        depths.append(depths[parent] + 1 if parent >= 0 else 1)
    return TokenTree(tuple(parents), tuple(depths), tuple(reach)).tokens


def best_tree(rates: Sequence[Sequence[float]], nodes: int) -> TokenTree:
    """Return the best tree of at most `nodes` nodes; `rates[d][r]` is how often the r-th guess at depth d + 1 is right.

    Greedy is optimal: reach only falls along a path, so the likeliest nodes always form a tree.
    """
    for level in rates:
        _check_siblings(math.fsum(checks.probabilities("rates", level)))
    checks.count("nodes", nodes)
    parents: list[int] = []
    depths: list[int] = []
    reach: list[float] = []
    frontier = _children(rates, parent=-1, depth=1, reach=1.0)
    heapq.heapify(frontier)
    while frontier and len(parents) < nodes:
        negative, depth, parent = heapq.heappop(frontier)
        parents.append(parent)
        depths.append(depth)
        reach.append(-negative)
        for child in _children(rates, parent=len(parents) - 1, depth=depth + 1, reach=-negative):
            heapq.heappush(frontier, child)
    return TokenTree(tuple(parents), tuple(depths), tuple(reach))


def tree_speedup(tree: TokenTree, draft_cost: float, verify_cost: Cost = 1.0) -> float:
    """Return the speed-up of a drafter that runs once per level; the pass checks every node."""
    drafting = tree.depth * checks.cost("draft_cost", draft_cost)
    return tree.tokens / (drafting + cost_at(verify_cost, len(tree.parents)))


def _children(
    rates: Sequence[Sequence[float]], *, parent: int, depth: int, reach: float
) -> list[tuple[float, int, int]]:
    """Return (-reach, depth, parent) of a node's children; guesses that are never right are no nodes."""
    if depth > len(rates):
        return []
    return [(-reach * rate, depth, parent) for rate in rates[depth - 1] if reach * rate > 0]


def _check_siblings(total: float) -> None:
    if total > 1 + ROUNDING:
        raise InvalidParameter("rates", f"of siblings sum to {total:g}; at most one of them is right, so to 1 at most")
