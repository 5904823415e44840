"""The target's p of every row as a function of the logits and four numbers: highest, temperature, cut and total."""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton.language as tl
from torch import Tensor

from paceline.verify.cuda import tiles
from paceline.verify.cuda.cut import cut
from paceline.verify.cuda.tiles import (
    COIN,
    LogitTiles,
    P,
    inverse,
    kept,
    kernel,
    my_rows,
    owned_rows,
    programs,
    summed,
    tempered,
)
from paceline.verify.processors import Nodes, SamplingMetadata


@dataclass(frozen=True)
class TargetDistribution:
    """R rows of logits, and the numbers per row that turn them into p."""

    p: P
    tile: LogitTiles
    seq: Tensor  # (R,) int64, the sequence of each row; -1: padding, skipped
    best: Tensor  # (R,) int64, the first of the highest; INVALID where a logit is not a number
    shares: Tensor | None = None  # (R, splits) float64, sums of exp(tempered logit) over the tokens kept

    @staticmethod
    def of(logits: Tensor, metadata: SamplingMetadata, nodes: Nodes) -> TargetDistribution:
        """Compute from logits to which penalties, biases and bans are already applied."""
        logits = logits if logits.stride(1) == 1 else logits.contiguous()
        tile, rows = LogitTiles.of(logits), logits.shape[0]
        peak = logits.new_empty(rows, dtype=tile.torch_dtype)
        scale = None if metadata.temperature is None else torch.empty_like(peak)
        best = torch.empty(rows, dtype=torch.int64, device=logits.device)
        p = P(logits, logits.stride(0), logits.shape[1], peak, scale)
        tops, places = peak.new_empty(rows, tile.splits), best.new_empty(rows, tile.splits)
        _peak[tile.grid(rows)](p, nodes.seq, tops, places, rows, tile.splits, tile.dtype, tiles.ROWS, tile.block)
        _row[(programs(rows),)](
            p, tops, places, best, nodes.seq, metadata.temperature, rows, tile.splits,
            tile.dtype, tiles.ROWS, tile.padded,
        )  # fmt: skip
        return TargetDistribution(p, tile, nodes.seq, best)

    def filtered(self, metadata: SamplingMetadata, nodes: Nodes) -> TargetDistribution:
        """Return the distribution with the cut of the filters."""
        if metadata.temperature is None or not metadata.filters:
            return self
        return replace(self, p=self.p._replace(cut=cut(self.p, self.tile, metadata, nodes)))

    def weighed(self, kind: Tensor | None = None) -> TargetDistribution:
        """Return the distribution with the sums that turn weights into probabilities.

        With `kind` (S,), the sequences' sampling modes: only the sums of the splits, which suffice for a coin, and only
        of rows that draw by coins.
        """
        rows, tile = self.best.shape[0], self.tile
        shares = self.p.peak.new_empty(rows, tile.splits, dtype=torch.float64)
        _weigh[tile.grid(rows)](self.p, self.seq, kind, shares, rows, tile.splits, tile.dtype, tiles.ROWS, tile.block)
        if kind is not None:
            return replace(self, shares=shares)
        total = shares.new_empty(rows)
        _total[(programs(rows),)](shares, total, rows, tile.splits, tiles.ROWS, tile.padded)
        return replace(self, p=self.p._replace(total=total), shares=shares)

    def write(self, *, probabilities: bool) -> Tensor:
        """Return (R, V) processed logits, or p."""
        rows = self.best.shape[0]
        out = self.p.peak.new_empty(rows, self.p.vocab)
        _write[self.tile.grid(rows)](self.p, out, rows, probabilities, self.tile.dtype, tiles.ROWS, self.tile.block)
        return out


@kernel
def _peak(p, seq, tops, places, rows, splits, DTYPE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Each split's highest logit, and the first token that has it."""
    row, live, _ = owned_rows(seq, rows, ROWS)
    if tl.max(live.to(tl.int32), 0) > 0:
        split = tl.program_id(1)
        token = split * BLOCK + tl.arange(0, BLOCK)[None, :]
        inside = live[:, None] & (token < p.vocab)
        logit = tl.load(p.logits + row[:, None] * p.stride + token, inside, float("-inf")).to(DTYPE)
        broken = tl.max(((logit != logit) | (logit == float("inf"))).to(tl.int32), 1) > 0
        tl.store(tops + row * splits + split, tl.where(broken, float("nan"), tl.max(logit, 1)), live)
        tl.store(places + row * splits + split, split * BLOCK + tl.argmax(logit, 1), live)


@kernel
def _row(
    p, tops, places, best, seq, temperature, rows, splits,
    DTYPE: tl.constexpr, ROWS: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """The row's highest logit, over all splits, and its temperature."""
    row, live, owner = owned_rows(seq, rows, ROWS)
    split = tl.arange(0, SPLITS)[None, :]
    inside = live[:, None] & (split < splits)
    top = tl.load(tops + row[:, None] * splits + split, inside, float("-inf"))
    broken = tl.max((top != top).to(tl.int32), 1) > 0
    top = tl.where(top != top, float("-inf"), top)
    peak, winner = tl.max(top, 1), tl.argmax(top, 1)
    broken = broken | (peak == float("-inf"))  # nothing finite
    tl.store(p.peak + row, tl.where(broken, float("inf"), peak), live)
    token = tl.load(places + row * splits + winner, live, 0)
    tl.store(best + row, tl.where(broken, -1, token), live)
    if temperature is not None:
        asked = tl.load(temperature + owner, live, 1.0)
        scale = tl.where(asked > 0, asked, 1.0)
        tiny = 2.2250738585072014e-308 if tl.float64 == DTYPE else 1.1754943508222875e-38
        huge = 1.7976931348623157e308 if tl.float64 == DTYPE else 3.4028234663852886e38
        tl.store(p.scale + row, tl.clamp(scale.to(DTYPE), tiny, huge), live)


@kernel
def _weigh(p, seq, kind, shares, rows, splits, DTYPE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row, live, owner = owned_rows(seq, rows, ROWS)
    if kind is not None:
        live = live & (tl.load(kind + owner, live, 0) == COIN)
    if tl.max(live.to(tl.int32), 0) > 0:
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
