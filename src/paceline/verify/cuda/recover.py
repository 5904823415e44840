"""Law 2 on a device: the token drawn from the residual where a chain stopped, and the path to it."""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from paceline.core.rng import Lane
from paceline.core.verdict import Verdict
from paceline.verify.cuda import tiles
from paceline.verify.cuda.sampled import Sampled, last_weights
from paceline.verify.cuda.tiles import find_split, find_token, kernel, my_rows, programs
from paceline.verify.cuda.walk import put
from paceline.verify.walk import CoinSource, DrawKeys


def recover(inputs: Sampled, rows: Tensor, draws: DrawKeys, source: CoinSource, verdict: Verdict) -> None:
    """Fill in the verdict's `rows` (B',), skipping -1: the accepted path and the recovered or bonus token."""
    chains, tile, count, batch = inputs.chains, inputs.tile, rows.shape[0], verdict.tokens.shape[0]
    coins = source(Lane.RESIDUAL, draws.key, draws.committed, chains.stop - 1)
    shares = chains.excess.new_empty(batch, tile.splits)
    _share[tile.grid(count)](*inputs[:3], rows, shares, count, tile.splits, tile.dtype, tiles.ROWS, tile.block)
    _recover[(programs(count),)](
        *inputs[:3], rows, shares, coins, verdict.tokens, verdict.num_accepted, verdict.path, verdict.kinds,
        count, tile.splits, verdict.path.shape[1],
        tile.dtype, tiles.ROWS, tile.block, tile.padded, tiles.steps(verdict.tokens.shape[1]),
    )  # fmt: skip


@kernel
def _share(
    p, q, chains, rows, shares, count, splits,
    DTYPE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sum the weights of a row's last token over one split of the vocabulary."""
    at, live = my_rows(count, ROWS)
    row = tl.load(rows + at, live, -1)
    live = row >= 0
    split = tl.program_id(1)
    token = split * BLOCK + tl.arange(0, BLOCK)[None, :]
    slot = tl.load(chains.stop + row, live, 0)
    weight = last_weights(p, q, chains, row, slot, live, token, DTYPE)
    tl.store(shares + row * splits + split, tl.sum(weight.to(tl.float64), 1), live)


@kernel
def _recover(
    p, q, chains, rows, shares, coins, out_tokens, out_accepted, out_path, out_kinds, count, splits, depth,
    DTYPE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Draw the last token of a row by its coin, and write it behind the accepted tokens."""
    at, live = my_rows(count, ROWS)
    row = tl.load(rows + at, live, -1)
    live = row >= 0
    slot = tl.load(chains.stop + row, live, 0)
    split, rest = find_split(shares, row, live, tl.load(coins + row, live, 0.0), splits, SPLITS)
    token = split[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    weight = last_weights(p, q, chains, row, slot, live, token, DTYPE)
    last = split * BLOCK + find_token(weight, rest)
    peak = tl.load(p.peak + tl.load(chains.p_row + row * (chains.width + 1) + slot, live, 0), live, 0.0)
    last = tl.where(peak < float("inf"), last, -1)  # INVALID
    inner = slot < tl.load(chains.num_nodes + row, live, 0)
    node = tl.zeros([ROWS, COLUMNS], tl.int64) + tl.arange(0, COLUMNS)[None, :]
    accepted = live[:, None] & (node < slot[:, None])
    run = tl.load(chains.tokens + row[:, None] * chains.width + node, accepted, -1)
    path = tl.where(accepted, node, -1)
    length = slot.to(tl.int32)
    put(row, live, path, run, length, last, inner, out_tokens, out_accepted, out_path, out_kinds, depth, COLUMNS)
