"""x @ W^T (+ bias) for a few rows or many, with one order of summation.

Every output adds k = 0..15, 16..31, ... in that order in fp32, whatever the tile: the tensor cores take 16 of k at a
time into the same accumulator. So a row's bits depend neither on the rows beside it nor on how many there are. Up to
64 rows share one tile and a pass costs about the time to read the weights; more rows take larger tiles. Which operand
is the left one makes no difference either.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.models.triton.launch import overlapped, release, wait

FEW_ROWS = 64


@dataclass(frozen=True)
class Tile:
    m: int
    n: int
    k: int
    warps: int
    stages: int
    swapped: bool = False  # weights are the tensor cores' left operand, so that few rows need a narrow tile only


@dataclass(frozen=True)
class TritonWeight:
    weight: Tensor  # (N, K)
    bias: Tensor | None  # (N,)

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)


def linear(
    x: Tensor,
    weight: TritonWeight,
    *,
    gated: bool = False,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    overlap: bool = False,
    tile: Tile | None = None,
) -> Tensor:
    """(M, K) -> (M, N); `gated`: the weight is [gate; up], and the result silu(gate) * up, (M, N / 2)."""
    rows, k = x.shape
    n = weight.weight.shape[0]
    if k != weight.weight.shape[1]:
        raise ValueError(f"a linear layer of {weight.weight.shape[1]} inputs was given {k}")
    x = x if x.is_contiguous() else x.contiguous()
    width = n // 2 if gated else n
    if out is None:
        out = x.new_empty((rows, width), dtype=out_dtype or x.dtype)
    if rows == 0:
        return out
    tile = tile or tile_for(rows, n, k, x.element_size())
    grid = (triton.cdiv(rows, tile.m) * triton.cdiv(n, tile.n),)
    _linear[grid](
        x,
        weight.weight,
        weight.bias if weight.bias is not None else weight.weight,
        out,
        rows,
        n,
        k,
        BM=tile.m,
        BN=tile.n,
        BK=tile.k,
        GATED=gated,
        BIASED=weight.bias is not None,
        EVEN_K=k % tile.k == 0,
        SWAPPED=tile.swapped,
        num_warps=tile.warps,
        num_stages=tile.stages,
        **overlapped(overlap),
    )
    return out


@functools.cache
def tile_for(rows: int, n: int, k: int, itemsize: int) -> Tile:
    """As measured on an H200 with bf16 weights."""
    if itemsize > 2:
        return Tile(FEW_ROWS, 32, _divisor(k, 32), 4, 2)
    if rows > FEW_ROWS:
        return _many_rows(n, k)
    if rows <= 16 and n >= 4096:
        if n >= 16384:
            return Tile(16, 128, _divisor(k, 128), 4, 4, swapped=True)
        return Tile(16, 64, _divisor(k, 128), 4, 6, swapped=True)
    if n >= 32768:
        return Tile(FEW_ROWS, 128, _divisor(k, 128), 8, 4)
    if n >= 16384:
        return Tile(FEW_ROWS, 128, _divisor(k, 64), 4, 5, swapped=True)
    if n > 4096:
        return Tile(FEW_ROWS, 64, _divisor(k, 128), 4, 5)
    if n >= 4096:
        return Tile(FEW_ROWS, 32, _divisor(k, 256), 4, 4)
    return Tile(16, 64, 256, 4, 3, swapped=True) if rows <= 16 else Tile(FEW_ROWS, 32, 128, 4, 5)


def _many_rows(n: int, k: int) -> Tile:
    return Tile(128, 256, _divisor(k, 64), 8, 3) if n >= 16384 else Tile(128, 128, _divisor(k, 64), 8, 4)


def _divisor(k: int, most: int) -> int:
    """The largest step that divides k, so that no load needs a mask; 32, and a mask where that does not either."""
    while most > 32 and k % most:
        most //= 2
    return most


@triton.jit(do_not_specialize=["rows"])
def _linear(
    x,
    weight,
    bias,
    out,
    rows,
    n,
    k,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GATED: tl.constexpr,
    BIASED: tl.constexpr,
    EVEN_K: tl.constexpr,
    SWAPPED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    tiles_m = tl.cdiv(rows, BM)
    at_m = (tl.program_id(0) % tiles_m) * BM + tl.arange(0, BM)
    block_n = tl.program_id(0) // tiles_m
    column = tl.arange(0, BN)
    if GATED:  # gate and up of one output stand side by side, so that one thread holds both
        half = n // 2
        lane = block_n * (BN // 2) + column // 2
        at_n = tl.where(lane < half, lane + (column % 2) * half, 0).to(tl.int64)
        inside = lane < half
    else:
        lane = block_n * BN + column
        inside = lane < n
        at_n = tl.where(inside, lane, 0).to(tl.int64)
    at_k = tl.arange(0, BK)
    x_at = x + at_m.to(tl.int64)[:, None] * k + at_k[None, :]
    w_at = weight + at_n[None, :] * k + at_k[:, None]
    used = at_m < rows
    release(OVERLAP)
    wait(OVERLAP)
    total = tl.zeros((BN, BM) if SWAPPED else (BM, BN), dtype=tl.float32)
    for first in range(0, k, BK):
        if EVEN_K:
            a = tl.load(x_at, mask=used[:, None], other=0.0)
            b = tl.load(w_at)
        else:
            a = tl.load(x_at, mask=used[:, None] & (at_k[None, :] < k - first), other=0.0)
            b = tl.load(w_at, mask=at_k[:, None] < k - first, other=0.0)
        if SWAPPED:
            total = tl.dot(tl.trans(b), tl.trans(a), total, input_precision="ieee")
        else:
            total = tl.dot(a, b, total, input_precision="ieee")
        x_at += BK
        w_at += BK
    if SWAPPED:
        total = tl.trans(total)
    if BIASED:
        total += tl.load(bias + at_n).to(tl.float32)[None, :]
    if GATED:
        gate, up = tl.split(tl.reshape(total, (BM, BN // 2, 2)))
        result = gate / (1.0 + tl.exp(-gate)) * up
        lanes = block_n * (BN // 2) + tl.arange(0, BN // 2)
        place = out + at_m.to(tl.int64)[:, None] * half + lanes[None, :]
        tl.store(place, result.to(out.dtype.element_ty), mask=used[:, None] & (lanes < half)[None, :])
    else:
        place = out + at_m.to(tl.int64)[:, None] * n + lane[None, :]
        tl.store(place, total.to(out.dtype.element_ty), mask=used[:, None] & inside[None, :])
