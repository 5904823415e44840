"""Small operations between products: residual add + RMSNorm, q/k norm + RoPE + cache write, SiLU * up.

One program sees a whole row (or head), so a row's sums have one order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.models.kernels import RopeArgs
from paceline.models.kv_cache import LayerCache
from paceline.models.plan import PassPlan
from paceline.models.spec import GELU_TANH, SILU
from paceline.platform.launch import overlapped, release, wait


def rms_norm(x: Tensor, added: Tensor | None, weight: Tensor, eps: float, centred: bool = False) -> Tensor:
    """Add `added` to x in place, if given; return the normed rows; `centred`: after subtraction of a row's mean.

    `added` may be the segments of a product, (S, M, H) in fp32: their sum in order is rounded to the dtype of x.
    """
    rows, hidden = x.shape
    assert x.is_contiguous()
    out = x.new_empty((rows, hidden))
    if rows:
        block = triton.next_power_of_2(hidden)
        _rms_norm[(rows,)](
            x, x if added is None else added.contiguous(), weight, out, rows, hidden, eps,
            BLOCK=block, CENTRED=centred, ADD=added is not None,
            SEGMENTS=0 if added is None or added.ndim == 2 else len(added),
            num_warps=max(1, min(16, block // 256)), **overlapped(),
        )  # fmt: skip
    return out


def rope_and_store(qkv: Tensor, plan: PassPlan, rope: RopeArgs, cache: LayerCache) -> Tensor:
    cos, sin, q_norm, k_norm, eps = rope
    rows, width = qkv.shape
    _, kv_heads, dim = cache.k.shape
    q_heads = width // dim - 2 * kv_heads
    if q_norm is not None and k_norm is not None and len(q_norm) != dim:  # all heads are normed as one
        parts = qkv.split([len(q_norm), len(k_norm), len(k_norm)], 1)
        q, k = (rms_norm(x.contiguous(), None, norm, eps) for x, norm in zip(parts, (q_norm, k_norm), strict=False))
        qkv, q_norm, k_norm = torch.cat((q, k, parts[2]), 1), None, None
    q = qkv.new_empty((rows, q_heads, dim))
    if rows:
        _rope_and_store[(rows, q_heads + 2 * kv_heads)](
            qkv, plan.positions, plan.slots, cos, sin, q, cache.k, cache.v, q if q_norm is None else q_norm,
            q if k_norm is None else k_norm, eps,
            DIM=dim, HALF=triton.next_power_of_2(dim // 2), Q_HEADS=q_heads, KV_HEADS=kv_heads,
            NORMED=q_norm is not None,
            num_warps=1, **overlapped(),
        )  # fmt: skip
    return q


def gate(gate_up: Tensor, activation: str = SILU) -> Tensor:
    rows, width = gate_up.shape
    out = gate_up.new_empty((rows, width // 2))
    if rows:
        block = 1024
        _gate[(rows, triton.cdiv(width // 2, block))](
            gate_up.contiguous(), out, width // 2, BLOCK=block, TANH=activation == GELU_TANH
        )
    return out


@triton.jit
def sum_segments(at, stride, inside, SEGMENTS: tl.constexpr):
    """Add the sums of a product's segments, in order."""
    total = tl.load(at, mask=inside, other=0.0)
    for segment in tl.static_range(1, SEGMENTS):
        total += tl.load(at + segment * stride, mask=inside, other=0.0)
    return total


@triton.jit
def rotate(first, second, c, s):
    """Rotate pairs of lanes, with one rounding each."""
    a, b = first.to(tl.float32), second.to(tl.float32)
    return tl.fma(a, c, -(b * s)).to(first.dtype), tl.fma(b, c, a * s).to(first.dtype)


@triton.jit
def activated(gate, TANH: tl.constexpr):
    """Compute gate * sigmoid(s): s is the gate itself, or for the tanh form of GELU a polynomial of it."""
    if TANH:
        s = gate * (1.5957691216057308 + 0.07135481627159393 * gate * gate)
        result = gate / (1.0 + tl.exp(-s))
    else:
        result = gate / (1.0 + tl.exp(-gate))
    return result


@triton.jit
def cached(value, cache):
    """Convert a value to the dtype of the cache; e4m3 reaches 448."""
    if cache.dtype.element_ty == tl.float8e4nv:
        value = tl.minimum(tl.maximum(value.to(tl.float32), -448.0), 448.0)
    return value.to(cache.dtype.element_ty)


@triton.jit(do_not_specialize=["rows"])
def _rms_norm(
    x, added, weight, out, rows, hidden, eps,
    BLOCK: tl.constexpr, CENTRED: tl.constexpr, ADD: tl.constexpr, SEGMENTS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * hidden
    column = tl.arange(0, BLOCK)
    inside = column < hidden
    scale = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    release(OVERLAP)
    wait(OVERLAP)
    value = tl.load(x + row + column, mask=inside, other=0.0).to(tl.float32)
    if SEGMENTS > 0:
        more = sum_segments(added + row + column, tl.cast(rows, tl.int64) * hidden, inside, SEGMENTS)
        value += more.to(x.dtype.element_ty).to(tl.float32)
    elif ADD:
        value += tl.load(added + row + column, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        value = value.to(x.dtype.element_ty).to(tl.float32)  # norm the rounded value, as stored in the residual stream
        tl.store(x + row + column, value.to(x.dtype.element_ty), mask=inside)
    if CENTRED:
        value = tl.where(inside, value - tl.sum(value) / hidden, 0.0)
    value = value * tl.rsqrt(tl.sum(value * value) / hidden + eps)
    tl.store(out + row + column, (value * scale).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _rope_and_store(
    qkv, positions, slots, cos, sin, q, k_cache, v_cache, q_norm, k_norm, eps,
    DIM: tl.constexpr, HALF: tl.constexpr, Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, NORMED: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    lane = tl.arange(0, HALF)
    inside = lane < DIM // 2
    position = tl.load(positions + row).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    c = tl.load(cos + position * (DIM // 2) + lane, mask=inside, other=0.0)
    s = tl.load(sin + position * (DIM // 2) + lane, mask=inside, other=0.0)
    release(OVERLAP)
    wait(OVERLAP)
    source = qkv + (row * (Q_HEADS + 2 * KV_HEADS) + head) * DIM + lane
    first = tl.load(source, mask=inside, other=0.0)
    second = tl.load(source + DIM // 2, mask=inside, other=0.0)
    if head >= Q_HEADS + KV_HEADS:
        if slot >= 0:
            place = v_cache + (slot * KV_HEADS + head - Q_HEADS - KV_HEADS) * DIM + lane
            tl.store(place, cached(first, v_cache), mask=inside)
            tl.store(place + DIM // 2, cached(second, v_cache), mask=inside)
    else:
        if NORMED:
            norm = q_norm if head < Q_HEADS else k_norm
            a = first.to(tl.float32)
            b = second.to(tl.float32)
            scale = tl.rsqrt((tl.sum(a * a) + tl.sum(b * b)) / DIM + eps)
            a = (a * scale).to(first.dtype).to(tl.float32) * tl.load(norm + lane, mask=inside, other=0.0).to(tl.float32)
            b = (b * scale).to(first.dtype).to(tl.float32) * tl.load(norm + DIM // 2 + lane, mask=inside, other=0.0).to(
                tl.float32
            )
            turned_a, turned_b = rotate(a, b, c, s)
            turned_a, turned_b = turned_a.to(first.dtype), turned_b.to(first.dtype)
        else:
            turned_a, turned_b = rotate(first, second, c, s)
        if head < Q_HEADS:
            place = q + (row * Q_HEADS + head) * DIM + lane
            tl.store(place, turned_a, mask=inside)
            tl.store(place + DIM // 2, turned_b, mask=inside)
        elif slot >= 0:
            place = k_cache + (slot * KV_HEADS + head - Q_HEADS) * DIM + lane
            tl.store(place, cached(turned_a, k_cache), mask=inside)
            tl.store(place + DIM // 2, cached(turned_b, k_cache), mask=inside)


@triton.jit
def _gate(gate_up, out, width, BLOCK: tl.constexpr, TANH: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(gate_up + row * 2 * width + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + column, (activated(gate, TANH) * up).to(out.dtype.element_ty), mask=inside)
