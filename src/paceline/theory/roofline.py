"""The batch roofline, where checking k tokens stops being free; and the memory that a drafter takes.

A pass reads every weight once and each sequence's K/V once, and computes two operations per weight and row; it takes
the longer of the two. Left out: attention's own arithmetic, launch overheads, experts that only some rows visit. So
v(k) is a floor; where there is a measured one, prefer it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from paceline.theory import checks


@dataclass(frozen=True, kw_only=True)
class Roofline:
    """A model of `parameters` weights on a machine; bandwidth in bytes per second, flops per second."""

    bandwidth: float
    flops: float
    parameters: float
    bytes_per_parameter: float = 2.0
    kv_bytes_per_token: float = 0.0
    context: int = 0  # tokens each sequence has behind it

    def __post_init__(self) -> None:
        for field in ("bandwidth", "flops", "parameters", "bytes_per_parameter"):
            checks.positive(field, getattr(self, field))
        checks.cost("kv_bytes_per_token", self.kv_bytes_per_token)
        checks.count("context", self.context)

    @property
    def weight_bytes(self) -> float:
        return self.parameters * self.bytes_per_parameter

    @property
    def row_seconds(self) -> float:
        """Return the seconds of one row's arithmetic."""
        return 2 * self.parameters / self.flops

    def ridge(self, batch: int = 0) -> float:
        """Return the rows at which arithmetic takes as long as reading the weights and the K/V of `batch` sequences.

        For the weights alone: flops * bytes_per_parameter / (2 * bandwidth), whatever the model's size.
        """
        return self.read_seconds(batch) / self.row_seconds

    def read_seconds(self, batch: int) -> float:
        return (self.weight_bytes + batch * self.context * self.kv_bytes_per_token) / self.bandwidth

    def pass_seconds(self, batch: int, rows: int) -> float:
        """Return the seconds of a pass with `rows` tokens for each of `batch` sequences."""
        return max(self.read_seconds(batch), batch * rows * self.row_seconds)

    def verify_cost(self, batch: int) -> Callable[[int], float]:
        """Return v(k) at that batch."""
        checks.count("batch", batch, least=1)
        plain = self.pass_seconds(batch, 1)
        return lambda k: self.pass_seconds(batch, k + 1) / plain

    def stop_batch(self, tokens: float, k: int, draft_cost: float) -> int | None:
        """Return the least batch at which drafts of k tokens, giving `tokens` per pass, gain nothing; None: none.

        They gain while v(k) < tokens - k * c. Only the arithmetic of a checking pass grows with the batch, so the
        answer is where batch * (k + 1) * row_seconds = (tokens - k * c) * read_seconds(batch).
        """
        budget = tokens - checks.count("k", k, least=1) * checks.cost("draft_cost", draft_cost)
        if budget <= 1:
            return 1
        kv_seconds = self.context * self.kv_bytes_per_token / self.bandwidth
        outgrows = (k + 1) * self.row_seconds - budget * kv_seconds
        if outgrows <= 0:
            return None
        return max(1, math.ceil(budget * self.weight_bytes / self.bandwidth / outgrows))


def kv_bytes_per_token(*, layers: int, kv_heads: int, head_dim: int, bytes_per_value: float = 2.0) -> float:
    """Return bytes of keys and values of one token in all layers."""
    for field, value in (("layers", layers), ("kv_heads", kv_heads), ("head_dim", head_dim)):
        checks.count(field, value, least=1)
    return 2 * layers * kv_heads * head_dim * checks.positive("bytes_per_value", bytes_per_value)


def kv_capacity(memory: float, weight_bytes: float, kv_bytes_per_token: float) -> int:
    """Return tokens of K/V that fit beside the weights: the drafter's weights and K/V are added to the target's."""
    checks.positive("kv_bytes_per_token", kv_bytes_per_token)
    free = checks.cost("memory", memory) - checks.cost("weight_bytes", weight_bytes)
    return max(0, math.floor(free / kv_bytes_per_token))
