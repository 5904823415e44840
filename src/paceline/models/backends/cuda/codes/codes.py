"""Weights stored as codes on CUDA: their layout in memory, their expansion to bf16, and products with them.

A strip of 16 rows and 64 columns (32, of codes of a byte) is 512 bytes: 16 for each lane of a warp, in the order of the
tensor cores' left operand. Lane (g, t) has rows g and g + 8, and of every 16 columns 2 t, 2 t + 1, 2 t + 8, 2 t + 9.
Scales lie group by group, a strip's rows in the order 0, 8, 1, 9, ... On Hopper few rows are multiplied by `streamed`.
More rows, and other GPUs, expand the weight into scratch memory first: the same numbers in the same order of sums, so
the same bits.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.models.weights import Linear, StoredWeight, WeightKind
from paceline.platform.launch import INTERPRETED, unfused

try:
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from paceline.models.backends.cuda.codes import streamed
except ImportError:  # a Triton without Gluon
    streamed = None  # type: ignore[assignment]

STRIP, STEP = 16, 64  # rows, columns of a strip
KINDS = {WeightKind.FP8: 0, WeightKind.INT8: 1, WeightKind.INT4: 2}  # numbers of the kinds in kernels
NONE, ZEROS, OFFSETS = range(3)  # shifts beside scales
BYTES_ZERO = 128  # codes of INT8 are stored from 0 on


@dataclass(frozen=True)
class Ring:
    """The division of `streamed`."""

    m: int  # rows of x
    n: int  # rows of the weight, a multiple of 16 * warps
    unroll: int  # steps of 64 columns in a stage
    stages: int
    warps: int = 4  # warps that expand and multiply

    @property
    def registers(self) -> int:
        """Return the registers of a thread; those of four warps are set aside for the warp that copies."""
        return min(65536 // (32 * (self.warps + 4)) // 8 * 8, 248)


def fits(parts: Sequence[StoredWeight]) -> bool:
    """Return whether strips divide the weights, which are alike, and groups are halves of a step or whole steps."""
    k = parts[0].shape[1]
    assert parts[0].scales is not None
    group = k // parts[0].scales.shape[1]
    return all(part.shape[0] % STRIP == 0 for part in parts) and k % STEP == 0 and (group == 32 or group % STEP == 0)


def keeps_codes(device: torch.device) -> bool:
    """Return whether codes stay codes: other GPUs would expand a weight in every pass, slower than weights in bf16."""
    return INTERPRETED or runs_here(device)


def laid_out(weight: StoredWeight) -> StoredWeight:
    """Convert a weight from the layout of `of_codes` to that of the kernels."""
    assert weight.scales is not None
    n, k = weight.shape
    if weight.kind is WeightKind.FP8:
        return replace(weight, data=_bytes(weight.data.view(torch.uint8), n, k), scales=weight.scales.flatten())
    shift = weight.offsets if weight.zeros is None else weight.zeros
    dtype = weight.scales.dtype
    if shift is not None and not torch.equal(shift.to(dtype).double(), shift.double()):
        dtype = torch.float32
    if dtype == torch.bfloat16 and not bool((weight.scales.abs() < 0.5).all()):  # `FACTORS` is exact below 0.5
        dtype = torch.float32
    if weight.kind is WeightKind.INT4:
        data, zero = _nibbles(weight.data, n, k), 0
    else:
        data, zero = _bytes(weight.data.view(torch.uint8) ^ BYTES_ZERO, n, k), BYTES_ZERO
    zeros = None if weight.zeros is None else _by_group((weight.zeros + zero).to(dtype))
    offsets = None if weight.offsets is None else _by_group(weight.offsets.to(dtype))
    return StoredWeight(weight.kind, data, weight.shape, _by_group(weight.scales.to(dtype)), zeros, offsets)


def _nibbles(data: Tensor, n: int, k: int) -> Tensor:
    codes = torch.stack([data & 15, data >> 4], -1).view(n // 16, 2, 8, k // 64, 4, 2, 4, 2)
    h, g, step, sixteen, half, t, one = range(1, 8)
    low, high = codes.permute(0, step, g, t, sixteen, one, h, half).unbind(-1)
    return (low | high << 4).reshape(n // 16, k // 64, 32, 16)


def _bytes(data: Tensor, n: int, k: int) -> Tensor:
    h, g, step, sixteen, half, t, one = range(1, 8)
    codes = data.view(n // 16, 2, 8, k // 32, 2, 2, 4, 2).permute(0, step, g, t, sixteen, half, one, h)
    return codes.reshape(n // 16, k // 32, 32, 16)


def _by_group(values: Tensor) -> Tensor:
    """Reorder (N, G) -> (G, N / 16, 8, 2)."""
    n, groups = values.shape
    return values.t().reshape(groups, n // 16, 2, 8).transpose(2, 3).contiguous()


def arguments(weight: StoredWeight) -> tuple[tuple[Tensor, Tensor, Tensor], dict[str, int]]:
    """Return (codes, scales, shifts) and the options that all kernels of codes share."""
    assert weight.scales is not None
    shift = weight.offsets if weight.zeros is None else weight.zeros
    beside = NONE if shift is None else OFFSETS if weight.zeros is None else ZEROS
    group = 0 if weight.kind is WeightKind.FP8 else weight.shape[1] // len(weight.scales)
    tensors = weight.data, weight.scales, weight.scales if shift is None else shift
    return tensors, {"KIND": KINDS[weight.kind], "SHIFT": beside, "GROUP": group}


def expanded(weight: StoredWeight, dtype: torch.dtype) -> Tensor:
    """Expand to (N, K); FP8 without its scale."""
    n, k = weight.shape
    out = torch.empty((n, k), dtype=dtype, device=weight.data.device)
    tensors, options = arguments(weight)
    _expand[(n // 16, k // 64)](*tensors, out, n, k, **options, num_warps=1, **unfused())
    return out


def in_numbers(weight: Linear, dtype: torch.dtype) -> tuple[Linear, Tensor | None]:
    """Return the weight in numbers, and the factors of each row's sums."""
    scales = weight.weight.scales if weight.weight.kind is WeightKind.FP8 else None
    return Linear(StoredWeight.of(expanded(weight.weight, dtype)), weight.bias), scales


def streams(x: Tensor, weight: StoredWeight, gated: bool, dim: int) -> bool:
    """Return whether `streamed` serves: on Hopper, up to MOST_ROWS rows, where the partners of strips are strips."""
    paired = weight.shape[0] % 32 == 0 if gated else dim == 1 or dim % 32 == 0
    return paired and len(x) <= MOST_ROWS and x.dtype == torch.bfloat16 and runs_here(x.device)


@functools.cache
def runs_here(device: torch.device) -> bool:
    return (
        streamed is not None
        and not INTERPRETED
        and device.type == "cuda"
        and torch.cuda.get_device_capability(device)[0] == 9
    )


MOST_ROWS = 256  # rows up to which codes are expanded in registers; for more, a weight is expanded once


@functools.cache
def ring_for(rows: int, n: int, k: int, kind: WeightKind, group: int = 0) -> Ring:
    """Choose a ring, as measured on an H200 up to 64 rows. `k`: columns that one program sums."""
    m = min(max(int(triton.next_power_of_2(rows)), 8), 128)
    nibbles, wide = kind is WeightKind.INT4, n >= 16384
    if m <= 16:
        if wide:
            ring = Ring(m, 256, 4, 3, 8) if nibbles else Ring(m, 256, 2, 5, 8)
        else:  # one program a multiprocessor, whose turns must be long
            ring = Ring(m, 64, 8, 4) if nibbles else Ring(m, 64, 4, 4)
    elif m <= 64:
        ring = Ring(m, 256, 2, 3, 8) if wide else Ring(m, 64, 4, 3) if nibbles else Ring(m, 64, 2, 6)
    else:
        ring = Ring(m, 128 if wide else 64, 2, 3)
    return replace(ring, unroll=_divisor(ring.unroll, k, group))


def _divisor(most: int, k: int, group: int) -> int:
    """Return the steps of a stage: stages divide k, and divide groups or are divided by them."""
    for count in (8, 4, 2, 1):
        columns = STEP * count
        if count <= most and k % columns == 0 and (group == 0 or group % columns == 0 or columns % group == 0):
            return count
    raise AssertionError("`fits` does not let this weight pass")


def launch_streamed(
    x: Tensor, weight: Linear, into: Tensor, ring: Ring | None, rotary: tuple[Tensor, ...], **options: Any
) -> None:
    """Launch `streamed`. `options` are those that neither the weight nor the ring gives."""
    rows, k = x.shape
    n = weight.weight.shape[0]
    segments, gated, dim = options["SEGMENTS"], options["GATED"], options["DIM"]
    _, codes = arguments(weight.weight)
    ring = ring or ring_for(rows, n, k // segments, weight.weight.kind, codes["GROUP"])
    if dim > 1:  # a tile does not leave its head, and with many rows registers must suffice to rotate its sums
        most = int(triton.next_power_of_2(dim)) if ring.m <= 64 else 64
        ring = replace(ring, n=max(min(ring.n, most), 16 * ring.warps))
        tiles = n // dim * triton.cdiv(dim, ring.n)
    else:
        tiles = triton.cdiv(n, ring.n)
    streamed.streamed[(triton.cdiv(rows, ring.m) * tiles, segments if options["APART"] else 1)](
        *boxes_of(x, weight.weight, ring, gated, dim), weight.weight.scales, x if weight.bias is None else weight.bias,
        into, rows, n, k, *(rotary or (x,) * 6),
        BM=ring.m, BN=ring.n, UNROLL=ring.unroll, STAGES=ring.stages, WARPS=ring.warps, num_warps=ring.warps,
        maxnreg=ring.registers, **codes, **options, **unfused(),
    )  # fmt: skip


def boxes_of(x: Tensor, weight: StoredWeight, ring: Ring, gated: bool, dim: int) -> list[Any]:
    """Describe what the copy engine brings in one stage, of x, codes, scales and shifts: (k, rows), or (k, spans of
    strips, strips, 16 rows) where spans are paired: gate and up, or the halves of a head. Outside are zeros."""
    rows, k = x.shape
    n = weight.shape[0]
    (data, *beside), codes = arguments(weight)
    two = 2 if gated or dim > 1 else 1
    inner = dim // 32 if dim > 1 else n // STRIP // two
    outer, each = n // STRIP // inner, ring.n // STRIP // two
    unit = STEP if weight.kind is WeightKind.INT4 else STEP // 2  # columns in 16 bytes of a lane
    boxes: list[Any] = [
        TensorDescriptor(x, [k // STEP, rows, STEP], [STEP, k, 1], [ring.unroll, ring.m, STEP], _shared(128, 2, 3)),
        TensorDescriptor(
            data.view(torch.int8), [k // unit, outer, inner, 4, 128],
            [512, inner * (k // unit) * 512, k // unit * 512, 128, 1],
            [ring.unroll * STEP // unit, two, each, 4, 128], _shared(128, 1, 5),
        ),
    ]  # fmt: skip
    group = codes["GROUP"]
    if group == 0:
        return boxes + beside
    for values in beside:
        piece = 16 // values.element_size()
        boxes.append(
            TensorDescriptor(
                values, [k // group, outer, inner, 16 // piece, piece], [n, inner * 16, 16, piece, 1],
                [max(ring.unroll * STEP // group, 1), two, each, 16 // piece, piece],
                _shared(0, values.element_size(), 5),
            )
        )  # fmt: skip
    return boxes


@functools.cache
def _shared(swizzle: int, itemsize: int, rank: int) -> Any:
    return NVMMASharedLayout(swizzle, 8 * itemsize, rank)


@triton.jit
def _expand(codes, scales, shifts, out, n, k, KIND: tl.constexpr, SHIFT: tl.constexpr, GROUP: tl.constexpr):
    strip = tl.program_id(0)
    step = tl.program_id(1)
    row = tl.arange(0, 16)
    column = step * 64 + tl.arange(0, 64)
    if KIND == 2:
        bytes = tl.load(codes + (strip.to(tl.int64) * (k // 64) + step) * 512 + tl.arange(0, 512))
        code = tl.reshape(tl.join(bytes & 15, bytes >> 4), (8, 4, 4, 2, 2, 2))
        code = tl.reshape(tl.permute(code, (4, 0, 2, 5, 1, 3)), (16, 64))
    else:
        bytes = tl.load(codes + (strip.to(tl.int64) * (k // 64) + step) * 1024 + tl.arange(0, 1024))
        code = tl.reshape(bytes, (2, 8, 4, 2, 2, 2, 2))
        code = tl.reshape(tl.permute(code, (6, 1, 0, 3, 4, 2, 5)), (16, 64))
    if KIND == 0:
        weight = code.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        place = strip * 16 + row % 8 * 2 + row // 8
        at = (column // GROUP)[None, :] * n + place[:, None]
        scale = tl.load(scales + at).to(tl.float32)
        weight = code.to(tl.float32)
        if SHIFT == 1:
            weight -= tl.load(shifts + at).to(tl.float32)
        elif KIND == 1:
            weight -= 128.0
        elif SHIFT == 0:
            weight -= 8.0
        weight *= scale
        if SHIFT == 2:
            weight += tl.load(shifts + at).to(tl.float32)
    tl.store(out + (strip * 16 + row).to(tl.int64)[:, None] * k + column[None, :], weight.to(out.dtype.element_ty))
