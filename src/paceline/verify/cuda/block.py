"""Law 2 on a device: block verification of chains, where all sums are taken at once, and traversal of trees.

Traversal judges one node after another, and each deletion is a sum over the vocabulary that the next judgement needs:
one kernel a turn, N + 1 turns. Each program of a turn recomputes the state after the turn before from that turn's sums,
and the first program stores it for later turns; no program reads what another of its own turn writes. A turn is
launched while the one before it runs, and waits for it on the device.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from paceline.verify.cuda import tiles
from paceline.verify.cuda.sampled import Sampled, after, delete, likelihood_ratio
from paceline.verify.cuda.tiles import divide, inverse, kernel, my_rows, programs, summed

_DONE = tl.constexpr(-2)


def chain(found: Sampled, rows: Tensor, coins: Tensor) -> None:
    """Where the chains `rows` (B',; -1: skipped) stop, by their nodes' coins (B, N)."""
    trees, tile, count = found.trees, found.tile, rows.shape[0]
    _scale[(programs(count),)](trees, rows, count, tile.dtype, tiles.ROWS, num_warps=1)
    _delete_all[(programs(count * trees.width), tile.splits)](
        *found[:3], rows, count * trees.width, tile.splits, tile.dtype, tiles.ROWS, tile.block
    )
    nodes = tiles.steps(trees.width)
    _stop[(programs(count),)](trees, rows, coins, count, tile.splits, tile.dtype, tiles.ROWS, nodes, tile.padded)


def tree(found: Sampled, rows: Tensor, coins: Tensor) -> None:
    """Where the trees `rows` (B',; -1: skipped) stop, by their nodes' coins (B, N)."""
    trees, tile, count = found.trees, found.tile, rows.shape[0]
    judged = torch.full((trees.width + 1, trees.stop.shape[0]), _DONE.value, dtype=torch.int64, device=rows.device)
    for turn in range(trees.width + 1):
        _turn[tile.grid(count)](
            *found[:3], rows, coins, judged, turn, count, trees.stop.shape[0], tile.splits,
            turn == 0, tile.dtype, tiles.ROWS, tile.block, tile.padded, num_warps=8, **tiles.overlapped(),
        )  # fmt: skip


@kernel
def _scale(trees, rows, count, DTYPE: tl.constexpr, ROWS: tl.constexpr):
    """a_0 = 1, a_i = min(1, a_{i-1} * p/q of token i)."""
    at, live = my_rows(count, ROWS)
    row = tl.load(rows + at, live, -1)
    live = row >= 0
    length = tl.load(trees.num_nodes + row, live, 0)
    a = tl.full([ROWS], 1.0, DTYPE)
    node = tl.zeros([ROWS], tl.int64)
    more = live & (node < length)
    while tl.max(more.to(tl.int32), 0) > 0:
        tl.store(trees.before + row * trees.width + node, a, more)
        a = tl.minimum(a * tl.load(trees.ratio + row * trees.width + node, more, 0.0), 1.0)
        node += 1
        tl.store(trees.a + row * (trees.width + 1) + node, a, more)
        more = more & (node < length)


@kernel
def _delete_all(
    p, q, trees, rows, count, splits,
    DTYPE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The residual of every slot of a chain after its child is deleted."""
    at, live = my_rows(count, ROWS)
    row, node = tl.load(rows + at // trees.width, live, -1), at % trees.width
    live = row >= 0
    live = live & (node < tl.load(trees.num_nodes + row, live, 0))
    if tl.max(live.to(tl.int32), 0) > 0:
        a = tl.load(trees.before + row * trees.width + node, live, 0.0)
        delete(p, q, trees, row, node, node, a, live, -1, 0.0, 0.0, tl.program_id(1), splits, DTYPE, BLOCK)


@kernel
def _stop(
    trees, rows, coins, count, splits,
    DTYPE: tl.constexpr, ROWS: tl.constexpr, NODES: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """As chain.chain: the last token that passes."""
    at, live = my_rows(count, ROWS)
    row = tl.load(rows + at, live, -1)
    live = row >= 0
    node = tl.arange(0, NODES)[None, :]
    length = tl.load(trees.num_nodes + row, live, 0)[:, None]
    used = live[:, None] & (node < length)
    coin = tl.load(coins + row[:, None] * trees.width + node, used, 2.0)
    split = tl.arange(0, SPLITS)[None, None, :]
    shares = trees.excess + (row[:, None] * trees.width + node)[:, :, None] * splits + split
    surplus = tl.sum(tl.load(shares, used[:, :, None] & (split < splits), 0.0), 2).to(DTYPE)
    tl.store(trees.surplus + row[:, None] * trees.width + node, surplus, used)
    a = tl.load(trees.a + row[:, None] * (trees.width + 1) + node + 1, used, 0.0)
    inner = used & (node + 1 < length)  # behind the last token nothing was drafted
    below = tl.sum(tl.load(shares + splits, inner[:, :, None] & (split < splits), 0.0), 2).to(DTYPE)
    keep = tl.where(inner, kept_share(below, a, DTYPE), a)
    stop = tl.max(tl.where(used & (coin <= keep.to(tl.float64)), node + 1, 0), 1)
    tl.store(trees.stop + row, stop.to(tl.int64), live)


@triton.jit
def kept_share(surplus, a, DTYPE: tl.constexpr):
    """a of a slot after a child was deleted."""
    total = surplus + 1.0 - a
    # total = 0: p is q and a is 1. Not a number: q is broken, and the slot is taken to have no draft.
    return tl.where(total > 0, divide(surplus, tl.where(total > 0, total, 1.0), DTYPE), a)


@kernel
def _turn(
    p, q, trees, rows, coins, judged, turn, count, batch, splits,
    FIRST: tl.constexpr, DTYPE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Judge the next node in postorder: an accepted node ends the row, a rejected one is deleted."""
    if OVERLAP:
        gdc_wait()  # until the turn before is done, and so all before it
        gdc_launch_dependents()
    at, live = my_rows(count, ROWS)
    row = tl.load(rows + at, live, -1)
    live = row >= 0
    split = tl.program_id(1)
    writes = (at * 0 + split) == 0  # a mask of the rows' shape, as newer interpreters require
    nodes, slots = row * trees.width, row * (trees.width + 1)
    gone = tl.full([ROWS], -1, tl.int64)
    surplus, mass = tl.zeros([ROWS], DTYPE), tl.zeros([ROWS], DTYPE)
    slot = tl.zeros([ROWS], tl.int64)  # the parent of the node deleted last, and its a afterwards
    a = tl.full([ROWS], 1.0, DTYPE)
    child = tl.load(trees.child + slots, live, -1)
    if not FIRST:
        gone = tl.load(judged + (turn - 1) * batch + row, live, _DONE)
        live = live & (gone != _DONE)
        slot = tl.load(trees.parents + nodes + gone, live, -1) + 1
        surplus = summed(trees.excess, nodes + gone, live, splits, SPLITS).to(DTYPE)
        mass = summed(trees.rest, nodes + gone, live, splits, SPLITS).to(DTYPE)
        tl.store(trees.surplus + nodes + gone, surplus, live & writes)
        tl.store(trees.mass + nodes + gone, mass, live & writes)
        child = tl.load(trees.sibling + nodes + gone, live, -1)
        old = tl.load(trees.before + nodes + gone, live, 1.0)
        a = kept_share(surplus, old, DTYPE)
    tl.store(trees.a + slots + slot, a, live & writes)
    if tl.max(live.to(tl.int32), 0) > 0:
        # Down to the first leaf of the next child, or up to the parent itself.
        down = live & (child >= 0)
        ratio = tl.load(trees.ratio + nodes + child, down, 0.0)
        if not FIRST:
            ahead = trees.ahead + (nodes + gone) * 3
            target, drafter = tl.load(ahead, down, 0.0), tl.load(ahead + 1, down, 0.0)
            drafted = tl.load(ahead + 2, down, 0.0) * inverse(mass, DTYPE)
            ratio = likelihood_ratio(after(old, target, drafter, inverse(surplus, DTYPE)), drafted, DTYPE)
        node = slot - 1
        above = a
        while tl.max(down.to(tl.int32), 0) > 0:
            above = tl.where(down, a, above)
            a = tl.where(down, tl.minimum(a * ratio, 1.0), a)
            node = tl.where(down, child, node)
            tl.store(trees.a + slots + node + 1, a, down & writes)
            child = tl.load(trees.child + slots + node + 1, down, -1)
            down = down & (child >= 0)
            ratio = tl.load(trees.ratio + nodes + child, down, 0.0)
        up = node == slot - 1
        parent = tl.load(trees.parents + nodes + node, live & (node >= 0), -1) + 1
        above = tl.where(up, tl.load(trees.a + slots + parent, live & up & (node >= 0), 1.0), above)
        coin = tl.load(coins + nodes + node, live & (node >= 0), 0.0)
        ends = live & ((node < 0) | (coin <= a.to(tl.float64)))  # the root alone is always accepted
        tl.store(trees.stop + row, node + 1, ends & writes)
        goes = live & ~ends
        tl.store(judged + turn * batch + row, node, goes & writes)
        tl.store(trees.before + nodes + node, above, goes & writes)
        if tl.max(goes.to(tl.int32), 0) > 0:
            delete(p, q, trees, row, node, parent, above, goes, gone, surplus, mass, split, splits, DTYPE, BLOCK)
