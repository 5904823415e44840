"""Laws 1 and 3 on a device: draw the token of every row, and follow the draft while it agrees.

A greedy row takes its highest logit, a seeded row its highest logit plus noise, a sampling one the token whose interval
of cumulative p contains its coin: first each split's best or sum, then the token, in the order of the CPU.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.core.draft import Draft
from paceline.core.rng import Lane, bits
from paceline.core.rng_triton import gumbel
from paceline.core.verdict import Verdict
from paceline.verify.cuda import tiles
from paceline.verify.cuda.target_distribution import TargetDistribution
from paceline.verify.cuda.tiles import (
    COIN,
    SEEDED,
    find_split,
    find_token,
    kept,
    kernel,
    my_rows,
    owned_rows,
    programs,
    tempered,
)
from paceline.verify.processors import Nodes
from paceline.verify.walk import CoinSource, DrawKeys


def draw_tokens(target: TargetDistribution, draws: DrawKeys, nodes: Nodes, source: CoinSource) -> Tensor:
    """Return (R,) the token of each row. `target` is weighed unless all are greedy."""
    if draws.kind is None:
        return target.best
    rows, tile = target.best.shape[0], target.tile
    p = target.p._replace(total=None)  # one form of p, so kernels are compiled once
    key, committed, tokens = draws.key[nodes.seq], draws.committed[nodes.seq], torch.empty_like(target.best)
    coins = source(Lane.WALK, key, committed, nodes.node)
    # The noise is keyed by the token's position, whichever step or node draws it.
    noise = bits(Lane.GUMBEL, key, committed + nodes.depth)
    tops, places = p.peak.new_empty(rows, tile.splits), tokens.new_empty(rows, tile.splits)
    _noisy[tile.grid(rows)](
        p, noise, nodes.seq, draws.kind, tops, places, rows, tile.splits, tile.dtype, tiles.ROWS, tile.block
    )
    _draw[(programs(rows),)](
        p, target.best, nodes.seq, draws.kind, coins, target.shares, tops, places, tokens, rows, tile.splits,
        tile.dtype, tiles.ROWS, tile.block, tile.padded,
    )  # fmt: skip
    return tokens


def walk(draft: Draft, drawn: Tensor, row_of: Tensor, rows: Tensor | None, verdict: Verdict) -> None:
    """Fill in the rows (B',; -1: skipped) of the verdict; None: all."""
    count = draft.batch if rows is None else rows.shape[0]
    # A draft may be cut out of wider tensors; the kernel needs rows that lie one behind the other.
    tokens, parents, num_nodes = (one.contiguous() for one in (draft.tokens, draft.parents, draft.num_nodes))
    _walk[(programs(count),)](
        tokens, parents, num_nodes, drawn, row_of.contiguous(), rows,
        verdict.tokens, verdict.num_accepted, verdict.path, verdict.kinds,
        count, draft.width, verdict.path.shape[1],
        tiles.ROWS, tiles.steps(draft.width), tiles.steps(verdict.tokens.shape[1]),
        num_warps=1,
    )  # fmt: skip


@kernel
def _noisy(
    p, noise, seq, kind, tops, places, rows, splits,
    DTYPE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Each split's highest logit plus noise, and the first token that has it."""
    row, live, owner = owned_rows(seq, rows, ROWS)
    seeded = live & (tl.load(kind + owner, live, 0) == SEEDED)
    split = tl.program_id(1)
    if tl.max(seeded.to(tl.int32), 0) > 0:
        token = split * BLOCK + tl.arange(0, BLOCK)[None, :]
        logit = tempered(p, row, seeded, token, DTYPE)
        if p.scale is None:  # a CPU adds noise to the untempered logit
            valid = seeded[:, None] & (token < p.vocab)
            logit = tl.load(p.logits + row[:, None] * p.stride + token, valid, float("-inf")).to(DTYPE)
        logit = kept(p, logit, row, seeded, DTYPE) + gumbel(tl.load(noise + row, seeded, 0)[:, None], token).to(DTYPE)
        tl.store(tops + row * splits + split, tl.max(logit, 1), seeded)
        tl.store(places + row * splits + split, split * BLOCK + tl.argmax(logit, 1), seeded)


@kernel
def _draw(
    p, best, seq, kind, coins, shares, tops, places, tokens, rows, splits,
    DTYPE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    row, live, owner = owned_rows(seq, rows, ROWS)
    how = tl.load(kind + owner, live, 0)
    first = tl.load(best + row, live, 0)
    token = first
    by_coin = live & (how == COIN)
    if tl.max(by_coin.to(tl.int32), 0) > 0:
        split, rest = find_split(shares, row, by_coin, tl.load(coins + row, by_coin, 0.0), splits, SPLITS)
        inside = split[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
        weight = tl.exp(kept(p, tempered(p, row, by_coin, inside, DTYPE), row, by_coin, DTYPE))
        token = tl.where(by_coin, split * BLOCK + find_token(weight, rest), token)
    by_seed = live & (how == SEEDED)
    split = tl.arange(0, SPLITS)[None, :]
    top = tl.load(tops + row[:, None] * splits + split, by_seed[:, None] & (split < splits), float("-inf"))
    winner = tl.argmax(top, 1)
    token = tl.where(by_seed, tl.load(places + row * splits + winner, by_seed, 0), token)
    tl.store(tokens + row, tl.where(first < 0, first, token), live)  # INVALID


@kernel
def _walk(
    tokens, parents, num_nodes, drawn, row_of, rows, out_tokens, out_accepted, out_path, out_kinds, count, width, depth,
    ROWS: tl.constexpr, NODES: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Walk from the root to the first slot none of whose children carries the token drawn there."""
    row, live = my_rows(count, ROWS)
    if rows is not None:
        row = tl.load(rows + row, live, -1)
        live = row >= 0
    node = tl.arange(0, NODES)[None, :]
    used = live[:, None] & (node < tl.load(num_nodes + row, live, 0)[:, None])
    above = tl.load(parents + row[:, None] * width + node, used, -1)
    logit_row = tl.load(row_of + row[:, None] * (width + 1) + above + 1, used, 0)
    token = tl.load(tokens + row[:, None] * width + node, used, -1)
    agrees = used & (token == tl.load(drawn + logit_row, used, -2))
    column = tl.arange(0, COLUMNS)[None, :]
    path = tl.full([ROWS, COLUMNS], -1, tl.int64)
    run = tl.full([ROWS, COLUMNS], -1, tl.int64)
    at = tl.full([ROWS], -1, tl.int64)
    length = tl.zeros([ROWS], tl.int32)
    going = live
    while tl.max(going.to(tl.int32), 0) > 0:
        # The first of equal siblings is taken.
        child = tl.min(tl.where(agrees & (above == at[:, None]), node, NODES), 1)
        going = going & (child < NODES)
        at = tl.where(going, child, at)
        place = going[:, None] & (column == length[:, None])
        path = tl.where(place, child[:, None], path)
        run = tl.where(place, tl.sum(tl.where(node == child[:, None], token, 0), 1)[:, None], run)
        length += going.to(tl.int32)
    last = tl.load(drawn + tl.load(row_of + row * (width + 1) + at + 1, live, 0), live, 0)
    inner = tl.max((used & (above == at[:, None])).to(tl.int32), 1) > 0
    put(row, live, path, run, length, last, inner, out_tokens, out_accepted, out_path, out_kinds, depth, COLUMNS)


@triton.jit
def put(
    row, live, path, run, length, last, inner, out_tokens, out_accepted, out_path, out_kinds, depth,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Rows of the verdict: the accepted nodes `path` and their tokens `run`, and the token drawn after them."""
    column = tl.arange(0, COLUMNS)[None, :]
    end = column == length[:, None]
    final = tl.where(inner, 1, 2)[:, None]  # RECOVERED, BONUS of TokenKind
    kind = tl.where(column < length[:, None], 0, tl.where(end, final, 3)).to(tl.uint8)  # DRAFTED, PAD
    tl.store(out_accepted + row, length.to(tl.int64), live)
    tl.store(out_path + row[:, None] * depth + column, path, live[:, None] & (column < depth))
    valid = live[:, None] & (column <= depth)
    tl.store(out_tokens + row[:, None] * (depth + 1) + column, tl.where(end, last[:, None], run), valid)
    tl.store(out_kinds + row[:, None] * (depth + 1) + column, kind, valid)
