"""Pauses of methods that lose time."""

from __future__ import annotations

import random

from paceline.engine.policy.adaptive import WORST
from paceline.engine.policy.guard import CREDIT, LEAST_LOSS, Guard


def paused_steps(guard, num_sequences):
    """The steps of the pause under way, all of which are counted."""
    steps = 0
    while guard.is_paused(num_sequences):
        guard.tick(num_sequences)
        steps += 1
    return steps


def test_the_guard_seldom_stops_what_pays_and_soon_what_no_longer_does():
    """Steps save 0.3 plain ones on average, with the spread of drafts that are accepted or not; then they lose 0.3."""
    stopped, steps = 0, []
    for seed in range(20):
        guard, rng = Guard(), random.Random(seed)
        for _ in range(1000):
            guard.note(1, 0.3 + rng.gauss(0, 1.3))
            stopped += guard.is_paused(1)
            paused_steps(guard, 1)
        steps.append(0)
        while not guard.is_paused(1):
            guard.note(1, -0.3 + rng.gauss(0, 1.3))
            steps[-1] += 1
    assert stopped <= 20, "once in a thousand steps"  # without credit some 180
    assert sum(steps) / len(steps) < 120


def test_steps_planned_before_a_pause_do_not_make_it_longer():
    """Several steps are learnt from at once: of eight slow ones three stop a method of 16 sequences."""
    guard = Guard()
    for _ in range(8):
        guard.note(16, WORST)
    assert paused_steps(guard, 16) == 64
    for _ in range(2):
        guard.note(16, WORST)
    assert paused_steps(guard, 16) == 128


def test_the_guard_stops_what_loses_and_tries_again_after_a_doubling_pause():
    guard, pauses = Guard(), []
    for _ in range(3):
        while not guard.is_paused(64):
            guard.note(64, -0.7)
        pauses.append(paused_steps(guard, 64))
    assert pauses == [2 * 64, 4 * 64, 8 * 64], "twice its sequences at first"
    assert not guard.is_paused(1), "a batch of another size is another matter"
    guard.note(64, WORST)
    assert not guard.is_paused(64), "one step is not enough, however slow"
    for _ in range(20):
        guard.note(64, LEAST_LOSS)
    slow = 0
    while not guard.is_paused(64):
        guard.note(64, WORST)
        slow += 1
    assert slow == 1 + (1 + CREDIT) * LEAST_LOSS / -WORST, "some of what was won may be lost again, not all of it"
    assert paused_steps(guard, 64) == 2 * 64, "having won as much back, it is forgiven"
