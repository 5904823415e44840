"""Common parts of verification's kernels: a program's rows and tokens, and their p computed from the logits.

A row of logits is divided into splits of BLOCK tokens, one program each; the next kernel sums the programs' results in
one order. BLOCK depends on the vocabulary alone, so a row's bits do not depend on its batch. Sums are float64,
everything else float32 (float64 if the logits are). No tensor of the size of the logits is written.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.platform.launch import INTERPRETED

BLOCK = 4096  # tokens of a split
STEPS = (1, 16, 64)  # nodes that kernels are compiled for
COIN, SEEDED = tl.constexpr(1), tl.constexpr(2)  # values of walk.SamplingMode
ROWS = 4096 if INTERPRETED else 1  # rows of a program; the interpreter's time grows with programs, a device's with rows


class P(NamedTuple):
    """The target's p as kernels compute it: exp((logit - peak) / scale) / total of the tokens that filters keep."""

    logits: Tensor  # (R, V)
    stride: int
    vocab: int
    peak: Tensor  # (R,) the highest logit; inf: INVALID, some logit is not a number
    scale: Tensor | None  # (R,) temperatures; None: all are 1
    cut: Tensor | None = None  # (R,) the highest `key_of` of a token that is kept; None: all are
    total: Tensor | None = None  # (R,) float64


class LogitTiles(NamedTuple):
    """Division of rows of logits among programs; constants of a kernel."""

    splits: int
    block: int  # tokens in a split, a power of two
    padded: int  # splits, rounded up to a power of two
    dtype: Any  # tl.float32 or tl.float64

    @staticmethod
    def of(logits: Tensor) -> LogitTiles:
        block = min(BLOCK, triton.next_power_of_2(logits.shape[1]))
        splits = triton.cdiv(logits.shape[1], block)
        dtype = tl.float64 if logits.dtype == torch.float64 else tl.float32
        return LogitTiles(splits, block, triton.next_power_of_2(splits), dtype)

    @property
    def torch_dtype(self) -> torch.dtype:
        return torch.float64 if self.dtype == tl.float64 else torch.float32

    def grid(self, rows: int) -> tuple[int, int]:
        return programs(rows), self.splits


def steps(count: int) -> int:
    """Round nodes or tokens of a step up to one of few numbers: a kernel is compiled for each."""
    return next((size for size in STEPS if count <= size), triton.next_power_of_2(count))


def programs(rows: int) -> int:
    return int(triton.cdiv(rows, ROWS))


def kernel(function):
    """Decorate a kernel that is launched; it is not compiled anew for other numbers of rows or nodes."""
    return triton.jit(function, do_not_specialize=["rows", "count", "width", "depth"])


@triton.jit
def my_rows(count, ROWS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    return row, row < count


@triton.jit
def owned_rows(seq, rows, ROWS: tl.constexpr):
    """A program's rows, a mask of those that belong to a sequence, and the sequences; -1 for padding rows."""
    row, live = my_rows(rows, ROWS)
    owner = tl.load(seq + row, live, -1)
    return row, owner >= 0, owner


@triton.jit
def divide(x, y, DTYPE: tl.constexpr):
    """Rounded to nearest, as on a CPU."""
    return x / y if tl.float64 == DTYPE else tl.div_rn(x, y)


@triton.jit
def inverse(x, DTYPE: tl.constexpr):
    """1 / x of sums, 0 where x is too small. Rows are multiplied by it rather than divided: most of their values are 0,
    and an exact division of 0 takes a slow path."""
    some = x > (2.3e-308 if tl.float64 == DTYPE else 1.2e-38)
    return tl.where(some, divide(tl.zeros_like(x) + 1.0, tl.where(some, x, 1.0), DTYPE), 0.0)


@triton.jit
def key_of(tempered, DTYPE: tl.constexpr):
    """Integers that rise as tempered logits fall from 0."""
    return tl.abs(tempered).to(tl.int64 if tl.float64 == DTYPE else tl.int32, bitcast=True)


@triton.jit
def tempered(p, row, live, token, DTYPE: tl.constexpr):
    """(ROWS, X) of tokens (1 or ROWS, X): as distribution.process before filters; -inf beyond the vocabulary."""
    inside = live[:, None] & (token < p.vocab)
    logit = tl.load(p.logits + row[:, None] * p.stride + token, inside, float("-inf")).to(DTYPE)
    # In an INVALID row, whose peak is inf, every token becomes -inf: maximum returns the operand that is not NaN.
    shifted = tl.maximum(logit - tl.load(p.peak + row, live, 0.0)[:, None], float("-inf"))
    if p.scale is not None:
        shifted = divide(shifted, tl.load(p.scale + row, live, 1.0)[:, None], DTYPE)
    return shifted


@triton.jit
def kept(p, logit, row, live, DTYPE: tl.constexpr):
    """(ROWS, X) tempered logits, -inf where a filter drops the token."""
    if p.cut is not None:
        cut = tl.load(p.cut + row, live, 0)[:, None]
        logit = tl.where(key_of(logit, DTYPE) <= cut, logit, float("-inf"))
    return logit


@triton.jit
def probability(p, row, live, token, DTYPE: tl.constexpr):
    """(ROWS, X) p of tokens (1 or ROWS, X)."""
    weight = tl.exp(kept(p, tempered(p, row, live, token, DTYPE), row, live, DTYPE))
    return weight * inverse(tl.load(p.total + row, live, 1.0).to(DTYPE), DTYPE)[:, None]


@triton.jit
def summed(shares, row, live, splits, SPLITS: tl.constexpr):
    """(ROWS,) float64: the sum over the splits of a row."""
    split = tl.arange(0, SPLITS)[None, :]
    inside = live[:, None] & (split < splits)
    return tl.sum(tl.load(shares + row[:, None] * splits + split, inside, 0.0).to(tl.float64), 1)


@triton.jit
def find_split(shares, row, live, coin, splits, SPLITS: tl.constexpr):
    """(ROWS,) the split whose interval of the cumulative sum contains the coin, and the coin's offset within it."""
    split = tl.arange(0, SPLITS)[None, :]
    inside = live[:, None] & (split < splits)
    share = tl.load(shares + row[:, None] * splits + split, inside, 0.0)
    ends = tl.cumsum(share, 1)
    point = coin * tl.max(ends, 1)
    chosen = first_with_weight(share, ends, point, split)
    return chosen, point - tl.sum(tl.where(split == chosen[:, None] - 1, ends, 0.0), 1)


@triton.jit
def find_token(weight, rest):
    """(ROWS,) the offset, in a split of weights (ROWS, BLOCK), whose interval contains the rest of the coin."""
    weight = weight.to(tl.float64)
    place = tl.arange(0, weight.shape[1])[None, :]
    return first_with_weight(weight, tl.cumsum(weight, 1), rest, place)


@triton.jit
def first_with_weight(weight, ends, point, place):
    """Never a token of weight 0: where rounding selects one, the next of positive weight, or else the last."""
    before = tl.sum((ends <= point[:, None]).to(tl.int32), 1)[:, None]
    last = tl.max(tl.where(weight > 0, place, 0), 1)[:, None]
    return tl.min(tl.where((weight > 0) & (place >= before), place, last), 1)
