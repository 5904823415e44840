"""What a step of the engine takes, by what is in it: a table of measurements and the lines between them. No torch.

Times are of whole steps but for drafting: pass, verification and bookkeeping. They were measured within the same
minute, so their ratios hold although the machine may be faster or slower by the time they are used.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class PassCost:
    decode: Mapping[int, Mapping[int, float]]  # sequences -> drafted tokens of all of them together -> seconds
    context: float  # tokens a row could see when those were measured
    row_context_s: float = 0.0  # for every row and every token more that it can see
    prompt: Mapping[int, float]  # tokens of a prompt computed in a step of its own -> seconds

    @property
    def plain_s(self) -> float:
        """One token of one sequence."""
        return self.decode[1][0]

    def decoding(self, sequences: int, drafted: int) -> float:
        return line({count: line(curve, drafted) for count, curve in self.decode.items()}, sequences)

    def reading(self, tokens: int) -> float:
        """What so many tokens of prompts add to a step that happens anyway."""
        return max(line({1: self.plain_s, **self.prompt}, tokens) - self.plain_s, 0.0) if tokens else 0.0

    def seconds(self, sequences: int, drafted: int, prompt_tokens: int, seen: int) -> float:
        """`seen`: positions all rows of the pass look at, together."""
        rows = sequences + drafted + prompt_tokens
        base = self.decoding(sequences, drafted) if sequences else self.plain_s
        return max(base + self.reading(prompt_tokens) + self.row_context_s * (seen - rows * self.context), base / 2)

    def verify_cost(self, sequences: int, k: int) -> float:
        """v(k): a pass that checks k tokens for each sequence, in plain passes of as many."""
        return self.decoding(sequences, sequences * k) / self.decoding(sequences, 0)


def rising(points: Mapping[int, float]) -> dict[int, float]:
    """The nearest values that never fall: more rows never take less, and where they seem to, noise is shared out."""
    pools: list[tuple[float, int]] = []  # (mean, how many points it stands for)
    for at in sorted(points):
        mean, count = points[at], 1
        while pools and pools[-1][0] > mean:
            before, number = pools.pop()
            mean, count = (mean * count + before * number) / (count + number), count + number
        pools.append((mean, count))
    values = [mean for mean, count in pools for _ in range(count)]
    return dict(zip(sorted(points), values, strict=True))


def line(points: Mapping[int, float], at: float) -> float:
    """Straight between the points; before the first as there, after the last as steep as before it."""
    known = sorted(points)
    above = bisect.bisect_left(known, at)
    if above == 0 or len(known) == 1:
        return points[known[0]]
    low, high = known[min(above, len(known) - 1) - 1], known[min(above, len(known) - 1)]
    return points[low] + (points[high] - points[low]) * (at - low) / (high - low)
