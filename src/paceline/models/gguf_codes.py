"""The blocks of a GGUF file as codes beside their scales, for kernels that read those; the same numbers, exactly.

Codes of four bits stay INT4 and those of five and eight become INT8, in groups of 32. Scales and offsets that are
float16 in the file stay float16; the products of two that the K blocks have need float32.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from paceline.models.gguf_blocks import codes_of_q4_k, codes_of_q5, codes_of_q5_k, half, nibbles, small_scales
from paceline.models.weights import BLOCKS, StoredWeight, WeightKind

Parts = tuple[Tensor, Tensor, Tensor | None]  # codes (uint8 up to 15, else int8), scales, offsets


def as_codes(weight: StoredWeight) -> StoredWeight | None:
    """None for blocks whose groups are smaller (Q6_K)."""
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
