"""Law 2 on a device: common parts of the rules for chains and trees drawn from q.

After children of a slot were deleted, its p is the excess of p over q, and its q is without them: a function of p, q
and three numbers for each deleted child (the slot's a at that time, the sum of the excess, the rest of q). So no
distribution is rewritten; every reader of the slot applies the numbers again. Where a chain stops, the slot's one child
was deleted.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.core.draft import Draft
from paceline.verify.cuda import tiles
from paceline.verify.cuda.target_distribution import TargetDistribution
from paceline.verify.cuda.tiles import P, Tile, divide, inverse, kernel, my_rows, probability


class Q(NamedTuple):
    """The drafter's q, the tensor from which tokens were sampled."""

    probs: Tensor  # (M, Vq)
    stride: int
    place: Tensor | None  # (V,) int32, each token's column, -1: none; None: the columns are the target's tokens


class Trees(NamedTuple):
    """The drafts, and the intermediate results of the rules."""

    tokens: Tensor  # (B, N)
    parents: Tensor  # (B, N)
    depth: Tensor  # (B, N)
    num_nodes: Tensor  # (B,)
    width: int  # N
    p_row: Tensor  # (B, N + 1) slot -> row of p
    q_row: Tensor  # (B, N + 1) slot -> row of q
    child: Tensor  # (B, N + 1) each slot's first child, -1: none
    sibling: Tensor  # (B, N) the next child of the same parent, -1: none
    ratio: Tensor  # (B, N) p/q of each node's token at its parent, before any deletion
    a: Tensor  # (B, N + 1) of each slot, after deletions so far
    before: Tensor  # (B, N) a of the parent when the node was deleted
    excess: Tensor  # (B, N, splits) float64 sum of (a p - q)+ at the parent when the node was deleted
    rest: Tensor  # (B, N, splits) float64 sum of the parent's q without the node and those deleted before
    surplus: Tensor  # (B, N) the excess of all splits
    mass: Tensor  # (B, N) the rest of all splits
    ahead: Tensor  # (B, N, 3) the parent's p and q of the next sibling's token before the deletion, and q as drafted
    stop: Tensor  # (B,) the slot the row stops at


class Sampled(NamedTuple):
    """The inputs of the rules' kernels."""

    p: P
    q: Q
    trees: Trees
    tile: Tile

    @staticmethod
    def of(draft: Draft, target: TargetDistribution, row_of: Tensor) -> Sampled:
        """`target` is weighed."""
        assert draft.q is not None
        probs, ids = draft.q.probs, draft.q.ids
        probs = probs if probs.stride(1) == 1 else probs.contiguous()
        place = None
        if ids is not None:
            place = torch.full((target.p.vocab,), -1, dtype=torch.int32, device=probs.device)
            place.index_copy_(0, ids, torch.arange(ids.shape[0], dtype=torch.int32, device=probs.device))
        batch, width, splits = draft.batch, draft.width, target.tile.splits
        number, real = draft.tokens.new_empty, target.p.peak.new_empty
        trees = Trees(
            tokens=draft.tokens.contiguous(),
            parents=draft.parents.contiguous(),
            depth=draft.depth.contiguous(),
            num_nodes=draft.num_nodes.contiguous(),
            width=width,
            p_row=row_of.contiguous(),
            q_row=draft.q.row_of.contiguous(),
            child=number(batch, width + 1),
            sibling=number(batch, width),
            ratio=real(batch, width),
            a=real(batch, width + 1),
            before=real(batch, width),
            excess=real(batch, width, splits, dtype=torch.float64),
            rest=real(batch, width, splits, dtype=torch.float64),
            surplus=real(batch, width),
            mass=torch.zeros_like(draft.tokens, dtype=target.tile.torch_dtype),
            ahead=real(batch, width, 3),
            stop=torch.zeros_like(draft.num_nodes),
        )
        found = Sampled(target.p, Q(probs, probs.stride(0), place), trees, target.tile)
        rows = min(tiles.ROWS, 16)  # the kernel compares pairs of nodes
        _link_nodes[(triton.cdiv(batch, rows),)](trees, batch, rows, tiles.steps(width + 1), num_warps=4)
        _ratio[(triton.cdiv(batch * width, 64),)](*found[:3], batch * width, found.tile.dtype, 64)
        return found


@kernel
def _link_nodes(trees, batch, ROWS: tl.constexpr, NODES: tl.constexpr):
    """Every slot's first child, every node's next sibling."""
    row, live = my_rows(batch, ROWS)
    node, slot = tl.arange(0, NODES)[None, None, :], tl.arange(0, NODES)[None, :]
    count = tl.load(trees.num_nodes + row, live, 0)
    used = live[:, None, None] & (node < count[:, None, None])
    above = tl.load(trees.parents + row[:, None, None] * trees.width + node, used, -2)  # (ROWS, 1, NODES)
    mine = used & (above == slot[:, :, None] - 1)
    first = tl.min(tl.where(mine, node, NODES), 2)
    here = live[:, None] & (slot <= trees.width)
    tl.store(trees.child + row[:, None] * (trees.width + 1) + slot, tl.where(first < NODES, first, -1), here)
    here = live[:, None] & (slot < count[:, None])
    parent = tl.load(trees.parents + row[:, None] * trees.width + slot, here, -3)
    younger = used & (above == parent[:, :, None]) & (node > slot[:, :, None])
    after = tl.min(tl.where(younger, node, NODES), 2)
    here = live[:, None] & (slot < trees.width)
    tl.store(trees.sibling + row[:, None] * trees.width + slot, tl.where(after < NODES, after, -1), here)


@kernel
def _ratio(p, q, trees, count, DTYPE: tl.constexpr, NODES: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * NODES + tl.arange(0, NODES)
    row, node = at // trees.width, at % trees.width
    live = at < count
    live = live & (node < tl.load(trees.num_nodes + row, live, 0))
    slot = row * (trees.width + 1) + tl.load(trees.parents + at, live, -1) + 1
    token = tl.load(trees.tokens + at, live, 0)[:, None]
    target = probability(p, tl.load(trees.p_row + slot, live, 0), live, token, DTYPE)
    drafter = proposed(p, q, tl.load(trees.q_row + slot, live, 0), live, token, DTYPE)
    tl.store(trees.ratio + at, tl.sum(likelihood_ratio(target, drafter, DTYPE), 1), live)


@triton.jit
def proposed(p, q, row, live, token, DTYPE: tl.constexpr):
    """(ROWS, X) q of tokens (1 or ROWS, X), 0 where the drafter has no such token."""
    here = live[:, None] & (row >= 0)[:, None] & (token < p.vocab)
    column = token
    if q.place is not None:
        column = tl.load(q.place + token, token < p.vocab, -1)
        here = here & (column >= 0)
    return tl.load(q.probs + row[:, None] * q.stride + column, here, 0.0).to(DTYPE)


@triton.jit
def likelihood_ratio(p, q, DTYPE: tl.constexpr):
    """As chain.likelihood_ratio."""
    ratio = tl.where(q > 0, divide(p, tl.where(q > 0, q, 1.0), DTYPE), 0.0)
    return tl.minimum(ratio, 1.7976931348623157e308 if tl.float64 == DTYPE else 3.4028234663852886e38)


@triton.jit
def remaining(p, q, trees, row, slot, until, live, token, newest, its_surplus, its_mass, DTYPE: tl.constexpr):
    """(ROWS, X) p and q of tokens (1 or ROWS, X) at slots (ROWS,) after their children before `until` (-1: all) were
    deleted; and q as drafted, 0 for those children. The sums of `newest` may not be stored yet: they are arguments."""
    slots = row * (trees.width + 1) + slot
    target = probability(p, tl.load(trees.p_row + slots, live, 0), live, token, DTYPE)
    raw = proposed(p, q, tl.load(trees.q_row + slots, live, -1), live, token, DTYPE)
    drafter = raw
    gone = tl.load(trees.child + slots, live, -1)
    more = live & (gone >= 0) & (gone != until)
    while tl.max(more.to(tl.int32), 0) > 0:
        at = row * trees.width + gone
        new = gone == newest
        surplus = tl.where(new, its_surplus, tl.load(trees.surplus + at, more & ~new, 0.0))
        mass = tl.where(new, its_mass, tl.load(trees.mass + at, more & ~new, 0.0))
        a, child = tl.load(trees.before + at, more, 0.0), tl.load(trees.tokens + at, more, -1)
        gone = tl.load(trees.sibling + at, more, -1)
        lost = after(a[:, None], target, drafter, inverse(surplus, DTYPE)[:, None])
        target = tl.where(more[:, None], lost, target)
        raw = tl.where(more[:, None] & (token == child[:, None]), 0.0, raw)
        drafter = tl.where(more[:, None], raw * inverse(mass, DTYPE)[:, None], drafter)
        more = more & (gone >= 0) & (gone != until)
    return target, drafter, raw


@triton.jit
def after(a, p, q, scale):
    """p of a slot after a child was deleted: its excess over q, scaled to 1. Scale 0: rounding, or a broken q, leaves
    no excess, and p is unchanged."""
    return tl.where(scale > 0, positive(a * p - q) * scale, p)


@triton.jit
def positive(x):
    """(x)+; NaN stays NaN."""
    return tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def delete(
    p, q, trees, row, node, slot, a, live, newest, its_surplus, its_mass, split, splits,
    DTYPE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A split's share of the residual of a slot when its child `node` is deleted, after its elder siblings."""
    token = split * BLOCK + tl.arange(0, BLOCK)[None, :]
    target, drafter, raw = remaining(p, q, trees, row, slot, node, live, token, newest, its_surplus, its_mass, DTYPE)
    at = row * trees.width + node
    sibling = tl.load(trees.sibling + at, live, -1)
    raw = tl.where(token == tl.load(trees.tokens + at, live, -1)[:, None], 0.0, raw)
    excess = positive(a[:, None] * target - drafter)
    tl.store(trees.excess + at * splits + split, tl.sum(excess.to(tl.float64), 1), live)
    tl.store(trees.rest + at * splits + split, tl.sum(raw.to(tl.float64), 1), live)
    ahead = tl.load(trees.tokens + row * trees.width + sibling, live & (sibling >= 0), -1)
    mine = (ahead >= split * BLOCK) & (ahead < (split + 1) * BLOCK)
    if tl.max(mine.to(tl.int32), 0) > 0:
        here = token == ahead[:, None]
        tl.store(trees.ahead + at * 3, tl.sum(tl.where(here, target, 0.0), 1), mine)
        tl.store(trees.ahead + at * 3 + 1, tl.sum(tl.where(here, drafter, 0.0), 1), mine)
        tl.store(trees.ahead + at * 3 + 2, tl.sum(tl.where(here, raw, 0.0), 1), mine)
