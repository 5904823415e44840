"""The formulas for one drafter on one machine: a row for every k, the best of them, the memory it takes.

The command line prints it, the plot draws it; neither computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.theory.acceptance import alpha_for, geometric_survival, tokens_from_survival, whole_prefix_tokens
from paceline.theory.roofline import Roofline, kv_capacity
from paceline.theory.speedup import Best, Cost, best_length, break_even, cost_at, speedup_from_survival
from paceline.theory.tree import best_tree, tree_speedup


@dataclass(frozen=True, kw_only=True)
class Case:
    """The input of a table. `survival` has an entry for every k; `siblings` are rates of guesses at one position."""

    survival: Sequence[float]
    draft_cost: float
    verify_cost: Cost = 1.0
    siblings: Sequence[float] = ()
    roofline: Roofline | None = None

    @property
    def max_k(self) -> int:
        return len(self.survival)

    @property
    def best(self) -> Best:
        return best_length(self.survival, self.draft_cost, self.verify_cost)

    @property
    def limited(self) -> bool:
        """Return whether the best k is the largest one tried."""
        return self.best.k == self.max_k

    def at_alpha(self, alpha: float) -> Case:
        """Return the case with these costs and another acceptance."""
        survival = geometric_survival(alpha, self.max_k)
        return Case(survival=survival, draft_cost=self.draft_cost, verify_cost=self.verify_cost, roofline=self.roofline)


@dataclass(frozen=True, kw_only=True)
class TableRow:
    """The figures of one k. Fields without input are None; `break_even_alpha` also where no acceptance would pay."""

    k: int
    tokens_per_pass: float
    verify_cost: float
    speedup: float
    alpha: float  # the constant acceptance that gives the same tokens per pass
    break_even_alpha: float | None
    whole_draft_rate: float  # R: all k accepted
    whole_prefix_tokens: float  # R * K + (1 - R)
    stop_batch: int | None  # with a roofline: the least batch that gains nothing; None there: every batch gains
    tree_tokens_per_pass: float | None
    tree_speedup: float | None


def row(case: Case, k: int) -> TableRow:
    survival = case.survival[:k]
    tokens, whole = tokens_from_survival(survival), survival[-1]
    alpha = alpha_for(tokens, k)
    assert alpha is not None, "k tokens and one more at most"
    tree = best_tree([case.siblings] * k, k) if case.siblings else None
    return TableRow(
        k=k,
        tokens_per_pass=tokens,
        verify_cost=cost_at(case.verify_cost, k),
        speedup=speedup_from_survival(survival, case.draft_cost, case.verify_cost),
        alpha=alpha,
        break_even_alpha=break_even(k, case.draft_cost, case.verify_cost),
        whole_draft_rate=whole,
        whole_prefix_tokens=whole_prefix_tokens(whole, k),
        stop_batch=case.roofline.stop_batch(tokens, k, case.draft_cost) if case.roofline else None,
        tree_tokens_per_pass=tree.tokens if tree else None,
        tree_speedup=tree_speedup(tree, case.draft_cost, case.verify_cost) if tree else None,
    )


def rows(case: Case) -> list[TableRow]:
    return [row(case, k) for k in range(1, case.max_k + 1)]


def best_tree_row(table: Sequence[TableRow]) -> TableRow | None:
    """Return the row whose tree of k nodes gains most; None without trees."""
    return max(table, key=lambda each: each.tree_speedup or 0.0) if table[0].tree_speedup is not None else None


@dataclass(frozen=True, kw_only=True)
class MemoryUse:
    """Bytes, and tokens of K/V that fit beside the weights."""

    target_bytes: float
    drafter_bytes: float
    kv_tokens_plain: int
    kv_tokens_drafting: int

    @property
    def lost_share(self) -> float | None:
        """The share of the K/V capacity; None where the target alone leaves none."""
        return 1 - self.kv_tokens_drafting / self.kv_tokens_plain if self.kv_tokens_plain else None


def memory_use(
    memory: float, target_bytes: float, kv_bytes: float, drafter_bytes: float, drafter_kv_bytes: float
) -> MemoryUse:
    return MemoryUse(
        target_bytes=target_bytes,
        drafter_bytes=drafter_bytes,
        kv_tokens_plain=kv_capacity(memory, target_bytes, kv_bytes),
        kv_tokens_drafting=kv_capacity(memory, target_bytes + drafter_bytes, kv_bytes + drafter_kv_bytes),
    )
