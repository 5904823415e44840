"""Laws 1 and 3 on a device: draw the token of every row, and follow the draft while it agrees.

A greedy row takes its highest logit, a seeded row its highest logit plus noise, a sampling one the token whose stretch
of cumulative p holds its coin: first each split's best or sum, then the token, in the order of the CPU.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.draft import Draft, Verdict
from paceline.rng import Lane, bits
from paceline.rng_triton import gumbel
from paceline.verify.device import tiles
from paceline.verify.device.target_distribution import TargetDistribution
from paceline.verify.device.tiles import find_split, find_token, kept, kernel, my_rows, programs, tempered
from paceline.verify.processors import Nodes
from paceline.verify.walk import CoinSource, Draws

_COIN, _SEED = tl.constexpr(1), tl.constexpr(2)


def draw_tokens(target: TargetDistribution, draws: Draws, nodes: Nodes, source: CoinSource) -> Tensor:
    """(R,) the token of each row. `target` is weighed where some row draws by a coin."""
    if draws.coins is None and draws.seeded is None:
        return target.best
    rows, tile, p = (
        target.best.shape[0],
        target.tile,
        target.p._replace(total=None),
    )  # so that kernels are compiled once
    kinds, tokens = _kinds(rows, draws), torch.empty_like(target.best)
    key, committed = draws.key[nodes.seq], draws.committed[nodes.seq]
    coins = shares = noise = tops = places = None
    if draws.coins is not None:
        coins, shares = source(Lane.WALK, key, committed, nodes.node), target.shares
    if draws.seeded is not None:
        # The noise belongs to the position the token will take, whichever step or node draws it.
        noise = bits(Lane.GUMBEL, key, committed + nodes.depth)
        tops, places = p.peak.new_empty(rows, tile.splits), tokens.new_empty(rows, tile.splits)
        _noisy[tile.grid(rows)](p, noise, kinds, tops, places, rows, tile.splits, tile.dtype, tiles.ROWS, tile.block)
    _draw[(programs(rows),)](
        p, target.best, kinds, coins, shares, tops, places, tokens, rows, tile.splits,
        tile.dtype, tiles.ROWS, tile.block, tile.padded,
    )  # fmt: skip
    return tokens


def _kinds(rows: int, draws: Draws) -> Tensor:
    """(R,) int8: 0 greedy, 1 by a coin, 2 seeded."""
    for part, kind in ((draws.coins, _COIN), (draws.seeded, _SEED)):
        if part is not None and part.shape[0] == rows:  # all rows
            return torch.full((rows,), kind.value, dtype=torch.int8, device=draws.key.device)
    kinds = torch.zeros(rows, dtype=torch.int8, device=draws.key.device)
    for part, kind in ((draws.coins, _COIN), (draws.seeded, _SEED)):
        if part is not None:
            kinds.index_fill_(0, part, kind.value)
    return kinds


def walk(draft: Draft, drawn: Tensor, row_of: Tensor, rows: Tensor | None, verdict: Verdict) -> None:
    """Fill in the rows (B',) of the verdict, -1: none; None: all."""
    count = draft.batch if rows is None else rows.shape[0]
    _walk[(programs(count),)](
        draft.tokens, draft.parents, draft.num_nodes, drawn, row_of, rows,
        verdict.tokens, verdict.num_accepted, verdict.path, verdict.kinds,
        count, draft.width, verdict.path.shape[1],
        tiles.ROWS, tiles.steps(draft.width), tiles.steps(verdict.tokens.shape[1]),
        num_warps=1,
    )  # fmt: skip


@kernel
def _noisy(
    p,
    noise,
    kinds,
    tops,
    places,
    rows,
    splits,
    DTYPE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Each split's highest logit plus noise, and the first token that has it."""
    row, live = my_rows(rows, ROWS)
    seeded = live & (tl.load(kinds + row, live, 0) == _SEED)
    split = tl.program_id(1)
    if tl.max(seeded.to(tl.int32), 0) > 0:
        token = split * BLOCK + tl.arange(0, BLOCK)[None, :]
        logit = tempered(p, row, seeded, token, DTYPE)
        if p.scale is None:  # what a CPU adds the noise to, where there is no temperature
            here = seeded[:, None] & (token < p.vocab)
            logit = tl.load(p.logits + row[:, None] * p.stride + token, here, float("-inf")).to(DTYPE)
        logit = kept(p, logit, row, seeded, DTYPE) + gumbel(tl.load(noise + row, seeded, 0)[:, None], token).to(DTYPE)
        tl.store(tops + row * splits + split, tl.max(logit, 1), seeded)
        tl.store(places + row * splits + split, split * BLOCK + tl.argmax(logit, 1), seeded)


@kernel
def _draw(
    p,
    best,
    kinds,
    coins,
    shares,
    tops,
    places,
    tokens,
    rows,
    splits,
    DTYPE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
):
    row, live = my_rows(rows, ROWS)
    kind = tl.load(kinds + row, live, 0)
    token = tl.load(best + row, live, 0)
    if coins is not None:
        by_coin = live & (kind == _COIN)
        if tl.max(by_coin.to(tl.int32), 0) > 0:
            split, rest = find_split(shares, row, by_coin, tl.load(coins + row, by_coin, 0.0), splits, SPLITS)
            inside = split[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
            weight = tl.exp(kept(p, tempered(p, row, by_coin, inside, DTYPE), row, by_coin, DTYPE))
            token = tl.where(by_coin, split * BLOCK + find_token(weight, rest), token)
    if tops is not None:
        by_seed = live & (kind == _SEED)
        split = tl.arange(0, SPLITS)[None, :]
        top = tl.load(tops + row[:, None] * splits + split, by_seed[:, None] & (split < splits), float("-inf"))
        winner = tl.argmax(top, 1)
        token = tl.where(by_seed, tl.load(places + row * splits + winner, by_seed, 0), token)
    tl.store(tokens + row, token, live)


@kernel
def _walk(
    tokens,
    parents,
    num_nodes,
    drawn,
    row_of,
    rows,
    out_tokens,
    out_accepted,
    out_path,
    out_kinds,
    count,
    width,
    depth,
    ROWS: tl.constexpr,
    NODES: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """From the root to the first slot none of whose children carries the token drawn there."""
    row, live = my_rows(count, ROWS)
    if rows is not None:
        row = tl.load(rows + row, live, -1)
        live = row >= 0
    node = tl.arange(0, NODES)[None, :]
    used = live[:, None] & (node < tl.load(num_nodes + row, live, 0)[:, None])
    above = tl.load(parents + row[:, None] * width + node, used, -1)
    here = tl.load(row_of + row[:, None] * (width + 1) + above + 1, used, 0)
    token = tl.load(tokens + row[:, None] * width + node, used, -1)
    agrees = used & (token == tl.load(drawn + here, used, -2))
    column = tl.arange(0, COLUMNS)[None, :]
    path = tl.full([ROWS, COLUMNS], -1, tl.int64)
    run = tl.full([ROWS, COLUMNS], -1, tl.int64)
    at = tl.full([ROWS], -1, tl.int64)
    length = tl.zeros([ROWS], tl.int32)
    going = live
    while tl.max(going.to(tl.int32), 0) > 0:
        # Of equal siblings the first one counts.
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
    row,
    live,
    path,
    run,
    length,
    last,
    inner,
    out_tokens,
    out_accepted,
    out_path,
    out_kinds,
    depth,
    COLUMNS: tl.constexpr,
):
    """Rows of the verdict: the accepted nodes `path` and their tokens `run`, and the token drawn after them."""
    column = tl.arange(0, COLUMNS)[None, :]
    end = column == length[:, None]
    final = tl.where(inner, 1, 2)[:, None]  # Kind.RECOVERED, Kind.BONUS
    kind = tl.where(column < length[:, None], 0, tl.where(end, final, 3)).to(tl.uint8)  # Kind.DRAFTED, Kind.PAD
    tl.store(out_accepted + row, length.to(tl.int64), live)
    tl.store(out_path + row[:, None] * depth + column, path, live[:, None] & (column < depth))
    here = live[:, None] & (column <= depth)
    tl.store(out_tokens + row[:, None] * (depth + 1) + column, tl.where(end, last[:, None], run), here)
    tl.store(out_kinds + row[:, None] * (depth + 1) + column, kind, here)
