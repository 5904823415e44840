"""Seconds of steps and drafts, learnt from timings."""

from __future__ import annotations

import random

import pytest

from paceline.engine.batch import DraftWork
from paceline.engine.policy.costs import DraftCost, StepTimes
from paceline.engine.policy.priors import CPU, GRID
from tests.engine.policy.simulation import STEEP, seconds_of


def test_a_machine_steeper_than_its_prior_is_known_after_a_few_steps_of_any_size():
    times = StepTimes(CPU)
    true = {rows: 0.02 * (1 + 4 * (StepTimes(CPU).seconds(rows) - 1)) for rows in (1, 5, 9, 16)}
    for _ in range(8):
        times.observe(1, true[1], drafted=False)
        times.observe(9, true[9], drafted=True)
    assert times.seconds(1) == pytest.approx(true[1], rel=0.05)
    assert times.seconds(9, drafted=True) == pytest.approx(true[9], rel=0.05)
    assert times.seconds(5, drafted=True) == pytest.approx(true[5], rel=0.12), "not tried yet"
    assert times.seconds(16, drafted=True) == pytest.approx(true[16], rel=0.2)


def test_costs_follow_the_machine_and_keep_their_shape():
    times, noise = StepTimes(), random.Random(0)
    for _ in range(400):
        rows = noise.choice([1, 2, 5, 9, 16])
        times.observe(rows, seconds_of(STEEP, rows) * noise.uniform(0.8, 1.25), drafted=False)
    before = times.seconds(16) / times.seconds(1)
    assert before == pytest.approx(seconds_of(STEEP, 16) / seconds_of(STEEP, 1), rel=0.2)
    for _ in range(60):
        times.observe(1, 3 * seconds_of(STEEP, 1), drafted=False)  # the machine slows down while one row is seen
    assert times.seconds(1) == pytest.approx(3 * seconds_of(STEEP, 1), rel=0.1)
    assert times.seconds(16) / times.seconds(1) == pytest.approx(before, rel=0.5)
    assert times.seconds(2 * GRID[-1]) == pytest.approx(2 * times.seconds(GRID[-1]), rel=0.1)


def test_single_slow_steps_and_drafts_poison_no_cost():
    cost, times = DraftCost(0.1), StepTimes()
    for seconds in (*[0.02] * 20, 9.0, *[0.02] * 20):
        times.observe(4, seconds, drafted=False)
    assert times.seconds(4) == pytest.approx(0.02, rel=0.01)
    for seconds in (0.9, *[0.004] * 40, 0.2, *[0.004] * 10):
        cost.observe(times, 4, DraftWork(4, 0, seconds))
    assert 4 * cost.parts(times, 4, 0)[0] == pytest.approx(0.004, rel=0.2)


@pytest.mark.parametrize("off", [0.2, 1.0, 5.0])
def test_after_two_drafts_a_pass_is_known_and_after_one_prompt_so_is_reading(off):
    """Within 1.3 of the truth where the price from bytes is right within 1.5, and near it where it is far off."""
    times = StepTimes()
    times.observe(1, 0.02, drafted=False)
    true, cost = 0.1 * off, DraftCost(0.1)
    pass_s, read_s = true * times.seconds(1), true * (times.seconds(100) - times.seconds(1))
    cost.observe(times, 1, DraftWork(4, 100, 4 * pass_s + read_s))
    for _ in range(2 if off == 1.0 else 8):
        cost.observe(times, 1, DraftWork(4, 1, 4 * pass_s))
    found, found_read = cost.parts(times, 1, 100)
    assert found == pytest.approx(pass_s, rel=0.3)
    if off == 1.0:
        assert found_read == pytest.approx(read_s, rel=0.3)


def test_the_price_of_bytes_is_known_before_the_first_draft():
    times = StepTimes()
    times.observe(1, 0.02, drafted=False)
    pass_s, read_s = DraftCost(0.44).parts(times, 1, 160)
    assert pass_s == pytest.approx(0.44 * 0.02)
    assert read_s == pytest.approx(0.44 * times.seconds(160) - pass_s)
