"""x @ W^T (+ bias) for a few rows or many, with one order of summation.

Every output adds k = 0..15, 16..31, ... in this order in fp32 for every tile: the tensor cores add 16 of k at a time to
one accumulator. A deep and narrow weight is summed in two segments of k, added at the end: a property of the weight,
not of the pass, so separate programs may compute the segments when rows are few. So a row's bits depend neither on the
other rows nor on their number, nor on which operand is the left one, nor on how operands are loaded: by pointers, or in
boxes through the copy engine. Up to 64 rows share one tile, and a pass takes about the time to read the weights; more
rows take larger tiles, of up to 192 rows."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from paceline.models.backends.cuda.codes.codes import Ring, in_numbers, launch_streamed, streams
from paceline.models.backends.cuda.elementwise import activated, cached, rotate, sum_segments
from paceline.models.spec import ACTIVATIONS
from paceline.models.weights import Linear
from paceline.platform.launch import fetch, overlapped, release, unfused, wait

FEW_ROWS = 64
SMALL = 1 << 22  # numbers; a weight up to this size is prefetched before the previous kernel is done
MULTIPROCESSORS = 132
# With more rows, large products let no kernel start early: its programs would crowd on idle multiprocessors.
EARLY_ROWS = 192
APART_ROWS = 256  # rows up to which separate programs sum the segments


@dataclass(frozen=True)
class Tile:
    m: int  # rows: a power of two, or where boxes are read the sum of two
    n: int
    k: int
    warps: int
    stages: int
    swapped: bool = False  # weights are the tensor cores' left operand, so that few rows need a narrow tile only
    boxes: bool = False  # both operands are loaded by the copy engine

    @property
    def parts(self) -> tuple[int, int]:
        """Return the rows that are summed together: a weight is read once for both parts."""
        most = 1 << (self.m.bit_length() - 1)
        return most, self.m - most


@dataclass(frozen=True)
class Rotary:
    """Arguments of a product of q, k and v that rotates q and k and writes k and v to the cache."""

    positions: Tensor  # (M,)
    slots: Tensor  # (M,)
    cos: Tensor  # (max_positions, D / 2)
    sin: Tensor
    k_cache: Tensor  # (slots, Hkv, D)
    v_cache: Tensor


def linear(
    x: Tensor,
    weight: Linear,
    *,
    gated: str | None = None,
    rotary: Rotary | None = None,
    in_segments: bool = False,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    tile: Tile | None = None,
    ring: Ring | None = None,
) -> Tensor:
    """Multiply (M, K) -> (M, N).

    `gated`: the weight is [gate; up], and the result activation(gate) * up, (M, N / 2). `rotary`: the weight is
    [q; k; v], and the result q, (M, Hq * D). `in_segments`: the result may come as the sums of each segment,
    (S, M, N) in fp32.
    """
    rows, k = x.shape
    n, inputs = weight.weight.shape
    if k != inputs:
        raise ValueError(f"a linear layer of {inputs} inputs was given {k}")
    # Sums of segments are added by a kernel that neither gates nor rotates.
    activation = 0 if gated is None else 1 + ACTIVATIONS.index(gated)
    segments = 1 if gated or rotary is not None else segments_of(n, k)
    x = x if x.is_contiguous() else x.contiguous()
    dim, kv_heads = (1, 0) if rotary is None else (rotary.k_cache.shape[2], rotary.k_cache.shape[1])
    width = n // 2 if gated else n - 2 * kv_heads * dim
    apart = segments > 1 and rows <= APART_ROWS
    into = x.new_empty((segments, rows, n), dtype=torch.float32) if apart else out
    if into is None:
        into = x.new_empty((rows, width), dtype=out_dtype or x.dtype)
    if rows == 0:
        return into
    early = rows <= EARLY_ROWS or n * k <= SMALL
    turned: tuple[Tensor, ...] = ()
    if rotary is not None:
        turned = (rotary.positions, rotary.slots, rotary.cos, rotary.sin, rotary.k_cache, rotary.v_cache)
    options = {"GATED": activation, "DIM": dim, "KV_HEADS": kv_heads, "SEGMENTS": segments, "APART": apart}
    options |= {"BIASED": weight.bias is not None and not apart, **overlapped(early)}
    if weight.weight.kind.has_scales and streams(x, weight.weight, gated is not None, dim):
        launch_streamed(x, weight, into, ring, turned, **options)
    else:
        _launch(x, weight, into, tile, turned, options)
    if not apart or in_segments:
        return into
    return add_segments(into, weight.bias, out_dtype or x.dtype, out, early)


def _launch(
    x: Tensor, weight: Linear, into: Tensor, tile: Tile | None, turned: tuple[Tensor, ...], options: dict[str, int]
) -> None:
    (rows, k), n, scales = x.shape, weight.weight.shape[0], None
    if weight.weight.kind.has_scales:
        weight, scales = in_numbers(weight, x.dtype)
    stored, bias, dim = weight.weight.data, weight.bias, options["DIM"]
    length = k // options["SEGMENTS"]
    tile = tile or tile_for(rows, n, k, x.element_size())
    part, more = tile.parts
    boxes = tile.boxes and length % tile.k == 0 and x.data_ptr() % 16 == 0 and dim & (dim - 1) == 0
    if more and not boxes:
        tile, more = replace(tile, m=part), 0
    _linear[(triton.cdiv(rows, tile.m) * triton.cdiv(n, tile.n), options["SEGMENTS"] if options["APART"] else 1)](
        TensorDescriptor(x, [rows, k], [k, 1], [part, tile.k]) if boxes else x,
        TensorDescriptor(x, [rows, k], [k, 1], [more, tile.k]) if more else x,
        _box(stored, tile, bool(options["GATED"]), dim, options["KV_HEADS"]) if boxes else stored,
        stored if bias is None else bias, into, rows, n, k, *(turned or (x,) * 6), stored if scales is None else scales,
        BM=part, MORE=more, BN=tile.n, BK=tile.k, EVEN_K=length % tile.k == 0, BOXES=boxes, SWAPPED=tile.swapped,
        LINES=triton.next_power_of_2(triton.cdiv(k, 64)) if n * k <= SMALL else 0, SCALED=scales is not None,
        num_warps=tile.warps, num_stages=tile.stages, **options, **({} if scales is None else unfused()),
    )  # fmt: skip


def _box(weight: Tensor, tile: Tile, gated: bool, dim: int, kv_heads: int) -> TensorDescriptor:
    """Describe a tile's rows of the weight, in the kernel's order: (..., 2, BK) where rows are paired."""
    n, k = weight.shape
    if gated:
        return TensorDescriptor(weight, [n // 2, 2, k], [k, n // 2 * k, 1], [tile.n // 2, 2, tile.k])
    if kv_heads:
        shape, strides = [n // dim, dim // 2, 2, k], [dim * k, k, dim // 2 * k, 1]
        return TensorDescriptor(weight, shape, strides, [max(tile.n // dim, 1), min(tile.n, dim) // 2, 2, tile.k])
    return TensorDescriptor(weight, [n, k], [k, 1], [tile.n, tile.k])


def add_segments(parts: Tensor, bias: Tensor | None, dtype: torch.dtype, out: Tensor | None, early: bool) -> Tensor:
    """Add (S, M, N) -> (M, N), in order. `early`: the kernel may start before the one ahead of it is done."""
    segments, rows, n = parts.shape
    if out is None:
        out = parts.new_empty((rows, n), dtype=dtype)
    block = 1024
    _add_segments[(rows, triton.cdiv(n, block))](
        parts, parts if bias is None else bias, out, rows, n,
        SEGMENTS=segments, BIASED=bias is not None, BLOCK=block,
        **overlapped(early),
    )  # fmt: skip
    return out


@functools.cache
def segments_of(n: int, k: int) -> int:
    """Return the number of parts of k that are summed separately: few long rows alone would not fill the GPU."""
    return 2 if n <= 4096 <= k and k % 128 == 0 else 1


@functools.cache
def tile_for(rows: int, n: int, k: int, itemsize: int) -> Tile:
    """Choose the tile, as measured on an H200 with bf16 weights."""
    k //= segments_of(n, k)
    if itemsize > 2:
        return Tile(FEW_ROWS, 32, _divisor(k, 32), 4, 2)
    if rows > FEW_ROWS:
        return _many_rows(rows, n, k)
    if n < 4096:
        return Tile(16, 64, 256, 4, 3, swapped=True) if rows <= 16 else Tile(FEW_ROWS, 32, 128, 4, 5)
    if rows <= 32:
        m = 16 if rows <= 16 else 32
        return Tile(m, 64, _divisor(k, 128), 4, 4 if n >= 16384 else 6, swapped=True)
    if n >= 16384:
        return _boxes(FEW_ROWS, 128, k, 128, 4, 4)
    return _boxes(FEW_ROWS, 64, k, 64, 4, 8) if n > 4096 else _boxes(FEW_ROWS, 64, k, 128, 4, 5)


def _many_rows(rows: int, n: int, k: int) -> Tile:
    """Choose the tile of many rows. A row beyond a full tile costs a whole tile: hence 192 rows up to 192 and 384."""
    if n < 4096 and triton.cdiv(rows, 128) * triton.cdiv(n, 128) < 64:  # less than half of the GPU
        return Tile(FEW_ROWS, 32, _divisor(k, 128), 4, 4)
    thrice = 128 < rows <= 192 or 256 < rows <= 384
    if n >= 16384:
        return _boxes(192, 256, k, 64, 8, 3) if thrice else _even(rows, n, k)
    if rows <= 128:
        return _boxes(128, 64, k, 128, 4, 4)
    if rows <= 192:
        return _boxes(192, 64, k, 64, 4, 4)
    if n > 4096:
        return _boxes(192, 128, k, 64, 8, 4) if thrice else _even(rows, n, k)
    return _boxes(128, 128, k, 128, 8, 3) if rows <= APART_ROWS else _boxes(128, 128, k, 64, 8, 5)


def _even(rows: int, n: int, k: int) -> Tile:
    """Choose 256 columns, which are faster unless they leave more multiprocessors idle at the end, or 128."""
    waves = [triton.cdiv(triton.cdiv(rows, 128) * triton.cdiv(n, columns), MULTIPROCESSORS) for columns in (128, 256)]
    if n >= 32768 or 2 * waves[1] <= waves[0]:
        return _boxes(128, 256, k, 64, 8, 4)
    return _boxes(128, 128, k, 64, 8, 5)


def _boxes(m: int, n: int, k: int, step: int, warps: int, stages: int) -> Tile:
    return Tile(m, n, _divisor(k, step), warps, stages, boxes=True)


def _divisor(k: int, most: int) -> int:
    """Return the largest step that divides k, so that no load needs a mask; 32, with a mask, if none does."""
    while most > 32 and k % most:
        most //= 2
    return most


@triton.jit
def sum_of_products(x_at, w_at, used, at_k, begin, end, EVEN_K: tl.constexpr, SWAPPED: tl.constexpr, BK: tl.constexpr):
    """Sum over k in [begin, end); `x_at` and `w_at` point at k = 0."""
    BM: tl.constexpr = x_at.shape[0]
    BN: tl.constexpr = w_at.shape[1]
    total = tl.zeros((BN, BM) if SWAPPED else (BM, BN), dtype=tl.float32)
    for first in range(begin, end, BK):
        if EVEN_K:
            a = tl.load(x_at + first, mask=used[:, None], other=0.0)
            b = tl.load(w_at + first)
        else:
            a = tl.load(x_at + first, mask=used[:, None] & (at_k[None, :] < end - first), other=0.0)
            b = tl.load(w_at + first, mask=at_k[:, None] < end - first, other=0.0)
        if SWAPPED:
            total = tl.dot(tl.trans(b), tl.trans(a), total, input_precision="ieee")
        else:
            total = tl.dot(a, b, total, input_precision="ieee")
    return total


@triton.jit
def sum_of_boxes(
    x, more_x, weight, at_m, block_n, begin, end,
    BM: tl.constexpr, MORE: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GATED: tl.constexpr, DIM: tl.constexpr,
    SWAPPED: tl.constexpr,
):  # fmt: skip
    """Sum over k through descriptors of x and the weight, for BM rows and MORE."""
    MORE_ROWS: tl.constexpr = MORE if MORE > 0 else 16
    more = tl.zeros((MORE_ROWS, BN), dtype=tl.float32)
    total = tl.zeros((BN, BM) if SWAPPED else (BM, BN), dtype=tl.float32)
    for first in range(begin, end, BK):
        a = x.load([at_m, first])
        if GATED:
            b = tl.reshape(weight.load([block_n * (BN // 2), 0, first]), (BN, BK))
        elif DIM > 1:
            at = block_n * (BN // 2)
            b = tl.reshape(weight.load([at // (DIM // 2), at % (DIM // 2), 0, first]), (BN, BK))
        else:
            b = weight.load([block_n * BN, first])
        if SWAPPED:
            total = tl.dot(b, tl.trans(a), total, input_precision="ieee")
        else:
            total = tl.dot(a, tl.trans(b), total, input_precision="ieee")
        if MORE > 0:
            more = tl.dot(more_x.load([at_m + BM, first]), tl.trans(b), more, input_precision="ieee")
    return total, more


@triton.jit
def finish(
    total, at_m, at_n, block_n, bias, out, rows, n,
    GATED: tl.constexpr, BIASED: tl.constexpr, APART: tl.constexpr,
):  # fmt: skip
    """Gate and store the sums of rows `at_m`."""
    BM: tl.constexpr = total.shape[0]
    BN: tl.constexpr = total.shape[1]
    if BIASED:
        total += tl.load(bias + at_n).to(tl.float32)[None, :]
    if GATED:
        gate, up = tl.split(tl.reshape(total, (BM, BN // 2, 2)))
        total = activated(gate, GATED == 2) * up
        lane = block_n * (BN // 2) + tl.arange(0, BN // 2)
        width = n // 2
    else:
        lane = block_n * BN + tl.arange(0, BN)
        width = n
    row = at_m.to(tl.int64)
    if APART:
        row += tl.program_id(1).to(tl.int64) * rows
    place = out + row[:, None] * width + lane[None, :]
    mask = (at_m < rows)[:, None] & (lane < width)[None, :]
    tl.store(place, total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def turn(total, at_m, used, slot, pair, c, s, out, k_cache, v_cache, n, DIM: tl.constexpr, KV_HEADS: tl.constexpr):
    """Rotate q and k of rows `at_m`; store q, and k and v in their slots."""
    BM: tl.constexpr = total.shape[0]
    BN: tl.constexpr = total.shape[1]
    first, second = tl.split(tl.reshape(total, (BM, BN // 2, 2)))
    first, second = first.to(out.dtype.element_ty), second.to(out.dtype.element_ty)
    turned_first, turned_second = rotate(first, second, c, s)
    head = pair // (DIM // 2)
    q_heads = n // DIM - 2 * KV_HEADS
    place = at_m.to(tl.int64)[:, None] * (q_heads * DIM) + (head * DIM + pair % (DIM // 2))[None, :]
    lanes = used[:, None] & (head < q_heads)[None, :]
    tl.store(out + place, turned_first, mask=lanes)
    tl.store(out + place + DIM // 2, turned_second, mask=lanes)
    written = (slot >= 0)[:, None]
    place = slot[:, None] * (KV_HEADS * DIM) + ((head - q_heads) * DIM + pair % (DIM // 2))[None, :]
    lanes = written & ((head >= q_heads) & (head < q_heads + KV_HEADS))[None, :]
    tl.store(k_cache + place, cached(turned_first, k_cache), mask=lanes)
    tl.store(k_cache + place + DIM // 2, cached(turned_second, k_cache), mask=lanes)
    place -= KV_HEADS * DIM
    lanes = written & ((head >= q_heads + KV_HEADS) & (pair < n // 2))[None, :]
    tl.store(v_cache + place, cached(first, v_cache), mask=lanes)
    tl.store(v_cache + place + DIM // 2, cached(second, v_cache), mask=lanes)


@triton.jit(do_not_specialize=["rows"])
def _linear(
    x, more_x, weight, bias, out, rows, n, k, positions, slots, cos, sin, k_cache, v_cache, scales,
    BM: tl.constexpr, MORE: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GATED: tl.constexpr, DIM: tl.constexpr,
    KV_HEADS: tl.constexpr, BIASED: tl.constexpr, EVEN_K: tl.constexpr, BOXES: tl.constexpr, SWAPPED: tl.constexpr,
    SEGMENTS: tl.constexpr, APART: tl.constexpr, LINES: tl.constexpr, SCALED: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Multiply and finish a tile. SCALED: sums of a segment are multiplied with their weight row's scale."""
    tiles_m = tl.cdiv(rows, BM + MORE)
    first_m = (tl.program_id(0) % tiles_m) * (BM + MORE)
    at_m = first_m + tl.arange(0, BM)
    block_n = tl.program_id(0) // tiles_m
    tl.static_assert(MORE == 0 or SEGMENTS == 1 or APART)
    column = tl.arange(0, BN)
    ROTATED: tl.constexpr = KV_HEADS > 0
    if GATED:  # gate and up of one output are adjacent, so that one thread holds both
        lane = block_n * (BN // 2) + column // 2
        inside = lane < n // 2
        at_n = tl.where(inside, lane + (column % 2) * (n // 2), 0).to(tl.int64)
    elif ROTATED:  # likewise the two lanes of a head that are rotated together
        lane = block_n * (BN // 2) + column // 2
        inside = lane < n // 2
        at_n = lane // (DIM // 2) * DIM + lane % (DIM // 2) + (column % 2) * (DIM // 2)
        at_n = tl.where(inside, at_n, 0).to(tl.int64)
    else:
        lane = block_n * BN + column
        inside = lane < n
        at_n = tl.where(inside, lane, 0).to(tl.int64)
    length = k // SEGMENTS
    begin = tl.program_id(1) * length if APART else 0
    used = at_m < rows
    at_k = tl.arange(0, BK)
    if not BOXES:
        x_at = x + at_m.to(tl.int64)[:, None] * k + at_k[None, :]
        w_at = weight + at_n[None, :] * k + at_k[:, None]
    release(OVERLAP)
    if ROTATED:
        pair = block_n * (BN // 2) + tl.arange(0, BN // 2)
        slot = tl.load(slots + at_m, mask=used, other=-1).to(tl.int64)
        position = tl.load(positions + at_m, mask=used, other=0).to(tl.int64)
        angle = position[:, None] * (DIM // 2) + (pair % (DIM // 2))[None, :]
        if BM <= 64:
            c, s = tl.load(cos + angle), tl.load(sin + angle)
    if OVERLAP and LINES > 0 and not BOXES:
        fetch(weight + at_n[:, None] * k + tl.minimum(tl.arange(0, LINES) * 64, k - 1)[None, :])
    wait(OVERLAP)
    INSIDE: tl.constexpr = 1 if APART else SEGMENTS
    for segment in tl.static_range(INSIDE):
        at = begin + segment * length
        if BOXES:
            part, more = sum_of_boxes(
                x, more_x, weight, first_m, block_n, at, at + length, BM, MORE, BN, BK, GATED, DIM, SWAPPED
            )
        else:
            part = sum_of_products(x_at, w_at, used, at_k, at, at + length, EVEN_K, SWAPPED, BK)
        if SCALED:
            scale = tl.load(scales + at_n)
            if SWAPPED:
                part *= scale[:, None]
            else:
                part *= scale[None, :]
            if MORE > 0:
                more *= scale[None, :]
        if segment == 0:
            total = part
        else:
            total += part
    if SWAPPED:
        total = tl.trans(total)
    if ROTATED:
        if BIASED:
            total += tl.load(bias + at_n).to(tl.float32)[None, :]
        if BM > 64:  # loaded late to save registers
            c, s = tl.load(cos + angle), tl.load(sin + angle)
        turn(total, at_m, used, slot, pair, c, s, out, k_cache, v_cache, n, DIM, KV_HEADS)
    else:
        finish(total, at_m, at_n, block_n, bias, out, rows, n, GATED, BIASED, APART)
    if MORE > 0:
        at_more = first_m + BM + tl.arange(0, MORE)
        if ROTATED:
            if BIASED:
                more += tl.load(bias + at_n).to(tl.float32)[None, :]
            more_used = at_more < rows
            more_slot = tl.load(slots + at_more, mask=more_used, other=-1).to(tl.int64)
            more_position = tl.load(positions + at_more, mask=more_used, other=0).to(tl.int64)
            more_angle = more_position[:, None] * (DIM // 2) + (pair % (DIM // 2))[None, :]
            more_c, more_s = tl.load(cos + more_angle), tl.load(sin + more_angle)
            turn(more, at_more, more_used, more_slot, pair, more_c, more_s, out, k_cache, v_cache, n, DIM, KV_HEADS)
        else:
            finish(more, at_more, at_n, block_n, bias, out, rows, n, GATED, BIASED, APART)


@triton.jit(do_not_specialize=["rows"])
def _add_segments(
    parts, bias, out, rows, n,
    SEGMENTS: tl.constexpr, BIASED: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < n
    at = tl.program_id(0).to(tl.int64) * n + column
    release(OVERLAP)
    wait(OVERLAP)
    total = sum_segments(parts + at, tl.cast(rows, tl.int64) * n, inside, SEGMENTS)
    if BIASED:
        total += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)
