"""Law 2 on a device: block verification of chains, where all sums over the vocabulary are taken at once."""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from paceline.verify.cuda import tiles
from paceline.verify.cuda.sampled import Sampled, positive, proposed
from paceline.verify.cuda.tiles import divide, kernel, my_rows, probability, programs


def stop_chains(inputs: Sampled, rows: Tensor, coins: Tensor) -> None:
    """Find where the chains `rows` (B',; -1: skipped) stop, by their nodes' coins (B, N)."""
    chains, tile, count = inputs.chains, inputs.tile, rows.shape[0]
    nodes = count * chains.width
    _scale[(programs(count),)](chains, rows, count, tile.dtype, tiles.ROWS, num_warps=1)
    _excess[(programs(nodes), tile.splits)](*inputs[:3], rows, nodes, tile.splits, tile.dtype, tiles.ROWS, tile.block)
    _stop[(programs(count),)](
        chains, rows, coins, count, tile.splits, tile.dtype, tiles.ROWS, tiles.steps(chains.width), tile.padded
    )


@kernel
def _scale(chains, rows, count, DTYPE: tl.constexpr, ROWS: tl.constexpr):
    """a_0 = 1, a_i = min(1, a_{i-1} * p/q of token i)."""
    at, live = my_rows(count, ROWS)
    row = tl.load(rows + at, live, -1)
    live = row >= 0
    length = tl.load(chains.num_nodes + row, live, 0)
    a = tl.full([ROWS], 1.0, DTYPE)
    node = tl.zeros([ROWS], tl.int64)
    more = live
    while tl.max(more.to(tl.int32), 0) > 0:
        tl.store(chains.scale + row * (chains.width + 1) + node, a, more)
        more = more & (node < length)
        a = tl.minimum(a * tl.load(chains.ratio + row * chains.width + node, more, 0.0), 1.0)
        node += 1


@kernel
def _excess(
    p, q, chains, rows, count, splits,
    DTYPE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A split's share of the residual of every slot of a chain."""
    at, live = my_rows(count, ROWS)
    row, slot = tl.load(rows + at // chains.width, live, -1), at % chains.width
    live = row >= 0
    live = live & (slot < tl.load(chains.num_nodes + row, live, 0))
    if tl.max(live.to(tl.int32), 0) > 0:
        split = tl.program_id(1)
        token = split * BLOCK + tl.arange(0, BLOCK)[None, :]
        slots = row * (chains.width + 1) + slot
        target = probability(p, tl.load(chains.p_row + slots, live, 0), live, token, DTYPE)
        drafter = proposed(p, q, tl.load(chains.q_row + slots, live, -1), live, token, DTYPE)
        a = tl.load(chains.scale + slots, live, 0.0)[:, None]
        share = tl.sum(positive(a * target - drafter).to(tl.float64), 1)
        tl.store(chains.excess + (row * chains.width + slot) * splits + split, share, live)


@kernel
def _stop(
    chains, rows, coins, count, splits,
    DTYPE: tl.constexpr, ROWS: tl.constexpr, NODES: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """The stop behind the last token that passes."""
    at, live = my_rows(count, ROWS)
    row = tl.load(rows + at, live, -1)
    live = row >= 0
    node = tl.arange(0, NODES)[None, :]
    length = tl.load(chains.num_nodes + row, live, 0)[:, None]
    used = live[:, None] & (node < length)
    coin = tl.load(coins + row[:, None] * chains.width + node, used, 2.0)
    split = tl.arange(0, SPLITS)[None, None, :]
    shares = chains.excess + (row[:, None] * chains.width + node)[:, :, None] * splits + split
    surplus = tl.sum(tl.load(shares, used[:, :, None] & (split < splits), 0.0), 2).to(DTYPE)
    tl.store(chains.surplus + row[:, None] * chains.width + node, surplus, used)
    a = tl.load(chains.scale + row[:, None] * (chains.width + 1) + node + 1, used, 0.0)
    inner = used & (node + 1 < length)  # behind the last token nothing was drafted
    below = tl.sum(tl.load(shares + splits, inner[:, :, None] & (split < splits), 0.0), 2).to(DTYPE)
    keep = tl.where(inner, kept_share(below, a, DTYPE), a)
    stop = tl.max(tl.where(used & (coin <= keep.to(tl.float64)), node + 1, 0), 1)
    tl.store(chains.stop + row, stop.to(tl.int64), live)


@triton.jit
def kept_share(surplus, a, DTYPE: tl.constexpr):
    """The acceptance of a slot with a child."""
    total = surplus + 1.0 - a
    # total = 0: p is q and a is 1. Not a number: q is broken, and the chain is taken to end here.
    return tl.where(total > 0, divide(surplus, tl.where(total > 0, total, 1.0), DTYPE), a)
