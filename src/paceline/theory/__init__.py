"""The speed-up of speculation in closed form: pure functions of acceptance and cost, without torch.

Costs are in plain target passes, so a speed-up of 1 is plain decoding. docs/theory.md derives every formula here.
"""

from __future__ import annotations

from paceline.theory.acceptance import (
    alpha_for,
    distribution_acceptance,
    geometric_survival,
    survival_from_conditional,
    survival_from_counts,
    token_acceptance,
    tokens_from_survival,
    tokens_per_pass,
    whole_prefix_tokens,
)
from paceline.theory.roofline import Roofline, kv_bytes_per_token, kv_capacity
from paceline.theory.speedup import Best, Cost, best_k, best_length, break_even, cost_at, speedup, speedup_from_survival
from paceline.theory.tree import TokenTree, best_tree, tree_speedup, tree_tokens

__all__ = [
    "Best",
    "Cost",
    "Roofline",
    "TokenTree",
    "alpha_for",
    "best_k",
    "best_length",
    "best_tree",
    "break_even",
    "cost_at",
    "distribution_acceptance",
    "geometric_survival",
    "kv_bytes_per_token",
    "kv_capacity",
    "speedup",
    "speedup_from_survival",
    "survival_from_conditional",
    "survival_from_counts",
    "token_acceptance",
    "tokens_from_survival",
    "tokens_per_pass",
    "tree_speedup",
    "tree_tokens",
    "whole_prefix_tokens",
]
