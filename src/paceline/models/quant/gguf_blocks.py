"""The blocks of GGUF files: their weights, the places of their scales, and the numbers that they stand for.

A weight is scale * code, or scale * code + offset. The products are exact in fp32 and the sum is rounded once, so every
way to compute the expansion gives the same bits (native/blocks.h does it in registers).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

ROWS_AT_ONCE = 1 << 22  # weights expanded at a time; bounds intermediate tensors
EXPONENT = 0x7C00  # bits of a float16's exponent: all ones where it is not finite
Expand = Callable[[Tensor], Tensor]  # (B, bytes) -> (B, weights), fp32


@dataclass(frozen=True)
class BlockLayout:
    weights: int
    bytes: int
    halves: tuple[int, ...]  # offsets of a block's float16 scales
    expand_blocks: Expand

    def weights_in(self, row_bytes: int) -> int:
        return row_bytes // self.bytes * self.weights

    def row_bytes(self, weights: int) -> int:
        return weights // self.weights * self.bytes

    def expand(self, data: Tensor) -> Tensor:
        """Expand (N, bytes of a row) -> (N, K) in fp32."""
        blocks = data.reshape(-1, self.bytes)
        out = torch.empty((len(blocks), self.weights), dtype=torch.float32, device=data.device)
        step = ROWS_AT_ONCE // self.weights
        for at in range(0, len(blocks), step):
            out[at : at + step] = self.expand_blocks(blocks[at : at + step])
        return out.view(len(data), -1)

    def scales_are_finite(self, data: Tensor) -> bool:
        words = data.reshape(-1, self.bytes).view(torch.int16)  # every block has an even number of bytes
        return not any(bool((words[:, at // 2] & EXPONENT == EXPONENT).any()) for at in self.halves)


def half(blocks: Tensor, at: int) -> Tensor:
    """Read float16 scales, (B, 1) fp32."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def nibbles(data: Tensor) -> Tensor:
    """Split (..., n) -> (..., 2 n): all low nibbles, then all high ones."""
    return torch.cat([data & 15, data >> 4], -1)


def bits(data: Tensor) -> Tensor:
    """Split (B, n) -> (B, 8 n), the lowest bit of each byte first."""
    return (data[:, :, None] >> torch.arange(8, dtype=torch.uint8, device=data.device) & 1).flatten(1)


def _q4_0(raw: Tensor) -> Tensor:
    return half(raw, 0) * (nibbles(raw[:, 2:]).float() - 8)


def _q4_1(raw: Tensor) -> Tensor:
    return half(raw, 0) * nibbles(raw[:, 4:]).float() + half(raw, 2)


def codes_of_q5(raw: Tensor, at: int) -> Tensor:
    """Read 32 codes of five bits, of which the fifth bits are at `at` and the others behind them."""
    return nibbles(raw[:, at + 4 :]) | bits(raw[:, at : at + 4]) << 4


def _q5_0(raw: Tensor) -> Tensor:
    return half(raw, 0) * (codes_of_q5(raw, 2).float() - 16)


def _q5_1(raw: Tensor) -> Tensor:
    return half(raw, 0) * codes_of_q5(raw, 4).float() + half(raw, 2)


def _q8_0(raw: Tensor) -> Tensor:
    return half(raw, 0) * raw[:, 2:].contiguous().view(torch.int8).float()


def small_scales(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Read eight 6-bit scales and eight 6-bit minima from twelve bytes: (B, 8, 1) each, fp32."""
    first, second, mixed = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = torch.cat([first & 63, mixed & 15 | first >> 6 << 4], 1)
    minima = torch.cat([second & 63, mixed >> 4 | second >> 6 << 4], 1)
    return scales.float()[:, :, None], minima.float()[:, :, None]


def _of_groups(raw: Tensor, codes: Tensor) -> Tensor:
    """Expand Q4_K and Q5_K: eight groups of 32 codes (B, 8, 32), each with a scale and a minimum."""
    scales, minima = small_scales(raw[:, 4:16])
    d, least = half(raw, 0)[:, :, None], half(raw, 2)[:, :, None]
    return (d * scales * codes.float() - least * minima).flatten(1)


def codes_of_q4_k(raw: Tensor) -> Tensor:
    """Read the codes, (B, 8, 32)."""
    return nibbles(raw[:, 16:].reshape(-1, 4, 32)).reshape(-1, 8, 32)


def codes_of_q5_k(raw: Tensor) -> Tensor:
    low = nibbles(raw[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    groups = torch.arange(8, dtype=torch.uint8, device=raw.device)[:, None]
    return low | (raw[:, None, 16:48] >> groups & 1) << 4


def _q4_k(raw: Tensor) -> Tensor:
    return _of_groups(raw, codes_of_q4_k(raw))


def _q5_k(raw: Tensor) -> Tensor:
    return _of_groups(raw, codes_of_q5_k(raw))


def _q6_k(raw: Tensor) -> Tensor:
    """Expand two halves of 128, in which quarters of 32 share bytes: nibbles of `low`, two bits each of `high`."""
    low = nibbles(raw[:, :128].reshape(-1, 2, 64))  # (B, 2, 128)
    pairs = torch.arange(0, 8, 2, dtype=torch.uint8, device=raw.device)[:, None]
    high = (raw[:, 128:192].reshape(-1, 2, 1, 32) >> pairs & 3).flatten(2)
    codes = (low | high << 4).float().reshape(-1, 16, 16) - 32
    scales = raw[:, 192:208].contiguous().view(torch.int8).float()[:, :, None]
    return (half(raw, 208)[:, :, None] * scales * codes).flatten(1)


LAYOUTS = {
    "Q4_0": BlockLayout(32, 18, (0,), _q4_0),
    "Q4_1": BlockLayout(32, 20, (0, 2), _q4_1),
    "Q5_0": BlockLayout(32, 22, (0,), _q5_0),
    "Q5_1": BlockLayout(32, 24, (0, 2), _q5_1),
    "Q8_0": BlockLayout(32, 34, (0,), _q8_0),
    "Q4_K": BlockLayout(256, 144, (0, 2), _q4_k),
    "Q5_K": BlockLayout(256, 176, (0, 2), _q5_k),
    "Q6_K": BlockLayout(256, 210, (208,), _q6_k),
}
