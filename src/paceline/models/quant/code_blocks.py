"""Codes beside their scales as GGUF's blocks of 32, which a CPU's kernels read, and blocks as codes, for a GPU's, where
no number changes.

`as_blocks`: a block's number is d * q with d in float16, so it is exact where the scales are float16 numbers, groups
are whole blocks, and code - zero fits: four bits for INT4 without zero points (Q4_0), five with (Q5_0), eight for INT8
(Q8_0). `as_codes`: codes of four bits stay INT4 and those of five and eight become INT8, in groups of 32. Scales and
offsets that are float16 in the file stay float16; the products of two that the K blocks have need float32.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from paceline.models.quant.gguf_blocks import codes_of_q4_k, codes_of_q5, codes_of_q5_k, half, nibbles, small_scales
from paceline.models.weights import BLOCKS, MIDDLE, StoredWeight, WeightKind

BLOCK = 32
ROWS_AT_ONCE = 1 << 20  # weights repacked at a time; bounds intermediate tensors
LIMITS = {WeightKind.Q4_0: 8, WeightKind.Q5_0: 16, WeightKind.Q8_0: 128}  # numbers from -limit to limit - 1


def as_blocks(weight: StoredWeight) -> StoredWeight | None:
    """Convert a weight to blocks of equal numbers; None where no kind of blocks holds them."""
    if weight.kind not in MIDDLE or weight.scales is None or weight.offsets is not None:
        return None
    rows, columns = weight.shape
    group = columns // weight.scales.shape[1]
    halves = weight.scales.half()
    if group % BLOCK or not torch.equal(halves.float(), weight.scales.float()):
        return None
    kind = WeightKind.Q8_0
    if weight.kind is WeightKind.INT4:
        kind = WeightKind.Q4_0 if weight.zeros is None else WeightKind.Q5_0
    out = torch.empty((rows, BLOCKS[kind].row_bytes(columns)), dtype=torch.uint8)
    step = max(1, ROWS_AT_ONCE // columns)
    for at in range(0, rows, step):
        numbers = _numbers(weight, slice(at, at + step)).view(-1, BLOCK)
        if weight.zeros is not None and not bool((numbers.abs() < LIMITS[kind]).all()):
            return None
        scales = halves[at : at + step].repeat_interleave(group // BLOCK, 1).view(-1, 1).view(torch.uint8)
        out[at : at + step] = torch.cat([scales, _pack(numbers, kind)], 1).view(-1, out.shape[1])
    return StoredWeight.of_blocks(kind, out)


def _numbers(weight: StoredWeight, rows: slice) -> Tensor:
    """Return code - zero, (R, K) int16."""
    codes = weight.data[rows]
    if weight.kind is WeightKind.INT4:
        codes = torch.stack([codes & 15, codes >> 4], -1).flatten(1)
    numbers = codes.to(torch.int16)
    if weight.zeros is None:
        return numbers - MIDDLE[weight.kind]
    zeros = weight.zeros[rows]
    return (numbers.view(*zeros.shape, -1) - zeros[:, :, None]).flatten(1)


def _pack(numbers: Tensor, kind: WeightKind) -> Tensor:
    """Pack (B, 32) -> (B, bytes of a block but its scale)."""
    if kind is WeightKind.Q8_0:
        return numbers.to(torch.int8).view(torch.uint8)
    codes = (numbers + LIMITS[kind]).to(torch.uint8)
    low, high = (codes & 15).chunk(2, 1)
    packed = low | high << 4
    if kind is WeightKind.Q4_0:
        return packed
    bits = (codes >> 4).view(-1, 4, 8) << torch.arange(8, dtype=torch.uint8)  # the lowest bit of each byte first
    return torch.cat([bits.sum(2, dtype=torch.uint8), packed], 1)


# -- blocks as codes

Parts = tuple[Tensor, Tensor, Tensor | None]  # codes (uint8 up to 15, else int8), scales, offsets


def as_codes(weight: StoredWeight) -> StoredWeight | None:
    """Convert blocks to codes of equal numbers; None for blocks of smaller groups (Q6_K)."""
    if weight.kind not in _READ:
        return None
    n, k = weight.shape
    raw = weight.data.reshape(-1, BLOCKS[weight.kind].bytes)
    codes, scales, offsets = _READ[weight.kind](raw)
    codes = codes.reshape(n, k)
    kind = WeightKind.INT8
    if codes.dtype == torch.uint8:
        kind, codes = WeightKind.INT4, codes[:, ::2] | codes[:, 1::2] << 4
    return StoredWeight.of_codes(
        kind, codes, scales.reshape(n, -1), offsets=None if offsets is None else offsets.reshape(n, -1)
    )


def _k_scales(raw: Tensor) -> tuple[Tensor, Tensor]:
    scales, minima = small_scales(raw[:, 4:16])  # (B, 8, 1)
    return half(raw, 0) * scales[:, :, 0], -(half(raw, 2) * minima[:, :, 0])


_READ: dict[WeightKind, Callable[[Tensor], Parts]] = {
    WeightKind.Q4_0: lambda raw: (nibbles(raw[:, 2:]), half(raw, 0).half(), None),
    WeightKind.Q4_1: lambda raw: (nibbles(raw[:, 4:]), half(raw, 0).half(), half(raw, 2).half()),
    WeightKind.Q5_0: lambda raw: (codes_of_q5(raw, 2).to(torch.int8) - 16, half(raw, 0).half(), None),
    WeightKind.Q5_1: lambda raw: (codes_of_q5(raw, 4).to(torch.int8), half(raw, 0).half(), half(raw, 2).half()),
    WeightKind.Q8_0: lambda raw: (raw[:, 2:].contiguous().view(torch.int8), half(raw, 0).half(), None),
    WeightKind.Q4_K: lambda raw: (codes_of_q4_k(raw), *_k_scales(raw)),
    WeightKind.Q5_K: lambda raw: (codes_of_q5_k(raw).to(torch.int8), *_k_scales(raw)),
}
