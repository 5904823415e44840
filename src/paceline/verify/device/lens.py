"""From logits to p of every row at once, as a function rather than a tensor: highest logit, temperature, cut, total.

min_p, top_k and top_p are one cut each row makes through its tempered logits: the highest value at which the tokens at
or above it are enough, in number (top_k) or in weight (top_p), so ties with the last one kept are kept. The bits of a
float's magnitude are integers in the same order, so the cut is found by parting an interval of integers in eight, first
at powers of two, in 11 passes (float64: 22), without a sort. A split with nothing in the interval is not read again.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.verify.device import tiles
from paceline.verify.device.tiles import P, Tile, inverse, kept, kernel, key_of, my_rows, programs, summed, tempered
from paceline.verify.processors import Controls, Nodes

WAYS = tl.constexpr(8)
_INTS = {torch.float32: torch.int32, torch.float64: torch.int64}
_PASSES = {torch.float32: 11, torch.float64: 22}
_LAST = {torch.float32: 0x7F7FFFFF, torch.float64: 0x7FEFFFFFFFFFFFFF}  # the key of the lowest finite number


@dataclass(frozen=True)
class Lens:
    """R rows of logits, and what it takes to read p off them."""

    p: P
    tile: Tile
    best: Tensor  # (R,) int64, the first of the highest
    shares: Tensor | None = None  # (R, splits) float64, sums of exp(tempered logit) over what the filters leave

    @staticmethod
    def of(logits: Tensor, controls: Controls, nodes: Nodes) -> Lens:
        """Of logits whose penalties, biases and bans are done."""
        logits = logits if logits.stride(1) == 1 else logits.contiguous()
        tile, rows = Tile.of(logits), logits.shape[0]
        peak = logits.new_empty(rows, dtype=tile.torch_dtype)
        scale = None if controls.temperature is None else torch.empty_like(peak)
        best = torch.empty(rows, dtype=torch.int64, device=logits.device)
        p = P(logits, logits.stride(0), logits.shape[1], peak, scale)
        tops, places = peak.new_empty(rows, tile.splits), best.new_empty(rows, tile.splits)
        _peak[tile.grid(rows)](p, tops, places, rows, tile.splits, tile.dtype, tiles.ROWS, tile.block)
        _row[(programs(rows),)](
            p,
            tops,
            places,
            best,
            nodes.seq,
            controls.temperature,
            rows,
            tile.splits,
            tile.dtype,
            tiles.ROWS,
            tile.padded,
        )
        return Lens(p, tile, best)

    def filtered(self, controls: Controls, nodes: Nodes) -> Lens:
        """With the cut the filters make."""
        if controls.temperature is None or not controls.filters:
            return self
        rows, peak = self.best.shape[0], self.p.peak
        low, high = (torch.empty_like(peak, dtype=_INTS[peak.dtype]) for _ in range(2))
        goal, pick = torch.empty_like(peak, dtype=torch.float64), torch.empty_like(peak, dtype=torch.int32)
        parts = [peak.new_empty(rows, self.tile.splits, WAYS.value + 1) for _ in range(2)]
        state, asked = (low, high, goal, pick), (nodes.seq, controls.temperature, controls.min_p)
        fresh = True
        for wanted, count in ((controls.top_k, True), (controls.top_p, False)):
            if wanted is None and not (fresh and count):
                continue
            _open[(programs(rows),)](
                *state, *asked, wanted, rows, _LAST[peak.dtype], self.p.vocab, fresh, count, self.tile.dtype, tiles.ROWS
            )
            fresh = False
            for turn in range(0 if wanted is None else _PASSES[peak.dtype]):
                parts.reverse()
                _measure[self.tile.grid(rows)](
                    self.p,
                    *state,
                    *parts,
                    rows,
                    self.tile.splits,
                    turn == 0,
                    count,
                    self.tile.dtype,
                    tiles.ROWS,
                    self.tile.block,
                )
                _narrow[(programs(rows),)](
                    *state,
                    parts[1],
                    nodes.seq,
                    wanted,
                    rows,
                    self.tile.splits,
                    turn == 0,
                    count,
                    self.tile.dtype,
                    tiles.ROWS,
                    self.tile.padded,
                )
        return Lens(self.p._replace(cut=high), self.tile, self.best)

    def weighed(self) -> Lens:
        """With the sums that turn weights into probabilities."""
        rows = self.best.shape[0]
        shares = self.p.peak.new_empty(rows, self.tile.splits, dtype=torch.float64)
        total = shares.new_empty(rows)
        _weigh[self.tile.grid(rows)](
            self.p, shares, rows, self.tile.splits, self.tile.dtype, tiles.ROWS, self.tile.block
        )
        _total[(programs(rows),)](shares, total, rows, self.tile.splits, tiles.ROWS, self.tile.padded)
        return Lens(self.p._replace(total=total), self.tile, self.best, shares)

    def write(self, *, probabilities: bool) -> Tensor:
        """(R, V) processed logits, or p."""
        rows = self.best.shape[0]
        out = self.p.peak.new_empty(rows, self.p.vocab)
        _write[self.tile.grid(rows)](self.p, out, rows, probabilities, self.tile.dtype, tiles.ROWS, self.tile.block)
        return out


@kernel
def _peak(p, tops, places, rows, splits, DTYPE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Each split's highest logit, and the first token that has it."""
    row, live = my_rows(rows, ROWS)
    split = tl.program_id(1)
    token = split * BLOCK + tl.arange(0, BLOCK)[None, :]
    here = live[:, None] & (token < p.vocab)
    logit = tl.load(p.logits + row[:, None] * p.stride + token, here, float("-inf")).to(DTYPE)
    tl.store(tops + row * splits + split, tl.max(logit, 1), live)
    tl.store(places + row * splits + split, split * BLOCK + tl.argmax(logit, 1), live)


@kernel
def _row(
    p,
    tops,
    places,
    best,
    seq,
    temperature,
    rows,
    splits,
    DTYPE: tl.constexpr,
    ROWS: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """The highest of the splits' highest, and the row's temperature."""
    row, live = my_rows(rows, ROWS)
    split = tl.arange(0, SPLITS)[None, :]
    here = live[:, None] & (split < splits)
    top = tl.load(tops + row[:, None] * splits + split, here, float("-inf"))
    winner = tl.argmax(top, 1)
    tl.store(p.peak + row, tl.max(top, 1), live)
    tl.store(best + row, tl.load(places + row * splits + winner, live, 0), live)
    if temperature is not None:
        asked = tl.load(temperature + tl.load(seq + row, live, 0), live, 1.0)
        scale = tl.where(asked > 0, asked, 1.0)
        tiny = 2.2250738585072014e-308 if tl.float64 == DTYPE else 1.1754943508222875e-38
        huge = 1.7976931348623157e308 if tl.float64 == DTYPE else 3.4028234663852886e38
        tl.store(p.scale + row, tl.clamp(scale.to(DTYPE), tiny, huge), live)


@kernel
def _open(
    low,
    high,
    goal,
    pick,
    seq,
    temperature,
    min_p,
    wanted,
    rows,
    last,
    vocab,
    FRESH: tl.constexpr,
    COUNT: tl.constexpr,
    DTYPE: tl.constexpr,
    ROWS: tl.constexpr,
):
    """The interval (low, high] the cut lies in: down to what min_p leaves, or to the cut made before.

    It is closed from the start in rows that do not ask: greedy ones, and those whose top_k or top_p is off.
    """
    row, live = my_rows(rows, ROWS)
    asks = tl.load(seq + row, live, 0)
    warm = live & (tl.load(temperature + asks, live, 1.0) > 0)
    top = tl.zeros([ROWS], low.dtype.element_ty) + last
    if FRESH:
        if min_p is not None:
            share = tl.load(min_p + asks, live, 0.0).to(tl.float64)
            floor = key_of(tl.log(tl.where(share > 0, share, 1.0)).to(DTYPE), DTYPE)
            top = tl.where(warm & (share > 0), tl.minimum(floor, top), top)
    else:
        top = tl.load(high + row, live, 0)
    bottom = top - 1
    if wanted is not None:
        amount = tl.load(wanted + asks, live, 0)
        if COUNT:
            bottom = tl.where(warm & (amount > 0) & (amount < vocab), -1, bottom)
            tl.store(goal + row, amount.to(tl.float64), live)
        else:
            bottom = tl.where(warm & (amount < 1), -1, bottom)
    tl.store(low + row, bottom, live)
    tl.store(high + row, top, live)
    tl.store(pick + row, tl.zeros([ROWS], tl.int32), live)


@kernel
def _measure(
    p,
    low,
    high,
    goal,
    pick,
    before,
    after,
    rows,
    splits,
    FIRST: tl.constexpr,
    COUNT: tl.constexpr,
    DTYPE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """What each split has at or above the bars that part the interval, and at or above its lower end."""
    row, live = my_rows(rows, ROWS)
    split = tl.program_id(1)
    bottom, top = tl.load(low + row, live, 0), tl.load(high + row, live, 0)
    mine = (row * splits + split) * (WAYS + 1)
    under = tl.zeros([ROWS], DTYPE)
    some = live & (top - bottom > 1)
    if not FIRST:
        picked = tl.load(pick + row, live, 0)
        under = tl.load(before + mine + picked, live, 0.0)
        some = some & (tl.load(before + mine + picked + 1, live, 0.0) > under)
    tl.store(after + mine, under, live)
    if tl.max(some.to(tl.int32), 0) > 0:
        token = split * BLOCK + tl.arange(0, BLOCK)[None, :]
        logit = tempered(p, row, live, token, DTYPE)
        key = key_of(logit, DTYPE)
        weight = tl.exp(logit)
        if COUNT:
            weight = tl.full([ROWS, BLOCK], 1.0, DTYPE)
        for way in tl.static_range(WAYS):
            bar = _bar(bottom, top, way, FIRST, DTYPE)[:, None]
            held = tl.sum(tl.where(key <= bar, weight, 0.0), 1)
            tl.store(after + mine + (way + 1), tl.where(some, held, under), live)
    else:
        for way in tl.static_range(WAYS):
            tl.store(after + mine + (way + 1), under, live)


@triton.jit
def _bar(bottom, top, way, FIRST: tl.constexpr, DTYPE: tl.constexpr):
    """(ROWS,) the upper end of one part: the first time 2**(way - 2), then evenly spaced; of the last part the top."""
    step = (top - bottom + (WAYS - 1)) // WAYS
    bar = bottom + step * (way + 1)
    if FIRST:
        exponent = tl.zeros_like(top) + way
        bar = (exponent + 1021) << 52 if tl.float64 == DTYPE else (exponent + 125) << 23
    return tl.where(way == WAYS - 1, top, tl.minimum(bar, top))


@kernel
def _narrow(
    low,
    high,
    goal,
    pick,
    held,
    seq,
    wanted,
    rows,
    splits,
    FIRST: tl.constexpr,
    COUNT: tl.constexpr,
    DTYPE: tl.constexpr,
    ROWS: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Keep the part of the interval in which the goal is reached: a number of tokens, or a share of what is left."""
    row, live = my_rows(rows, ROWS)
    bottom, top = tl.load(low + row, live, 0), tl.load(high + row, live, 0)
    enough = tl.load(goal + row, live, 0.0)
    if FIRST and not COUNT:
        share = tl.load(wanted + tl.load(seq + row, live, 0), live, 1.0).to(tl.float64)
        enough = share * _held(held, row, live, splits, WAYS, SPLITS)
        tl.store(goal + row, enough, live)
    picked = tl.full([ROWS], WAYS - 1, tl.int32)
    under, over = bottom, top
    for up in tl.static_range(WAYS):
        way = WAYS - 1 - up
        reached = (_held(held, row, live, splits, way + 1, SPLITS) >= enough) | (way == WAYS - 1)
        picked = tl.where(reached, way, picked)
        over = tl.where(reached, _bar(bottom, top, way, FIRST, DTYPE), over)
        under = tl.where(reached, bottom if way == 0 else _bar(bottom, top, way - 1, FIRST, DTYPE), under)
    narrow = live & (top - bottom > 1)
    tl.store(low + row, under, narrow)
    tl.store(high + row, over, narrow)
    tl.store(pick + row, picked, live)


@triton.jit
def _held(held, row, live, splits, column, SPLITS: tl.constexpr):
    split = tl.arange(0, SPLITS)[None, :]
    here = live[:, None] & (split < splits)
    return tl.sum(tl.load(held + (row[:, None] * splits + split) * (WAYS + 1) + column, here, 0.0).to(tl.float64), 1)


@kernel
def _weigh(p, shares, rows, splits, DTYPE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row, live = my_rows(rows, ROWS)
    split = tl.program_id(1)
    token = split * BLOCK + tl.arange(0, BLOCK)[None, :]
    weight = tl.exp(kept(p, tempered(p, row, live, token, DTYPE), row, live, DTYPE))
    tl.store(shares + row * splits + split, tl.sum(weight.to(tl.float64), 1), live)


@kernel
def _total(shares, total, rows, splits, ROWS: tl.constexpr, SPLITS: tl.constexpr):
    row, live = my_rows(rows, ROWS)
    tl.store(total + row, summed(shares, row, live, splits, SPLITS), live)


@kernel
def _write(p, out, rows, SHARES: tl.constexpr, DTYPE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row, live = my_rows(rows, ROWS)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    value = kept(p, tempered(p, row, live, token, DTYPE), row, live, DTYPE)
    if SHARES:
        value = tl.exp(value) * inverse(tl.load(p.total + row, live, 1.0).to(DTYPE), DTYPE)[:, None]
    tl.store(out + row[:, None] * p.vocab + token, value, live[:, None] & (token < p.vocab))
