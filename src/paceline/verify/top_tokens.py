"""The likeliest tokens of rows of logits, with their probabilities at temperature 1 and the mass of all others.

They describe the target before any processor: no temperature, penalty, bias, ban or grammar changes them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor


class TopTokens(NamedTuple):
    """Where a row has fewer tokens of p > 0, or logits that are not finite, ids are -1 and probabilities 0 behind."""

    ids: np.ndarray[Any, np.dtype[np.int32]]  # (M, n), likeliest first
    probs: np.ndarray[Any, np.dtype[np.float32]]  # (M, n)
    rest: np.ndarray[Any, np.dtype[np.float32]]  # (M,) mass of the tokens that are not in `ids`

    @staticmethod
    def unpacked(packed: np.ndarray[Any, np.dtype[np.int32]], rows: int, n: int) -> TopTokens:
        """Return views of what `top_tokens` packed."""
        ids, probs = packed[: rows * n], packed[rows * n : 2 * rows * n].view(np.float32)
        rest = packed[2 * rows * n : (2 * n + 1) * rows].view(np.float32)
        return TopTokens(ids.reshape(rows, n), probs.reshape(rows, n), rest)


def top_tokens(logits: Tensor, n: int) -> Tensor:
    """Return the `n` likeliest tokens of each row of logits (M, V), packed: (M, n) ids, (M, n) probabilities and (M)
    rest masses, the bits of floats, one behind the other. No wait for the device."""
    size = logits.shape[1]
    values, ids = logits.float().topk(min(n, size))
    total = logits.float().logsumexp(-1, keepdim=True)
    known = total.isfinite() & values.isfinite()
    probs = torch.where(known, (values - total).exp(), 0)
    rest = torch.where(total[:, 0].isfinite(), (1 - probs.sum(-1)).clamp_min(0), 1.0)
    if size < n:
        ids, probs, known = (torch.nn.functional.pad(part, (0, n - size)) for part in (ids, probs, known))
    numbers = torch.cat((probs.flatten(), rest)).view(torch.int32)
    return torch.cat((torch.where(known, ids, -1).int().flatten(), numbers))
