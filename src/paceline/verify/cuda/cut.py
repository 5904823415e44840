"""One cut through each row's tempered logits for min_p, top_k and top_p, found without a sort.

Each filter keeps the tokens at or above a threshold: the highest at which they suffice in number (top_k) or in weight
(top_p), among the tokens the filter before kept; so ties with the last token kept are kept. The bits of a float's
magnitude, as integers, have the same order, and the cut is found by dividing an interval of integers in eight, first at
powers of two, in 11 passes (float64: 22). A split of a row without tokens in the interval is not read again.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.verify.cuda import tiles
from paceline.verify.cuda.tiles import LogitTiles, P, kernel, key_of, my_rows, owned_rows, programs, tempered
from paceline.verify.processors import Nodes, SamplingMetadata

WAYS = tl.constexpr(8)
_INTS = {torch.float32: torch.int32, torch.float64: torch.int64}
_PASSES = {torch.float32: 11, torch.float64: 22}
_LAST = {torch.float32: 0x7F7FFFFF, torch.float64: 0x7FEFFFFFFFFFFFFF}  # the key of the lowest finite number


def cut(p: P, tile: LogitTiles, metadata: SamplingMetadata, nodes: Nodes) -> Tensor:
    """Return (R,) the highest `key_of` of a token that is kept."""
    assert metadata.temperature is not None
    search = _Search.of(p, tile, metadata, nodes)
    search.open(metadata.top_k, fresh=True, count=True)
    if metadata.top_k is not None:
        search.run(metadata.top_k, count=True)
    if metadata.top_p is not None:
        search.open(metadata.top_p, fresh=False, count=False)
        search.run(metadata.top_p, count=False)
    return search.high


@dataclass(frozen=True)
class _Search:
    """The interval (low, high] of keys that holds each row's cut."""

    p: P
    tile: LogitTiles
    seq: Tensor
    temperature: Tensor
    min_p: Tensor | None
    low: Tensor  # (R,)
    high: Tensor  # (R,)
    goal: Tensor  # (R,) float64, the number or weight to reach
    pick: Tensor  # (R,) int32, which part of the previous interval this one is

    @staticmethod
    def of(p: P, tile: LogitTiles, metadata: SamplingMetadata, nodes: Nodes) -> _Search:
        assert metadata.temperature is not None
        like = torch.empty_like
        low, high = (like(p.peak, dtype=_INTS[p.peak.dtype]) for _ in range(2))
        goal, pick = like(p.peak, dtype=torch.float64), like(p.peak, dtype=torch.int32)
        return _Search(p, tile, nodes.seq, metadata.temperature, metadata.min_p, low, high, goal, pick)

    def open(self, wanted: Tensor | None, *, fresh: bool, count: bool) -> None:
        """Start from all tokens that min_p keeps (fresh), or from the cut made before."""
        rows = self.low.shape[0]
        _open[(programs(rows),)](
            self.low, self.high, self.goal, self.pick, self.seq, self.temperature, self.min_p, wanted,
            rows, _LAST[self.p.peak.dtype], self.p.vocab, fresh, count, self.tile.dtype, tiles.ROWS,
        )  # fmt: skip

    def run(self, wanted: Tensor, *, count: bool) -> None:
        """Narrow to one key: by a number of tokens (count), or by a share of the weight."""
        rows, tile = self.low.shape[0], self.tile
        before, after = (self.p.peak.new_empty(rows, tile.splits, WAYS.value + 1) for _ in range(2))
        for turn in range(_PASSES[self.p.peak.dtype]):
            before, after = after, before
            _measure[tile.grid(rows)](
                self.p, self.low, self.high, self.pick, before, after, rows, tile.splits,
                turn == 0, count, tile.dtype, tiles.ROWS, tile.block,
            )  # fmt: skip
            _narrow[(programs(rows),)](
                self.low, self.high, self.goal, self.pick, after, self.seq, wanted, rows, tile.splits,
                turn == 0, count, tile.dtype, tiles.ROWS, tile.padded,
            )  # fmt: skip


@kernel
def _open(
    low, high, goal, pick, seq, temperature, min_p, wanted, rows, last, vocab,
    FRESH: tl.constexpr, COUNT: tl.constexpr, DTYPE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The interval (low, high] the cut lies in: down to the threshold of min_p, or to the cut made before.

    It is closed from the start in rows without such a filter: padding, greedy ones, and where top_k or top_p is off.
    """
    row, owned, owner = owned_rows(seq, rows, ROWS)
    _, live = my_rows(rows, ROWS)
    warm = owned & (tl.load(temperature + owner, owned, 0.0) > 0)
    top = tl.zeros([ROWS], low.dtype.element_ty) + last
    if FRESH:
        if min_p is not None:
            share = tl.load(min_p + owner, owned, 0.0).to(tl.float64)
            floor = key_of(tl.log(tl.where(share > 0, share, 1.0)).to(DTYPE), DTYPE)
            top = tl.where(warm & (share > 0), tl.minimum(floor, top), top)
    else:
        top = tl.load(high + row, live, 0)
    bottom = top - 1
    if wanted is not None:
        amount = tl.load(wanted + owner, owned, 0)
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
    p, low, high, pick, before, after, rows, splits,
    FIRST: tl.constexpr, COUNT: tl.constexpr, DTYPE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Each split's count or weight at or above the bounds that divide the interval, and above its lower end."""
    row, live = my_rows(rows, ROWS)
    split = tl.program_id(1)
    bottom, top = tl.load(low + row, live, 0), tl.load(high + row, live, 0)
    sums = (row * splits + split) * (WAYS + 1)
    under = tl.zeros([ROWS], DTYPE)
    some = live & (top - bottom > 1)
    if not FIRST:
        picked = tl.load(pick + row, live, 0)
        under = tl.load(before + sums + picked, live, 0.0)
        some = some & (tl.load(before + sums + picked + 1, live, 0.0) > under)
    tl.store(after + sums, under, live)
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
            tl.store(after + sums + (way + 1), tl.where(some, held, under), live)
    else:
        for way in tl.static_range(WAYS):
            tl.store(after + sums + (way + 1), under, live)


@triton.jit
def _bar(bottom, top, way, FIRST: tl.constexpr, DTYPE: tl.constexpr):
    """(ROWS,) the upper end of one part: 2**(way - 2) the first time, then evenly spaced; the last ends at `top`."""
    step = (top - bottom + (WAYS - 1)) // WAYS
    bar = bottom + step * (way + 1)
    if FIRST:
        exponent = tl.zeros_like(top) + way
        bar = (exponent + 1021) << 52 if tl.float64 == DTYPE else (exponent + 125) << 23
    return tl.where(way == WAYS - 1, top, tl.minimum(bar, top))


@kernel
def _narrow(
    low, high, goal, pick, held, seq, wanted, rows, splits,
    FIRST: tl.constexpr, COUNT: tl.constexpr, DTYPE: tl.constexpr, ROWS: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Keep the part of the interval in which the goal, a number of tokens or a share of the weight, is reached."""
    row, owned, owner = owned_rows(seq, rows, ROWS)
    _, live = my_rows(rows, ROWS)
    bottom, top = tl.load(low + row, live, 0), tl.load(high + row, live, 0)
    enough = tl.load(goal + row, live, 0.0)
    if FIRST and not COUNT:
        share = tl.load(wanted + owner, owned, 1.0).to(tl.float64)
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
    inside = live[:, None] & (split < splits)
    return tl.sum(tl.load(held + (row[:, None] * splits + split) * (WAYS + 1) + column, inside, 0.0).to(tl.float64), 1)
