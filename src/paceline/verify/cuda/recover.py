"""Law 2 on a device: the token drawn from the residual where a rule stopped, and the path to it."""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from paceline.core.rng import Lane
from paceline.core.verdict import Verdict
from paceline.verify.cuda import tiles
from paceline.verify.cuda.sampled import Sampled, remaining
from paceline.verify.cuda.tiles import find_split, find_token, kernel, my_rows, programs
from paceline.verify.cuda.walk import put
from paceline.verify.walk import CoinSource, DrawKeys


def recover(found: Sampled, rows: Tensor, draws: DrawKeys, source: CoinSource, verdict: Verdict) -> None:
    """Fill in the rows (B',; -1: skipped) of the verdict: the path to where they stopped, and the token drawn there."""
    trees, tile, count, batch = found.trees, found.tile, rows.shape[0], verdict.tokens.shape[0]
    coins = source(Lane.RESIDUAL, draws.key, draws.committed, trees.stop - 1)
    shares = trees.excess.new_empty(batch, tile.splits)
    _share[tile.grid(count)](*found[:3], rows, shares, count, tile.splits, tile.dtype, tiles.ROWS, tile.block)
    _recover[(programs(count),)](
        *found[:3], rows, shares, coins, verdict.tokens, verdict.num_accepted, verdict.path, verdict.kinds,
        count, tile.splits, verdict.path.shape[1],
        tile.dtype, tiles.ROWS, tile.block, tile.padded, tiles.steps(verdict.tokens.shape[1]),
    )  # fmt: skip


@kernel
def _share(
    p, q, trees, rows, shares, count, splits,
    DTYPE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A split's share in the weights of the last token."""
    at, live = my_rows(count, ROWS)
    row = tl.load(rows + at, live, -1)
    live = row >= 0
    split = tl.program_id(1)
    token = split * BLOCK + tl.arange(0, BLOCK)[None, :]
    slot = tl.load(trees.stop + row, live, 0)
    weight, _, _ = remaining(p, q, trees, row, slot, -1, live, token, -1, 0.0, 0.0, DTYPE)
    tl.store(shares + row * splits + split, tl.sum(weight.to(tl.float64), 1), live)


@kernel
def _recover(
    p, q, trees, rows, shares, coins, out_tokens, out_accepted, out_path, out_kinds, count, splits, depth,
    DTYPE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The last token, by its coin, and the path to its slot."""
    at, live = my_rows(count, ROWS)
    row = tl.load(rows + at, live, -1)
    live = row >= 0
    slot = tl.load(trees.stop + row, live, 0)
    split, rest = find_split(shares, row, live, tl.load(coins + row, live, 0.0), splits, SPLITS)
    token = split[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    weight, _, _ = remaining(p, q, trees, row, slot, -1, live, token, -1, 0.0, 0.0, DTYPE)
    last = split * BLOCK + find_token(weight, rest)
    peak = tl.load(p.peak + tl.load(trees.p_row + row * (trees.width + 1) + slot, live, 0), live, 0.0)
    last = tl.where(peak < float("inf"), last, -1)  # INVALID
    inner = tl.load(trees.child + row * (trees.width + 1) + slot, live, -1) >= 0
    column = tl.arange(0, COLUMNS)[None, :]
    path = tl.full([ROWS, COLUMNS], -1, tl.int64)
    run = tl.full([ROWS, COLUMNS], -1, tl.int64)
    node = slot - 1
    length = tl.load(trees.depth + row * trees.width + node, live & (node >= 0), 0).to(tl.int32)
    place = length - 1
    climbing = live & (node >= 0)
    while tl.max(climbing.to(tl.int32), 0) > 0:
        mine = climbing[:, None] & (column == place[:, None])
        path = tl.where(mine, node[:, None], path)
        run = tl.where(mine, tl.load(trees.tokens + row * trees.width + node, climbing, 0)[:, None], run)
        node = tl.where(climbing, tl.load(trees.parents + row * trees.width + node, climbing, -1), node)
        place -= 1
        climbing = climbing & (node >= 0)
    put(row, live, path, run, length, last, inner, out_tokens, out_accepted, out_path, out_kinds, depth, COLUMNS)
