"""The speed-up and its interval, percentiles, and what counts as a loop. No torch, and no random numbers.

The speed-up is plain decoding's seconds per token over the other engine's, all pairs together, so that a long answer
weighs what it costs. A pair is one group of requests that both answered in the same minute. The 95 % interval is the
jackknife's (leave one pair out) on the logarithm of that ratio, with Student's t for the few pairs a benchmark has:
with 5 to 100 pairs of very unlike answers it covers 91 to 96 %, where a percentile bootstrap of 8 pairs covers some 80.
tests/bench/test_intervals.py checks that on a known clock.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple

from paceline.bench.results import Speedup, Spread

MIN_PAIRS = 5  # pairs; with fewer, t has 3 degrees of freedom, and an outlier cannot be seen
MIN_TOKENS = 200  # tokens; fewest of plain decoding in a figure
LOOP = 16  # tokens; a run of them that occurs twice is a loop
Z = 1.959963984540054  # 97.5 % of the normal distribution


class Pair(NamedTuple):
    """Seconds and tokens of one group of requests, answered plainly and by the engine."""

    plain_s: float
    plain_tokens: float
    own_s: float
    own_tokens: float


def paired(parts: Iterable[tuple[int, tuple[float, int], tuple[float, int]]]) -> list[Pair]:
    """Return a pair for each group that has tokens on both sides. A part is (group, plain, own), the latter two
    (seconds, tokens) of one turn."""
    sums: dict[int, Pair] = {}
    for group, plain, own in parts:
        if plain[1] and own[1]:
            before = sums.get(group, Pair(0.0, 0, 0.0, 0))
            sums[group] = Pair(*(a + b for a, b in zip(before, (*plain, *own), strict=True)))
    return list(sums.values())


def why_too_short(pairs: Sequence[Pair]) -> str | None:
    """Return the reason why the pairs are too few for a figure; None if they are enough."""
    if len(pairs) < MIN_PAIRS:
        counted = "1 pair" if len(pairs) == 1 else f"{len(pairs)} pairs"
        return f"{counted} measured, and fewer than {MIN_PAIRS} are not enough: give more prompts"
    return too_few_tokens(int(sum(pair.plain_tokens for pair in pairs)))


def too_few_tokens(tokens: int) -> str | None:
    if tokens >= MIN_TOKENS:
        return None
    return (
        f"{tokens} token{'s' * (tokens != 1)} measured, and fewer than {MIN_TOKENS} are not enough: "
        "give more prompts, or more tokens to each"
    )


def speedup(pairs: Sequence[Pair]) -> Speedup | None:
    """Return the speed-up with its interval; None if too little was measured."""
    if why_too_short(pairs) is not None:
        return None
    sums = [sum(column) for column in zip(*pairs, strict=True)]
    centre = _log_ratio(sums)
    left_out = [_log_ratio([total - part for total, part in zip(sums, pair, strict=True)]) for pair in pairs]
    count = len(pairs)
    mean = math.fsum(left_out) / count
    error = math.sqrt((count - 1) / count * math.fsum((value - mean) ** 2 for value in left_out))
    reach = student(count - 1) * error
    return Speedup(ratio=math.exp(centre), low=math.exp(centre - reach), high=math.exp(centre + reach), pairs=count)


def _log_ratio(sums: Sequence[float]) -> float:
    plain_s, plain_tokens, own_s, own_tokens = sums
    return math.log(plain_s / plain_tokens) - math.log(own_s / own_tokens)


def student(freedom: int) -> float:
    """Return 97.5 % of Student's t by its expansion about the normal: within 0.01 from 4 degrees of freedom on."""
    assert freedom >= MIN_PAIRS - 1
    z, v = Z, freedom
    return (
        z
        + (z**3 + z) / (4 * v)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * v**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * v**3)
        + (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / (92160 * v**4)
    )


def spread(seconds: Iterable[float]) -> Spread | None:
    """Return percentiles by nearest rank, so all are measured values. The p99 of fewer than 100 values is the worst."""
    ranked = sorted(seconds)
    if not ranked:
        return None
    return Spread(**{f"p{percent}": ranked[-(-percent * len(ranked) // 100) - 1] for percent in (50, 90, 95, 99)})


def loops(tokens: Sequence[Hashable]) -> bool:
    """Return whether a run of 16 tokens occurs twice. Methods that copy are fast on loops, which no user wants."""
    runs = [tuple(tokens[start : start + LOOP]) for start in range(len(tokens) - LOOP + 1)]
    return len(set(runs)) < len(runs)
