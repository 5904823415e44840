"""Speed-up from tokens per pass.

A step drafts k tokens at `draft_cost` each and checks them in one pass that costs v(k) plain passes; plain decoding
pays 1 for every token. So speed-up = tau / (k * c + v(k)), which may fall below 1; k = 0 gives exactly 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from paceline.errors import InvalidParameter
from paceline.theory import checks
from paceline.theory.acceptance import alpha_for, geometric_survival, tokens_from_survival

# v(k) for k >= 1: a constant, or entry k - 1 of a sequence, or a function of k.
Cost: TypeAlias = float | Sequence[float] | Callable[[int], float]


@dataclass(frozen=True)
class Best:
    """The best length; k = 0 and a speed-up of 1 where no draft pays."""

    k: int
    speedup: float


def cost_at(verify_cost: Cost, k: int) -> float:
    """Return v(k); a pass that checks nothing is the unit."""
    if checks.count("k", k) == 0:
        return 1.0
    if callable(verify_cost):
        return checks.positive("verify_cost", verify_cost(k))
    if isinstance(verify_cost, Sequence):
        if k > len(verify_cost):
            raise InvalidParameter("verify_cost", f"is given up to k = {len(verify_cost)}, not for k = {k}")
        return checks.positive("verify_cost", verify_cost[k - 1])
    return checks.positive("verify_cost", verify_cost)


def step_cost(k: int, draft_cost: float, verify_cost: Cost = 1.0) -> float:
    """Return the cost of a whole step, in plain passes."""
    return k * checks.cost("draft_cost", draft_cost) + cost_at(verify_cost, k)


def speedup_from_survival(survival: Sequence[float], draft_cost: float, verify_cost: Cost = 1.0) -> float:
    """Return the speed-up of drafts as long as `survival`, which was measured or assumed."""
    return tokens_from_survival(survival) / step_cost(len(survival), draft_cost, verify_cost)


def speedup(alpha: float, k: int, draft_cost: float, verify_cost: Cost = 1.0) -> float:
    return speedup_from_survival(geometric_survival(alpha, k), draft_cost, verify_cost)


def best_length(survival: Sequence[float], draft_cost: float, verify_cost: Cost = 1.0) -> Best:
    """Return the length that pays most among those with known acceptance and cost; v(k) may have steps."""
    longest = min(len(survival), len(verify_cost)) if isinstance(verify_cost, Sequence) else len(survival)
    gains = [speedup_from_survival(survival[:k], draft_cost, verify_cost) for k in range(longest + 1)]
    k = max(range(len(gains)), key=gains.__getitem__)
    return Best(k, gains[k])


def best_k(alpha: float, draft_cost: float, verify_cost: Cost = 1.0, max_k: int = 64) -> Best:
    """Return the best k; where drafts cost nothing it is `max_k`."""
    return best_length(geometric_survival(alpha, max_k), draft_cost, verify_cost)


def break_even(k: int, draft_cost: float, verify_cost: Cost = 1.0) -> float | None:
    """Return the alpha above which drafts of k tokens gain; None: none. At k = 1 it is c + v(1) - 1."""
    needed = step_cost(checks.count("k", k, least=1), draft_cost, verify_cost)
    return None if needed >= k + 1 else alpha_for(needed, k)
