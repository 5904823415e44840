"""The time of a step on this machine, by its content, each drafter's time and memory, and activations. No torch.

Times of steps leave drafting out: pass, verification and bookkeeping. They were measured within the same minute, so
their ratios hold although the machine may be faster or slower by the time they are used.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping
from dataclasses import dataclass

from paceline.advisor.choice import draft_model_of
from paceline.bench.grid import Contender


@dataclass(frozen=True, kw_only=True)
class PassCost:
    decode: Mapping[int, Mapping[int, float]]  # sequences -> drafted tokens of all of them together -> seconds

    @property
    def plain_s(self) -> float:
        """One token of one sequence."""
        return self.decode[1][0]

    def decoding(self, sequences: int, drafted: int) -> float:
        return line({count: line(curve, drafted) for count, curve in self.decode.items()}, sequences)

    def verify_cost(self, sequences: int, k: int) -> float:
        """v(k): a pass that checks k tokens for each sequence, in plain passes of as many sequences."""
        return self.decoding(sequences, sequences * k) / self.decoding(sequences, 0)


@dataclass(frozen=True, kw_only=True)
class DrafterCost:
    method: str
    draft_model: str | None = None
    seconds: Mapping[int, float]  # for each token drafted ahead, by sequences that draft together
    memory_bytes: int
    kv_bytes: int = 0  # more for every token of context
    most_bytes: int = 0  # upper bound of its store of earlier answers; 0: it has none

    def serves(self, contender: Contender) -> bool:
        return (self.method, self.draft_model) == (contender.method, draft_model_of(contender))

    def at(self, sequences: int) -> float:
        """Seconds for a token drafted ahead for so many sequences together."""
        return line(self.seconds, sequences)


@dataclass(frozen=True, kw_only=True)
class ActivationsCost:
    """What int8 activations would cost and change."""

    float32_s: Mapping[int, float]  # of a pass, by its rows
    int8_s: Mapping[int, float]
    distance: Mapping[str, float]

    def share(self, rows: int) -> float:
        return self.int8_s[rows] / self.float32_s[rows]


def line(points: Mapping[int, float], at: float) -> float:
    """Straight between the points; before the first as there, after the last as steep as before it."""
    known = sorted(points)
    if len(known) == 1 or at <= known[0]:
        return points[known[0]]
    above = min(bisect.bisect_left(known, at), len(known) - 1)
    low, high = known[above - 1], known[above]
    return points[low] + (points[high] - points[low]) * (at - low) / (high - low)
