"""The hashes of rng.py in Triton: the same integers in one kernel, and noise computed inside kernels that draw.

The integers are rng's bit for bit. The two logarithms of Gumbel noise are within 4 units in the last place of the
CPU's: one token in about a million draws may differ between devices, never between batches.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
_MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9)
_MIX_2 = tl.constexpr(0x94D049BB133111EB)
_TRIPLE_1, _TRIPLE_2, _TRIPLE_3 = tl.constexpr(0xED5AD4BB), tl.constexpr(0xAC4C1B51), tl.constexpr(0x31848BAB)
_GRID = tl.constexpr(2.0**-52)
_SCALE = tl.constexpr(2.0**-31 * (1 - 2.0**-24))
BLOCK = 128


def bits(lane_constant: int, words: tuple[Tensor, ...]) -> Tensor:
    """Return rng.bits of one to three words (R,) int64."""
    return _launch(torch.empty_like(words[0]), lane_constant, words, False)


def uniform(lane_constant: int, words: tuple[Tensor, ...]) -> Tensor:
    """Return rng.uniform of one to three words (R,) int64."""
    return _launch(torch.empty_like(words[0], dtype=torch.float64), lane_constant, words, True)


def _launch(out: Tensor, lane_constant: int, words: tuple[Tensor, ...], unit: bool) -> Tensor:
    first, second, third = (*(word.contiguous() for word in words), None, None)[:3]
    count = out.shape[0]
    _hash[(triton.cdiv(count, BLOCK),)](out, first, second, third, count, lane_constant, unit, BLOCK)
    return out


@triton.jit(do_not_specialize=["count"])  # else it is compiled separately for 1, multiples of 16 and others
def _hash(out, first, second, third, count, START: tl.constexpr, UNIT: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    state = tl.load(first + at, inside, 0).to(tl.uint64) * _GOLDEN + START
    if second is not None:
        state = mix(state) + tl.load(second + at, inside, 0).to(tl.uint64) * _GOLDEN
    if third is not None:
        state = mix(state) + tl.load(third + at, inside, 0).to(tl.uint64) * _GOLDEN
    state = mix(state)
    if UNIT:
        tl.store(out + at, ((state >> 12).to(tl.float64) + 0.5) * _GRID, inside)
    else:
        tl.store(out + at, state.to(tl.int64), inside)


@triton.jit
def mix(state):
    state = (state ^ (state >> 30)) * _MIX_1
    state = (state ^ (state >> 27)) * _MIX_2
    return state ^ (state >> 31)


@triton.jit
def token_bits(key, token):
    """uint32 of int64 keys and tokens, broadcast."""
    state = token.to(tl.uint32) ^ key.to(tl.uint32)
    state = (state ^ (state >> 17)) * _TRIPLE_1
    state = ((state ^ (state >> 11)) + (key.to(tl.uint64) >> 32).to(tl.uint32)) * _TRIPLE_2
    state = (state ^ (state >> 15)) * _TRIPLE_3
    return state ^ (state >> 14)


@triton.jit
def gumbel(key, token):
    """float32, as rng.gumbel_from; `key` is bits(Lane.GUMBEL, seed, position)."""
    hashed = token_bits(key, token).to(tl.int32, bitcast=True).to(tl.float32)
    unit = tl.abs(hashed + 0.25) * _SCALE
    rest = 1.0 - unit
    # log1p: the rounding error of 1 - unit is corrected by a factor (Kahan).
    lost = tl.where(rest == 1.0, 1.0, 1.0 - rest)
    waited = tl.where(rest == 1.0, unit, -tl.log(rest) * tl.div_rn(unit, lost))
    return -tl.log(waited)
