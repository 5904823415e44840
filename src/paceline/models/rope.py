"""Rotary tables: the angle of each position and pair of dimensions, scaled as the config says.

YaRN (Peng et al. 2023, arXiv:2309.00071) also scales cos and sin, so that q and k carry its attention factor.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from paceline.models.spec import RopeConfig


def rope_tables(rope: RopeConfig, head_dim: int, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return cos and sin, (length, head_dim / 2), from products in fp32 as in every implementation of these models.

    Dimensions that are not rotated have cos 1 and sin 0, the last in each half of a head (see `half_order`).
    """
    dims = head_dim if rope.dims is None else rope.dims
    cos, sin = torch.ones(length, head_dim // 2), torch.zeros(length, head_dim // 2)
    if dims:
        inverse = _frequencies(rope, dims)
        angles = torch.arange(length, dtype=torch.float32)[:, None] * inverse
        cos[:, : dims // 2], sin[:, : dims // 2] = angles.cos(), angles.sin()
        if rope.attention_factor != 1.0:
            cos[:, : dims // 2] *= rope.attention_factor
            sin[:, : dims // 2] *= rope.attention_factor
    return cos.to(device), sin.to(device)


def half_order(head_dim: int, dims: int | None, *, neighbours: bool) -> list[int] | None:
    """Return the order of a head's rows in which dimension i and head_dim / 2 + i are a rotary pair; None: as stored.

    `dims` are rotated; a pair was trained as neighbours, or as dimensions i and dims / 2 + i. A product of q and k does
    not depend on the order of their dimensions, so kernels know one form.
    """
    dims = head_dim if dims is None else dims
    if dims == 0 or (dims == head_dim and not neighbours):
        return None
    rotated = [list(range(0, dims, 2)), list(range(1, dims, 2))]
    if not neighbours:
        rotated = [list(range(dims // 2)), list(range(dims // 2, dims))]
    rest = list(range(dims, head_dim))
    return [*rotated[0], *rest[: len(rest) // 2], *rotated[1], *rest[len(rest) // 2 :]]


def _frequencies(rope: RopeConfig, dims: int) -> Tensor:
    inverse = 1.0 / rope.theta ** (torch.arange(0, dims, 2, dtype=torch.int64).float() / dims)
    if rope.kind == "linear":
        return inverse / rope.factor
    if rope.kind == "llama3":
        return _llama3_frequencies(inverse, rope)
    if rope.kind == "yarn":
        return _yarn_frequencies(inverse, rope, dims)
    if rope.kind == "longrope":
        powers = torch.arange(0, dims, 2, dtype=torch.int64).float() / dims
        return 1.0 / (torch.tensor(rope.divisors, dtype=torch.float32) * rope.theta**powers)
    return inverse


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
