"""Randomness without state: every number is a hash of what it is for, so nothing drawn depends on the batch.

A key is a row of 64-bit words: the request's seed (its private random key when the user gave none), where in the
sequence, which node. Each use has its own Lane, so no two uses share a number. The integers are the same bits on every
device; the logarithms of Gumbel noise may differ between devices in their last bit, never between batches.

The 64-bit mix is splitmix64's finaliser (Steele et al. 2014, Stafford's variant 13) over the words in turn. Gumbel
noise hashes the token with a 32-bit mix (Wellons' triple32) that takes in both halves of the row's 64-bit key: a token
of probability 1e-9 is drawn at the right rate within 0.3 %, and all rarer ones together are worth less than 1e-6.
torch has no unsigned arithmetic, so the mixes exist in numpy for the CPU, in Triton (rng_triton.py) for CUDA, and in
masked signed torch for the rest.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from enum import IntEnum
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.triton_support import require_triton

_GOLDEN, _MIX_1, _MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_TRIPLE_1, _TRIPLE_2, _TRIPLE_3 = 0xED5AD4BB, 0xAC4C1B51, 0x31848BAB


class Lane(IntEnum):
    """What a random number is for. Values are part of what a seed means: never renumber."""

    WALK = 1  # the coin that draws an unseeded row's token at one node
    GUMBEL = 2  # the noise a seeded request adds to log p, and its drafter to log q
    DRAFT = 3  # a drafter sampling from its own q
    ACCEPT = 4  # acceptance coins of the rules for sampled drafts
    RESIDUAL = 5  # the token drawn where such a rule stops


def bits(lane: Lane, *words: Tensor) -> Tensor:
    """(R,) int64: 64 well-mixed bits of the lane and each row's words, (R,) int64 each."""
    if words[0].is_cpu:
        return torch.from_numpy(_numpy_bits(lane, [word.numpy().view(np.uint64) for word in words]).view(np.int64))
    if (kernels := _kernels(words[0].device.type)) is not None:
        return kernels.bits(_lane_constant(lane), words)  # type: ignore[no-any-return]
    return _torch_bits(lane, words)


def uniform(lane: Lane, *words: Tensor) -> Tensor:
    """(R,) float64 strictly between 0 and 1, on a grid of 2**-52 shifted by half a step."""
    if (kernels := _kernels(words[0].device.type)) is not None:
        return kernels.uniform(_lane_constant(lane), words)  # type: ignore[no-any-return]
    return _shift(bits(lane, *words), 12).double().add_(0.5).mul_(2.0**-52)


def coin(lane: Lane, key: Tensor, committed: Tensor, node: Tensor) -> Tensor:
    """(R,) uniforms that no other step uses: `committed` is the length when the step started; node -1 is the root.

    Rules that read later coins before they reject an earlier token need this key: a key by position would bias them.
    """
    return uniform(lane, key, committed, node + 1)


def bits_of(lane: Lane, *words: int) -> int:
    """`bits` of one row, unsigned, in plain Python: for a few numbers faster than making arrays."""
    state = words[0] * _GOLDEN + _lane_constant(lane)
    for word in words[1:]:
        state = _mix(state) + word * _GOLDEN
    return _mix(state)


def coin_of(lane: Lane, key: int, committed: int, node: int) -> float:
    """`coin` of one row."""
    return ((bits_of(lane, key, committed, node + 1) >> 12) + 0.5) * 2.0**-52


def gumbel(seed: Tensor, position: Tensor, vocab_size: int) -> Tensor:
    """(R, V) float32 standard Gumbel noise of every token at each row's (seed, position)."""
    tokens = torch.arange(vocab_size, dtype=torch.int32, device=seed.device)
    return gumbel_of(seed, position, tokens.expand(seed.shape[0], vocab_size))


def gumbel_of(seed: Tensor, position: Tensor, tokens: Tensor) -> Tensor:
    """(R, T) float32: the same noise as `gumbel`, of the given tokens (R, T) only."""
    keys = bits(Lane.GUMBEL, seed, position)
    if not keys.is_cpu:
        return _gumbel_(_torch_token_bits(keys[:, None], tokens.to(torch.int32)).to(torch.float32))
    return torch.stack(
        [torch.from_numpy(gumbel_row(key, tokens[row].numpy())) for row, key in enumerate(keys.tolist())]
    )


def gumbel_row(key: int, tokens: np.ndarray[Any, Any]) -> Any:
    """(T,) float32: one row of it on the CPU, inside the cache; `key` is bits(Lane.GUMBEL, seed, position)."""
    return gumbel_from(unit_row(key, tokens))


def unit_row(key: int, tokens: np.ndarray[Any, Any]) -> Any:
    """(T,) float32: the uniforms behind the same noise. Noise above g needs a unit below exp(-g)."""
    hashed = _numpy_token_bits(key % 2**64, tokens.astype(np.uint32, copy=False))
    return _unit_(torch.from_numpy(hashed.view(np.int32)).to(torch.float32)).numpy()


def gumbel_from(units: np.ndarray[Any, Any]) -> Any:
    return _noise_(torch.from_numpy(units.copy())).numpy()


@functools.cache
def _kernels(device: str) -> ModuleType | None:
    """The same in one kernel each, where there are kernels."""
    if device != "cuda":
        return None
    try:
        require_triton()
        from paceline import rng_triton
    except ImportError:
        return None
    return rng_triton


def _gumbel_(hashed: Tensor) -> Tensor:
    """Noise in place of int32 bits held as float32."""
    return _noise_(_unit_(hashed))


def _unit_(hashed: Tensor) -> Tensor:
    """|h + 1/4| runs over 2**32 points half a step apart: near 0, where a token wins, float32 holds each one. The scale
    keeps the largest below 1."""
    return hashed.add_(0.25).abs_().mul_((2.0**-31) * (1 - 2.0**-24))


def _noise_(units: Tensor) -> Tensor:
    """-log(-log(1 - unit))"""
    return units.neg_().log1p_().neg_().log_().neg_()


def _numpy_bits(lane: int, words: Sequence[np.ndarray[Any, Any]]) -> Any:
    golden = np.uint64(_GOLDEN)
    state = words[0] * golden + np.uint64(_lane_constant(lane))
    for word in words[1:]:
        state = _numpy_mix(state) + word * golden
    return _numpy_mix(state)


def _numpy_mix(state: np.ndarray[Any, Any]) -> Any:
    state = (state ^ (state >> np.uint64(30))) * np.uint64(_MIX_1)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(_MIX_2)
    return state ^ (state >> np.uint64(31))


def _torch_bits(lane: int, words: Sequence[Tensor]) -> Tensor:
    golden = _signed(_GOLDEN, 64)
    state = words[0] * golden + _signed(_lane_constant(lane), 64)
    for word in words[1:]:
        state = _torch_mix(state) + word * golden
    return _torch_mix(state)


def _torch_mix(state: Tensor) -> Tensor:
    state = (state ^ _shift(state, 30)) * _signed(_MIX_1, 64)
    state = (state ^ _shift(state, 27)) * _signed(_MIX_2, 64)
    return state ^ _shift(state, 31)


def _shift(state: Tensor, by: int, width: int = 64) -> Tensor:
    """A logical right shift: torch's own is arithmetic."""
    return (state >> by).bitwise_and_((1 << (width - by)) - 1)


def _signed(value: int, width: int) -> int:
    return value - (1 << width) if value >> (width - 1) else value


@functools.cache
def _lane_constant(lane: int) -> int:
    """Lanes start far apart."""
    return _mix(lane * _GOLDEN)


def _mix(state: int) -> int:
    """The same mix on a plain number."""
    state %= 2**64
    state = (state ^ (state >> 30)) * _MIX_1 % 2**64
    state = (state ^ (state >> 27)) * _MIX_2 % 2**64
    return state ^ (state >> 31)


def _numpy_token_bits(key: int, tokens: np.ndarray[Any, Any]) -> Any:
    """(T,) uint32 tokens mixed with a 64-bit key: its low half before the first round, its high half in the second."""
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


def _torch_token_bits(keys: Tensor, tokens: Tensor) -> Tensor:
    """The same for (R, 1) int64 keys and (R, T) int32 tokens."""
    state = tokens ^ keys.to(torch.int32)
    state = (state ^ _shift(state, 17, 32)) * _signed(_TRIPLE_1, 32)
    state = ((state ^ _shift(state, 11, 32)) + (keys >> 32).to(torch.int32)) * _signed(_TRIPLE_2, 32)
    state = (state ^ _shift(state, 15, 32)) * _signed(_TRIPLE_3, 32)
    return state ^ _shift(state, 14, 32)
