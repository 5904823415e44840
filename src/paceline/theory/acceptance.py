"""Tokens per pass from acceptance.

`survival[i]` is the probability that the accepted path reaches depth i + 1 of a draft, chain or tree; conditional rates
are given that it reached the depth before. A pass commits the accepted tokens and one more, recovered or bonus, so
tokens per pass are 1 + sum(survival): the 1 is already in every figure returned here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from operator import mul

from paceline.errors import InvalidParameter
from paceline.theory import checks


def token_acceptance(p: float, q: float) -> float:
    """Return the probability that a drafted token is accepted: the target gives it p, the drafter drew it with q."""
    checks.probability("p", p)
    if not checks.probability("q", q):
        raise InvalidParameter("q", "must be above 0: the drafter drew this token")
    return min(1.0, p / q)


def distribution_acceptance(p: Sequence[float], q: Sequence[float]) -> float:
    """Return acceptance over all tokens the drafter may draw: sum of min(p, q), one minus their total variation."""
    if len(p) != len(q):
        raise InvalidParameter("q", f"has {len(q)} entries where p has {len(p)}")
    for field, values in (("p", p), ("q", q)):
        total = math.fsum(checks.probabilities(field, values))
        if not math.isclose(total, 1, abs_tol=1e-6):
            raise InvalidParameter(field, f"must sum to 1, got {total}")
    return min(1.0, math.fsum(map(min, p, q)))


def geometric_survival(alpha: float, k: int) -> list[float]:
    """Return the survival where every token is accepted with probability alpha, independently of the others."""
    checks.probability("alpha", alpha)
    return [alpha**i for i in range(1, checks.count("k", k) + 1)]


def survival_from_counts(drafted: Sequence[int], accepted: Sequence[int]) -> list[float]:
    """Return, by depth, steps whose accepted path reached it over steps whose draft did; siblings count as one."""
    return [
        checks.probability("accepted", reached / steps)
        for steps, reached in zip(drafted, accepted, strict=True)
        if steps
    ]


def survival_from_conditional(rates: Sequence[float]) -> list[float]:
    return list(accumulate(checks.probabilities("rates", rates), mul))


def tokens_from_survival(survival: Sequence[float]) -> float:
    return math.fsum([1.0, *checks.probabilities("survival", survival)])


def tokens_per_pass(alpha: float, k: int) -> float:
    """Return tau(alpha, k) = (1 - alpha^(k+1)) / (1 - alpha), as a sum: exact at alpha = 1 and near it."""
    return tokens_from_survival(geometric_survival(alpha, k))


def alpha_for(tokens: float, k: int) -> float | None:
    """Return the alpha at which k drafted tokens give `tokens` per pass; None where even alpha = 1 gives fewer."""
    if checks.cost("tokens", tokens) > checks.count("k", k) + 1:
        return None
    if tokens <= 1:
        return 0.0
    low, high = 0.0, 1.0
    while low < (middle := (low + high) / 2) < high:  # until no float lies between them
        if tokens_per_pass(middle, k) < tokens:
            low = middle
        else:
            high = middle
    return high


def whole_prefix_tokens(rate: float, k: int) -> float:
    """Return tokens of drafts taken whole (k tokens) with probability `rate`, or not at all (one): R*K + (1 - R)."""
    checks.probability("rate", rate)
    return rate * checks.count("k", k, least=1) + (1 - rate)
