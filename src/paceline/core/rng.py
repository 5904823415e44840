"""Randomness without state: every number is a hash of what it is for, so nothing drawn depends on the batch.

A key is a row of 64-bit words: the request's seed (its private random key when the user gave none), where in the
sequence, which node. Each use has its own Lane, so no two uses share a number. The integers are equal on every
device; the logarithms of Gumbel noise may differ between devices in their last bit, never between batches.

The 64-bit mix is splitmix64's finaliser (Steele et al. 2014, Stafford's variant 13) over the words in turn. Gumbel
noise hashes the token with a 32-bit mix (Wellons' triple32) that takes in both halves of the row's 64-bit key: a token
of probability 1e-9 is drawn at the right rate within 0.3 %, and all rarer ones together are worth less than 1e-6.
torch has no unsigned arithmetic, so the mixes exist in numpy for the CPU and in Triton (rng_triton.py) for CUDA.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import numpy as np
import torch
from torch import Tensor

_GOLDEN, _MIX_1, _MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_TRIPLE_1, _TRIPLE_2, _TRIPLE_3 = 0xED5AD4BB, 0xAC4C1B51, 0x31848BAB


class Lane(IntEnum):
    """Uses of random numbers. Values are part of what a seed means: never renumber."""

    WALK = 1  # the coin that draws an unseeded row's token at one node
    GUMBEL = 2  # the noise a seeded request adds to log p, and its drafter to log q
    DRAFT = 3  # a drafter sampling from its own q
    ACCEPT = 4  # acceptance coins of block verification
    RESIDUAL = 5  # the token drawn where block verification stops


def bits(lane: Lane, *words: Tensor) -> Tensor:
    """Return (R,) int64: 64 well-mixed bits of the lane and each row's words, (R,) int64 each."""
    if words[0].is_cpu:
        return torch.from_numpy(_numpy_bits(lane, [word.numpy().view(np.uint64) for word in words]).view(np.int64))
    from paceline.core import rng_triton

    return rng_triton.bits(lane_constant(lane), words)


def uniform(lane: Lane, *words: Tensor) -> Tensor:
    """Return (R,) float64 strictly between 0 and 1, on a grid of 2**-52 shifted by half a step."""
    if words[0].is_cpu:
        return (bits(lane, *words) >> 12).bitwise_and_(2**52 - 1).double().add_(0.5).mul_(2.0**-52)
    from paceline.core import rng_triton

    return rng_triton.uniform(lane_constant(lane), words)


def coin(lane: Lane, key: Tensor, committed: Tensor, node: Tensor) -> Tensor:
    """Return (R,) uniforms that no other step uses: `committed` is the step's first length; node -1 is the root.

    Rules that read later coins before they reject an earlier token need this key: a key by position would bias them.
    """
    return uniform(lane, key, committed, node + 1)


def bits_of(lane: Lane, *words: int) -> int:
    """Return `bits` of one row, unsigned, in plain Python: faster than arrays for a few numbers."""
    state = words[0] * _GOLDEN + lane_constant(lane)
    for word in words[1:]:
        state = _mix(state) + word * _GOLDEN
    return _mix(state)


def coin_of(lane: Lane, key: int, committed: int, node: int) -> float:
    """Return `coin` of one row."""
    return ((bits_of(lane, key, committed, node + 1) >> 12) + 0.5) * 2.0**-52


def unit_row(key: int, tokens: np.ndarray[Any, Any]) -> Any:
    """Return (T,) float32 uniforms behind the Gumbel noise of tokens; `key` is bits(Lane.GUMBEL, seed, position).

    Noise above g needs a unit below exp(-g).
    """
    hashed = _numpy_token_bits(key % 2**64, tokens.astype(np.uint32, copy=False))
    return units_from(torch.from_numpy(hashed.view(np.int32)).to(torch.float32)).numpy()


def units_from(hashed: Tensor) -> Tensor:
    """Turn int32 bits held as float32 into uniforms, in place.

    |h + 1/4| runs over 2**32 points half a step apart, and near 0, where a token wins, float32 holds each one. The
    scale keeps the largest below 1.
    """
    return hashed.add_(0.25).abs_().mul_((2.0**-31) * (1 - 2.0**-24))


def gumbel_from(units: np.ndarray[Any, Any]) -> Any:
    """Return Gumbel noise, -log(-log(1 - unit)), by torch's logarithms: its bits are part of a seed's meaning."""
    return torch.from_numpy(units.copy()).neg_().log1p_().neg_().log_().neg_().numpy()


def _numpy_bits(lane: int, words: Sequence[np.ndarray[Any, Any]]) -> Any:
    golden = np.uint64(_GOLDEN)
    state = words[0] * golden + np.uint64(lane_constant(lane))
    for word in words[1:]:
        state = _numpy_mix(state) + word * golden
    return _numpy_mix(state)


def _numpy_mix(state: np.ndarray[Any, Any]) -> Any:
    state = (state ^ (state >> np.uint64(30))) * np.uint64(_MIX_1)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(_MIX_2)
    return state ^ (state >> np.uint64(31))


@functools.cache
def lane_constant(lane: int) -> int:
    """Return the lane's start: lanes start far apart."""
    return _mix(lane * _GOLDEN)


def _mix(state: int) -> int:
    """Mix a plain number."""
    state %= 2**64
    state = (state ^ (state >> 30)) * _MIX_1 % 2**64
    state = (state ^ (state >> 27)) * _MIX_2 % 2**64
    return state ^ (state >> 31)


def _numpy_token_bits(key: int, tokens: np.ndarray[Any, Any]) -> Any:
    """Return (T,) uint32 tokens mixed with a 64-bit key: its low half before the first round, the high half later."""
    state = tokens ^ np.uint32(key & 0xFFFFFFFF)
    scratch = np.empty_like(state)

    def xorshift(by: int) -> None:
        np.right_shift(state, np.uint32(by), out=scratch)
        np.bitwise_xor(state, scratch, out=state)

    xorshift(17)
    state *= np.uint32(_TRIPLE_1)
    xorshift(11)
    state += np.uint32(key >> 32)
    state *= np.uint32(_TRIPLE_2)
    xorshift(15)
    state *= np.uint32(_TRIPLE_3)
    xorshift(14)
    return state
