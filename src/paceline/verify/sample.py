"""From logits or weights to one token a row: by a coin against cumulative weights, or by a seed's Gumbel noise.

Rows of more than `BLOCK` tokens are processed one by one in numpy, reading only tokens of p > 0; smaller ones all at
once. Both return the token whose interval of the cumulative sum contains the coin, and never one of weight 0; INVALID
where the values are not numbers.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.core.rng import Lane, bits, gumbel_from, unit_row
from paceline.core.verdict import INVALID
from paceline.verify.distribution import probabilities

BLOCK = 256
SLACK = np.float32(1.001)  # against rounding: keeping too many candidates does no harm


def sample(logits: Tensor, coins: Tensor) -> Tensor:
    """Return (R,) the token whose interval of cumulative p = softmax(logits) contains the coin."""
    if logits.shape[1] <= BLOCK:
        return _sample_batch(probabilities(logits), coins)
    return torch.tensor([_sample_row(*row) for row in zip(logits.numpy(), coins.tolist(), strict=True)])


def sample_weighted(weights: Tensor, coins: Tensor) -> Tensor:
    """Return (R,) tokens by weights (R, V) that need not sum to 1, but to more than 0."""
    if weights.shape[1] <= BLOCK:
        return _sample_batch(weights, coins)
    return torch.tensor([_sample_weighted_row(*row) for row in zip(weights.numpy(), coins.tolist(), strict=True)])


def sample_seeded(logits: Tensor, seed: Tensor, position: Tensor) -> Tensor:
    """Return (R,) argmax(log p + Gumbel(seed, position, token)); log p up to a constant is the processed logit."""
    keys = bits(Lane.GUMBEL, seed, position).tolist()
    return torch.tensor([sample_seeded_row(*row) for row in zip(logits.numpy(), keys, strict=True)])


def _sample_batch(weights: Tensor, coins: Tensor) -> Tensor:
    cumulative = weights.cumsum(-1, dtype=torch.float64)
    total = cumulative[:, -1]
    # The coin is scaled to the sum, and kept under it.
    point = torch.minimum(coins * total, torch.nextafter(total, torch.zeros_like(total)))
    token = torch.searchsorted(cumulative, point[:, None], right=True)[:, 0]
    return torch.where((total > 0) & (total < math.inf), token, INVALID)


def _sample_row(logits: np.ndarray[Any, Any], coin: float) -> int:
    """Return the token of one row (V,), among those of positive probability."""
    highest = logits.max()
    if not -math.inf < highest < math.inf:
        return INVALID
    possible = _possible(logits)
    weights = logits - highest if possible is None else logits[possible] - highest
    index = _sample_weighted_row(np.exp(weights, out=weights), coin)
    return index if possible is None else int(possible[index])


def _sample_weighted_row(weights: np.ndarray[Any, Any], coin: float) -> int:
    """Return the token of one row (V,): first the block of tokens that contains the coin, then the token."""
    ends = np.add.reduceat(weights, np.arange(0, weights.shape[0], BLOCK), dtype=np.float64).cumsum()
    if not 0 < ends[-1] < math.inf:
        return INVALID
    point = min(coin * ends[-1], math.nextafter(ends[-1], 0))
    block = int(ends.searchsorted(point, "right"))
    inside = weights[block * BLOCK : (block + 1) * BLOCK]
    rest = point - (ends[block - 1] if block else 0.0)
    offset = int(inside.cumsum(dtype=np.float64).searchsorted(rest, "right"))
    # A block's total may round above its tokens' running sum: then the last token of weight > 0 is taken.
    return block * BLOCK + min(offset, int(np.flatnonzero(inside)[-1]))


def sample_seeded_row(logits: np.ndarray[Any, Any], key: int) -> int:
    """Return `sample_seeded` of one row (V,). Logarithms are costly: they are computed only for tokens that can beat
    the likeliest token's sum."""
    best = int(logits.argmax())
    if not -math.inf < logits[best] < math.inf:
        return INVALID
    units = unit_row(key, _tokens(logits.shape[0]))
    reached = logits[best] + gumbel_from(units[best : best + 1])[0]
    possible = np.flatnonzero(units <= SLACK * np.exp(logits - reached))
    return int(possible[np.argmax(gumbel_from(units[possible]) + logits[possible])])


@functools.lru_cache(4)
def _tokens(vocab_size: int) -> np.ndarray[Any, Any]:
    return np.arange(vocab_size, dtype=np.uint32)


def _possible(logits: np.ndarray[Any, Any]) -> Any:
    """Return the tokens of a row (V,) of positive probability; None: all of them."""
    return np.flatnonzero(logits > -np.inf) if logits.min() == -np.inf else None
