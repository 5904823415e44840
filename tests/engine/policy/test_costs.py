"""Seconds of steps and drafts, learnt from timings."""

from __future__ import annotations

import random

import pytest

from paceline.engine.policy.costs import GRID, DraftTimes, StepTimes
from paceline.engine.policy.priors import CPU
from tests.engine.policy.simulation import STEEP, seconds_of


def test_a_machine_steeper_than_its_prior_is_known_after_a_few_steps_of_any_size():
    times = StepTimes(CPU)
    true = {rows: 0.02 * (1 + 4 * (StepTimes(CPU).seconds(rows) - 1)) for rows in (1, 5, 9, 16)}
    for _ in range(8):
        times.observe(1, true[1], drafted=False)
        times.observe(9, true[9], drafted=True)
    assert times.seconds(1) == pytest.approx(true[1], rel=0.05)
    assert times.seconds_with(1, 8)[7] == pytest.approx(true[9], rel=0.05)
    assert times.seconds_with(1, 4)[3] == pytest.approx(true[5], rel=0.12), "not tried yet"
    assert times.seconds_with(1, 15)[14] == pytest.approx(true[16], rel=0.2)


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


def test_slow_first_drafts_and_single_slow_steps_poison_no_cost():
    drafts, times = DraftTimes(), StepTimes()
    for depth, seconds in ((4, 0.9), (4, 0.5), (4, 0.004), (8, 0.006), (4, 0.2), *[(4, 0.004), (8, 0.006)] * 20):
        drafts.observe("m", 16, depth, seconds, skip=2)
    a, b = drafts.line("m", 16, 1.0)
    assert a + 4 * b == pytest.approx(0.004, rel=0.2)
    assert a + 8 * b == pytest.approx(0.006, rel=0.2)
    assert drafts.line("m", 2, 1.0)[1] < b, "a draft for fewer takes less"
    assert drafts.line("other", 2, 0.5) == (0.0, 0.5)
    for seconds in (*[0.02] * 20, 9.0, *[0.02] * 20):
        times.observe(4, seconds, drafted=False)
    assert times.seconds(4) == pytest.approx(0.02, rel=0.01)
