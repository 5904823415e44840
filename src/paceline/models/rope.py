"""Rotary tables: the angle of each position and pair of dimensions, scaled as the config says.

YaRN (Peng et al. 2023, arXiv:2309.00071) also scales cos and sin, so that q and k carry its attention factor.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from paceline.models.spec import RopeConfig


def rope_tables(rope: RopeConfig, head_dim: int, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return cos and sin, (length, head_dim / 2), from products in fp32 as in every implementation of these models."""
    inverse = 1.0 / rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim)
    if rope.kind == "linear":
        inverse = inverse / rope.factor
    elif rope.kind == "llama3":
        inverse = _llama3_frequencies(inverse, rope)
    elif rope.kind == "yarn":
        inverse = _yarn_frequencies(inverse, rope, head_dim)
    angles = torch.arange(length, dtype=torch.float32)[:, None] * inverse
    cos, sin = angles.cos(), angles.sin()
    if rope.attention_factor != 1.0:
        cos, sin = cos * rope.attention_factor, sin * rope.attention_factor
    return cos.to(device), sin.to(device)


def _llama3_frequencies(inverse: Tensor, rope: RopeConfig) -> Tensor:
    """Slow long waves by `factor`, keep short ones, interpolate those between."""
    wavelength = 2 * math.pi / inverse
    longest = rope.original_max_positions / rope.low_freq_factor
    shortest = rope.original_max_positions / rope.high_freq_factor
    blend = (rope.original_max_positions / wavelength - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    between = (1 - blend) * inverse / rope.factor + blend * inverse
    slowed = torch.where(wavelength > longest, inverse / rope.factor, between)
    return torch.where(wavelength < shortest, inverse, slowed)


def _yarn_frequencies(inverse: Tensor, rope: RopeConfig, head_dim: int) -> Tensor:
    """Keep pairs that turn more than `beta_fast` times in the original context, slow those of less than `beta_slow`
    turns by `factor`, and mix those between by a ramp over the dimensions."""

    def dimension(turns: float) -> float:
        """Return the dimension whose pair turns `turns` times in the original context."""
        return head_dim * math.log(rope.original_max_positions / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low or 0.001
    slowed = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    return inverse / rope.factor * slowed + inverse * (1 - slowed)
