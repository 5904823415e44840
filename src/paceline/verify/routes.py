"""Which rule verifies which row: rows wholly drawn from q, of requests without a seed, use the rules for those."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.core.draft import Draft
from paceline.verify.walk import DrawKeys, SamplingMode


@dataclass(frozen=True, kw_only=True)
class RowRules:
    """The rows of a draft that each rule verifies, ascending. None: no row. On a CUDA device -1 entries are skipped."""

    walk: Tensor | None
    chain: Tensor | None = None
    tree: Tensor | None = None


def assign_rules(draft: Draft, draws: DrawKeys) -> RowRules:
    """Routes without -1. Reads device values."""
    if draft.q is None:
        return RowRules(walk=torch.arange(draft.batch, device=draft.tokens.device))
    sampled, is_chain = _sort(draft, draws)

    def rows(wanted: Tensor) -> Tensor | None:
        found = wanted.nonzero()[:, 0]
        return found if found.shape[0] else None

    return RowRules(walk=rows(~sampled), chain=rows(sampled & is_chain), tree=rows(sampled & ~is_chain))


def mask_rules(draft: Draft, draws: DrawKeys, *, only_chains: bool) -> RowRules:
    """(B,) each, -1 for the rows of the other rules, where some row may be sampled. The host reads nothing."""
    index = torch.arange(draft.batch, device=draft.tokens.device)
    sampled, is_chain = _sort(draft, draws)

    def rows(wanted: Tensor) -> Tensor:
        return torch.where(wanted, index, -1)

    if only_chains:
        return RowRules(walk=rows(~sampled), chain=rows(sampled))
    return RowRules(walk=rows(~sampled), chain=rows(sampled & is_chain), tree=rows(sampled & ~is_chain))


def _sort(draft: Draft, draws: DrawKeys) -> tuple[Tensor, Tensor]:
    """(B,) bool: the rows for law 2, and the rows that are chains."""
    assert draft.q is not None
    index = torch.arange(draft.width, device=draft.tokens.device)
    used = index < draft.num_nodes[:, None]
    from_q = draft.q.row_of.gather(1, draft.parents + 1) >= 0
    sampled = draws.by(SamplingMode.COIN) & (draft.num_nodes > 0) & (from_q | ~used).all(1)
    return sampled, ((draft.parents == index - 1) | ~used).all(1)
