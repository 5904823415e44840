"""Inputs of block verification in kernels: p, q and the chains drawn from q, and where a chain's last token comes from.

The residual of a slot, p less the q of its child, is a function of p, q and two numbers: no distribution is written.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.core.draft import Draft
from paceline.verify.cuda.target_distribution import TargetDistribution
from paceline.verify.cuda.tiles import LogitTiles, P, divide, inverse, kernel, probability


class Q(NamedTuple):
    """The drafter's q, the tensor from which tokens were sampled."""

    probs: Tensor  # (M, Vq)
    stride: int
    place: Tensor | None  # (V,) int32, each token's column, -1: none; None: the columns are the target's tokens


class Chains(NamedTuple):
    """The drafted chains, and the intermediate results of block verification. Node i is the child of slot i."""

    tokens: Tensor  # (B, N)
    num_nodes: Tensor  # (B,)
    width: int  # N
    p_row: Tensor  # (B, N + 1) slot -> row of p
    q_row: Tensor  # (B, N + 1) slot -> row of q
    ratio: Tensor  # (B, N) p/q of each node's token
    scale: Tensor  # (B, N + 1) of each slot, as block.py
    excess: Tensor  # (B, N, splits) float64 sum of (scale p - q)+ at slot i
    surplus: Tensor  # (B, N) the excess of all splits
    stop: Tensor  # (B,) the slot the row stops at


class Sampled(NamedTuple):
    """The inputs of the kernels."""

    p: P
    q: Q
    chains: Chains
    tile: LogitTiles

    @staticmethod
    def of(draft: Draft, target: TargetDistribution, row_of: Tensor) -> Sampled:
        """Allocate what the kernels fill in, and compute the ratios. `target` is weighed."""
        assert draft.q is not None
        probs, ids = draft.q.probs, draft.q.ids
        probs = probs if probs.stride(1) == 1 else probs.contiguous()
        place = None
        if ids is not None:
            place = torch.full((target.p.vocab,), -1, dtype=torch.int32, device=probs.device)
            place.index_copy_(0, ids, torch.arange(ids.shape[0], dtype=torch.int32, device=probs.device))
        batch, width, real = draft.batch, draft.width, target.p.peak.new_empty
        chains = Chains(
            tokens=draft.tokens.contiguous(),
            num_nodes=draft.num_nodes.contiguous(),
            width=width,
            p_row=row_of.contiguous(),
            q_row=draft.q.row_of.contiguous(),
            ratio=real(batch, width),
            scale=real(batch, width + 1),
            excess=real(batch, width, target.tile.splits, dtype=torch.float64),
            surplus=real(batch, width),
            stop=torch.zeros_like(draft.num_nodes),
        )
        inputs = Sampled(target.p, Q(probs, probs.stride(0), place), chains, target.tile)
        _ratio[(triton.cdiv(batch * width, 64),)](*inputs[:3], batch * width, inputs.tile.dtype, 64)
        return inputs


@kernel
def _ratio(p, q, chains, count, DTYPE: tl.constexpr, NODES: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * NODES + tl.arange(0, NODES)
    row, node = at // chains.width, at % chains.width
    live = at < count
    live = live & (node < tl.load(chains.num_nodes + row, live, 0))
    slot = row * (chains.width + 1) + node
    token = tl.load(chains.tokens + at, live, 0)[:, None]
    target = probability(p, tl.load(chains.p_row + slot, live, 0), live, token, DTYPE)
    drafter = proposed(p, q, tl.load(chains.q_row + slot, live, 0), live, token, DTYPE)
    tl.store(chains.ratio + at, tl.sum(likelihood_ratio(target, drafter, DTYPE), 1), live)


@triton.jit
def proposed(p, q, row, live, token, DTYPE: tl.constexpr):
    """(ROWS, X) q of tokens (1 or ROWS, X), 0 where the drafter has no such token."""
    known = live[:, None] & (row >= 0)[:, None] & (token < p.vocab)
    column = token
    if q.place is not None:
        column = tl.load(q.place + token, token < p.vocab, -1)
        known = known & (column >= 0)
    return tl.load(q.probs + row[:, None] * q.stride + column, known, 0.0).to(DTYPE)


@triton.jit
def likelihood_ratio(p, q, DTYPE: tl.constexpr):
    """p/q as in block.likelihood_ratio."""
    ratio = tl.where(q > 0, divide(p, tl.where(q > 0, q, 1.0), DTYPE), 0.0)
    return tl.minimum(ratio, 1.7976931348623157e308 if tl.float64 == DTYPE else 3.4028234663852886e38)


@triton.jit
def last_weights(p, q, chains, row, slot, live, token, DTYPE: tl.constexpr):
    """(ROWS, X) weights of the token drawn at slots (ROWS,), of tokens (1 or ROWS, X): the residual, at a leaf p."""
    drafted = live & (slot < tl.load(chains.num_nodes + row, live, 0))
    slots = row * (chains.width + 1) + slot
    target = probability(p, tl.load(chains.p_row + slots, live, 0), live, token, DTYPE)
    drafter = proposed(p, q, tl.load(chains.q_row + slots, drafted, -1), drafted, token, DTYPE)
    a = tl.load(chains.scale + slots, drafted, 0.0)[:, None]
    share = inverse(tl.load(chains.surplus + row * chains.width + slot, drafted, 0.0), DTYPE)[:, None]
    # Share 0: a leaf; or rounding, or a broken q, leaves no excess, and p is unchanged.
    return tl.where(share > 0, positive(a * target - drafter) * share, target)


@triton.jit
def positive(x):
    """(x)+; NaN stays NaN."""
    return tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
