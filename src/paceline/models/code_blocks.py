"""Codes beside their scales as GGUF's blocks of 32, which a CPU's kernels read, where that changes no number.

A block's number is d * q with d in float16, so it is exact where the scales are float16 numbers, groups are whole
blocks, and code - zero fits: four bits for INT4 without zero points (Q4_0), five with (Q5_0), eight for INT8 (Q8_0).
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.models.weights import BLOCKS, MIDDLE, StoredWeight, WeightKind

BLOCK = 32
ROWS_AT_ONCE = 1 << 20  # weights repacked at a time: intermediate tensors stay small
LIMITS = {WeightKind.Q4_0: 8, WeightKind.Q5_0: 16, WeightKind.Q8_0: 128}  # numbers from -limit to limit - 1


def as_blocks(weight: StoredWeight) -> StoredWeight | None:
    """The same numbers as blocks; None where no kind of blocks holds them."""
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
    """(R, K) int16: code - zero."""
    codes = weight.data[rows]
    if weight.kind is WeightKind.INT4:
        codes = torch.stack([codes & 15, codes >> 4], -1).flatten(1)
    numbers = codes.to(torch.int16)
    if weight.zeros is None:
        return numbers - MIDDLE[weight.kind]
    zeros = weight.zeros[rows]
    return (numbers.view(*zeros.shape, -1) - zeros[:, :, None]).flatten(1)


def _pack(numbers: Tensor, kind: WeightKind) -> Tensor:
    """(B, 32) -> (B, bytes of a block but its scale)."""
    if kind is WeightKind.Q8_0:
        return numbers.to(torch.int8).view(torch.uint8)
    codes = (numbers + LIMITS[kind]).to(torch.uint8)
    low, high = (codes & 15).chunk(2, 1)
    nibbles = low | high << 4
    if kind is WeightKind.Q4_0:
        return nibbles
    bits = (codes >> 4).view(-1, 4, 8) << torch.arange(8, dtype=torch.uint8)  # the lowest bit of each byte first
    return torch.cat([bits.sum(2, dtype=torch.uint8), nibbles], 1)
