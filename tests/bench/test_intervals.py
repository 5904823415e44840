"""The interval covers what it says, on pairs whose true ratio is known; and silence where there is too little."""

from __future__ import annotations

import math
import random

import pytest

from paceline.bench.intervals import MIN_PAIRS, Pair, loops, speedup, spread, student, why_too_short


@pytest.mark.parametrize(
    ("freedom", "known"), [(4, 2.7764), (5, 2.5706), (7, 2.3646), (9, 2.2622), (19, 2.0930), (99, 1.9842)]
)
def test_students_t_is_the_one_in_the_tables(freedom: int, known: float) -> None:
    assert student(freedom) == pytest.approx(known, abs=0.01)


def test_the_speedup_is_the_ratio_of_summed_times() -> None:
    pairs = [Pair(3.0, 100, 2.0, 100), Pair(9.0, 300, 3.0, 300)] * 3
    found = speedup(pairs)
    assert found.ratio == pytest.approx(36 / 15)
    assert found.low < found.ratio < found.high
    assert found.pairs == 6


def test_answers_of_different_length_are_compared_per_token() -> None:
    found = speedup([Pair(3.0, 100, 3.0, 200)] * 5)
    assert found.ratio == pytest.approx(2.0)
    assert found.low == pytest.approx(2.0)
    assert found.high == pytest.approx(2.0)


def draw(noise: random.Random, count: int, luck: float, truth: float) -> list[Pair]:
    """Answers of very unlike length; each is `truth` times faster on average, give or take `luck`."""
    pairs = []
    for _ in range(count):
        tokens = max(45, int(noise.lognormvariate(math.log(80), 0.6)))
        plain = 0.03 * tokens * noise.lognormvariate(0, 0.05)
        own = 0.03 * tokens / truth * noise.lognormvariate(-(luck**2) / 2, luck) * noise.lognormvariate(0, 0.05)
        pairs.append(Pair(plain, tokens, own, tokens))
    return pairs


@pytest.mark.parametrize("count", [5, 8, 12, 40])
@pytest.mark.parametrize("luck", [0.05, 0.3])
def test_the_interval_covers_the_truth_about_95_times_in_100(count: int, luck: float) -> None:
    """Covering 92 % or more: 800 draws then fall below 715 with probability below 0.003 in each of the eight cases.

    An interval that covers 86 %, as a bootstrap of few pairs does at best, passes with probability below 0.004.
    """
    noise = random.Random(f"{count} {luck}")
    covered = 0
    for _ in range(800):
        found = speedup(draw(noise, count, luck, truth=1.3))
        covered += found.low <= 1.3 <= found.high
    assert 715 <= covered <= 790


def test_no_gain_is_seldom_called_one() -> None:
    """At a true ratio of 1 the interval lies above it about 2.5 times in 100; at 4 % or less, 800 draws give more than
    54 with probability below 0.0001."""
    noise = random.Random(5)
    claims = 0
    for _ in range(800):
        found = speedup(draw(noise, 8, 0.1, truth=1.0))
        claims += found.low > 1
    assert claims <= 54


def test_few_pairs_or_few_tokens_give_a_sentence_and_no_figure() -> None:
    few = [Pair(1.0, 100, 1.0, 100)] * (MIN_PAIRS - 1)
    assert speedup(few) is None
    assert "4 pairs measured" in str(why_too_short(few))
    short = [Pair(0.1, 3, 0.1, 3)] * 10
    assert speedup(short) is None
    assert "30 tokens measured" in str(why_too_short(short))
    assert why_too_short([Pair(1.0, 100, 1.0, 100)] * MIN_PAIRS) is None
    assert speedup([]) is None


def test_percentiles_are_values_that_happened() -> None:
    found = spread(n / 100 for n in range(1, 201))
    assert (found.p50, found.p99) == (1.0, 1.98)
    lone = spread([0.5])
    assert (lone.p50, lone.p99) == (0.5, 0.5)
    assert spread([]) is None


def test_a_loop_is_16_tokens_that_come_twice() -> None:
    assert loops([*range(16), *range(16)])
    assert not loops([*range(15), 99, *range(15)])
    assert loops([1] * 17)
    assert not loops([1] * 16)
    assert not loops([])
