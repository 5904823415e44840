"""The tests' own arithmetic, against tabulated values and simulations."""

from __future__ import annotations

import math
import random

import pytest

from paceline.prove.g_test import POWER, GTest, chi_square_survival, g_test, noncentral_survival, tail


@pytest.mark.parametrize(
    ("x", "df", "expected"),
    [
        (3.841458820694124, 1, 0.05),
        (6.634896601021213, 1, 0.01),
        (5.991464547107979, 2, 0.05),
        (18.307038053275146, 10, 0.05),
        (23.209251158954356, 10, 0.01),
        (124.34211340400407, 100, 0.05),
    ],
)
def test_chi_square_survival_agrees_with_the_tables(x: float, df: int, expected: float) -> None:
    assert chi_square_survival(x, df) == pytest.approx(expected, rel=1e-8)


def test_the_far_tail_is_exact_where_it_has_a_closed_form() -> None:
    for x in (0.1, 3.0, 40.0, 200.0):
        assert chi_square_survival(x, 2) == pytest.approx(math.exp(-x / 2), rel=1e-12)
        assert chi_square_survival(x, 1) == pytest.approx(math.erfc(math.sqrt(x / 2)), rel=1e-11)
        assert chi_square_survival(x, 4) == pytest.approx(math.exp(-x / 2) * (1 + x / 2), rel=1e-12)
    assert chi_square_survival(0.0, 6) == 1.0


def test_noncentral_survival_is_the_normal_one_for_one_degree_of_freedom() -> None:
    def normal_tail(z: float) -> float:
        return math.erfc(z / math.sqrt(2)) / 2

    for x, shift in ((4.0, 9.0), (30.0, 60.0), (1.0, 0.25)):
        exact = normal_tail(math.sqrt(x) - math.sqrt(shift)) + normal_tail(math.sqrt(x) + math.sqrt(shift))
        assert noncentral_survival(x, 1, shift) == pytest.approx(exact, rel=1e-9)
    assert noncentral_survival(7.0, 3, 0.0) == pytest.approx(chi_square_survival(7.0, 3))


def test_rare_cells_are_pooled_and_nothing_is_lost() -> None:
    test = g_test([60, 36, 2, 1, 1], [0.6, 0.36, 0.02, 0.01, 0.01])
    assert (test.cells, test.samples, test.impossible) == (2, 100, 0)
    assert test.g == pytest.approx(0.0, abs=1e-12)


def test_what_cannot_happen_fails_at_once() -> None:
    test = g_test([50, 49, 1], [0.5, 0.5, 0.0])
    assert test.impossible == 1
    assert test.p_value == 0.0


def test_the_bound_for_small_samples_is_never_below_the_simulated_tail() -> None:
    """40,000 multinomials of 12 draws over 4 cells: the bound holds at every level the simulation can see."""
    draws = random.Random(0)
    weights = [0.5, 0.25, 0.15, 0.1]
    values = []
    for _ in range(40_000):
        chosen = draws.choices(range(4), weights, k=12)
        counts = [chosen.count(cell) for cell in range(4)]
        values.append(2 * sum(n * math.log(n / (12 * w)) for n, w in zip(counts, weights, strict=True) if n))
    for g in (8.0, 12.0, 16.0, 20.0):
        simulated = sum(value >= g for value in values) / len(values)
        assert simulated <= tail(g, 3, smallest=1.0)


def test_a_bias_of_the_detectable_size_is_detected_as_often_as_promised() -> None:
    """The worst case, half the mass raised and half lowered, at 400 repetitions: fewer than 97.5 % has chance 2e-3."""
    cells, samples, alpha = 4, 20_000, 1e-4
    detectable = GTest(0.0, cells, samples, samples / cells).detectable(alpha)
    assert detectable is not None
    biased = [0.25 + detectable / 2, 0.25 + detectable / 2, 0.25 - detectable / 2, 0.25 - detectable / 2]
    draws, found = random.Random(1), 0
    for _ in range(400):
        left, counts, rest = samples, [], 1.0
        for p in biased[:-1]:  # a normal stands in for each binomial
            share = p / rest
            count = round(draws.gauss(left * share, math.sqrt(left * share * (1 - share))))
            counts.append(count)
            left, rest = left - count, rest - p
        found += g_test([*counts, left], [0.25] * 4).p_value <= alpha
    assert found / 400 >= POWER - 0.015


def test_more_samples_detect_less() -> None:
    few, many = (GTest(0.0, 8, samples, samples / 20).detectable(1e-8) for samples in (10_000, 100_000))
    assert few is not None
    assert many is not None
    assert many < few / 3 < 0.03
