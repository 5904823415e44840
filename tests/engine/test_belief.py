"""What is believed of costs where other work slows steps down."""

import math
import random
from dataclasses import replace

import pytest

from paceline.engine.belief import Belief
from paceline.engine.cost import CostModel
from paceline.models.pass_prior import CPU

GRID = (1, 2, 4, 5, 8, 16)


def test_the_same_as_the_textbook_says_for_two_costs():
    belief, point = Belief(GRID), GRID.index(4)
    before, mean = belief._spread + 0.0, 0.2
    moved = before + 1e-4 * (belief._first - before) + 4e-4
    belief.observe(point, math.exp(mean), drafted=False)
    gain = moved[:, point] / (moved[point, point] + 0.01)
    plain, drafted = belief.factors()
    assert [math.log(one) for one in plain + drafted] == pytest.approx(list(gain * mean))
    assert belief._spread[point, point] == pytest.approx(moved[point, point] * 0.01 / (moved[point, point] + 0.01))


def test_a_measurement_says_something_about_all_and_most_about_rows_like_its_own():
    belief, at = Belief(GRID), GRID.index
    belief.observe(at(8), 1.3, drafted=True)
    plain, drafted = belief.factors()
    assert 1 < plain[0] < plain[at(4)] < plain[at(8)] < drafted[at(8)] < 1.3
    assert drafted[at(4)] < drafted[at(5)] < drafted[at(8)] < drafted[at(16)], (
        "where rows cost more, more cost more yet"
    )


def test_a_slow_spell_while_plain_steps_were_taken_does_not_make_more_rows_a_bargain_for_long():
    """Each number of rows judged for itself, plain steps looked dearer by a third after a hundred steps."""
    cost, noise = CostModel(), random.Random(2)
    for _ in range(4):
        cost.observe(4, 0.030 * noise.lognormvariate(0, 0.1))  # half as slow again as it is
    for step in range(100):
        drafted = step % 32 != 31
        cost.observe(5 + step % 4 if drafted else 4, 0.0208 * noise.lognormvariate(0, 0.1), drafted=drafted)
    with_one = cost.seconds_with_few(4, 1)[0]
    assert with_one == pytest.approx(0.0208, rel=0.08)
    assert cost.seconds(4) < 1.22 * with_one


def test_it_stays_a_belief_over_a_long_time():
    belief, noise = Belief(GRID), random.Random(1)
    for _ in range(20_000):
        belief.observe(noise.randrange(3), noise.lognormvariate(0.1, 0.3), drafted=noise.random() < 0.5)
    spread = belief._spread
    assert spread == pytest.approx(spread.T)
    assert (spread.diagonal() > 0).all()
    assert spread.diagonal().max() < 0.1 + belief._first.diagonal().max(), "what is never seen is no more unknown"
    assert all(0.5 < one < 2 for one in belief.factors()[0])


def test_what_is_remembered_counts_as_seen_and_the_machine_may_be_another():
    cost = CostModel()
    for _ in range(60):
        cost.observe(4, 0.02)
        cost.observe(8, 0.03, drafted=True)
    again = CostModel.from_dict(cost.as_dict())
    assert again.seconds_with_few(4, 4)[3] / again.seconds(4) == pytest.approx(1.5, rel=0.1)
    assert again.sure_of(8)
    for _ in range(12):
        again.observe(4, 0.04)
    assert again.seconds(4) == pytest.approx(0.04, rel=0.15)
    assert again.seconds_with_few(4, 4)[3] / again.seconds(4) == pytest.approx(1.5, rel=0.2), "its form is kept"


def test_of_two_machines_only_the_one_that_others_slow_down_has_a_belief():
    assert CostModel(CPU)._belief is not None
    assert CostModel(replace(CPU, drifts=False))._belief is None
