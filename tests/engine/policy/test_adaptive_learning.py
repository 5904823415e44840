"""Records and costs of the policy: learnt while serving, and kept between runs."""

from __future__ import annotations

import json
import math

import pytest

from paceline.engine.batch import StepTiming
from paceline.engine.policy import DEEPEST, DraftPlan
from paceline.engine.policy.adaptive import MARGIN, AdaptivePolicy
from paceline.engine.policy.costs import StepTimes
from paceline.engine.policy.priors import CPU, GRID
from tests.engine.policy.simulation import (
    DEVICE,
    FLAT,
    Lookup,
    Model,
    best_fixed,
    on_a_device,
    plan,
    seconds_of,
    sequence,
    simulate,
    step,
)
from tests.helpers.results import ResultRow, result_of


def test_what_is_learnt_comes_from_the_evidence_known_when_a_draft_was_chosen():
    """The next plan may come before the lesson; and the tokens drafted are not looked at."""
    lookup, noted = Lookup("lookup", 0.9), []
    policy, one = AdaptivePolicy("lookup", 2), sequence("s")
    policy.survival.note_chain = lambda method, sampled, level, depth, accepted: noted.append((level, depth))
    for level in (4, 9):
        lookup._evidence = level
        assert plan(policy, [lookup], [one]) == [DraftPlan("lookup", 2)]
        policy.learn()
        policy.observe(result_of([ResultRow(one, [1], False, "lookup", 3, 0, 2)]), StepTiming(1, 4, 0.02, {}))
    policy.learn()
    assert noted == [(4, 2), (9, 2)]


def test_a_machine_whose_passes_are_cheaper_than_the_prior_says_is_found_out():
    drafter, many = Lookup("g", 0.95), [sequence(f"s{i}") for i in range(8)]
    policy = AdaptivePolicy("auto")
    first = simulate(policy, [drafter], FLAT, many, 20)
    simulate(policy, [drafter], FLAT, many, 600)
    assert simulate(policy, [drafter], FLAT, many, 400) > max(1.3 * first, 0.9 * best_fixed(0.95, FLAT, 8)[1])
    assert StepTimes(CPU).seconds(72) > 2 * policy.step_times[False].seconds(72, drafted=True) / 0.02


def test_the_first_pass_of_a_shape_teaches_nothing_about_costs():
    policy, one = AdaptivePolicy("auto"), sequence("s")
    output = ResultRow(one, [1], False)
    policy.observe(result_of([output]), StepTiming(1, 1, 9.0, {}, time_is_typical=False))
    policy.learn()
    assert policy.plain_seconds(1, False) is None
    policy.observe(result_of([output]), StepTiming(1, 1, 0.02, {}))
    policy.learn()
    assert policy.plain_seconds(1, False) == pytest.approx(0.02)


def test_prompts_beside_them_do_not_make_drafts_longer():
    model, sequences = Model("model", 0.8, seconds=0.0005), [sequence(f"s{i}") for i in range(8)]
    policy = AdaptivePolicy("auto", prior=DEVICE)
    on_a_device(policy, model, sequences, 60)
    plan(policy, [model], sequences)
    alone, beside = plan(policy, [model], sequences), plan(policy, [model], sequences, 900)
    assert 0 < max(choice.max_nodes for choice in beside) <= max(choice.max_nodes for choice in alone) + 1


def test_prompts_beside_them_do_not_make_drafts_cheaper():
    drafter, sequences = Lookup("g", 0.5), [sequence(f"s{i}") for i in range(16)]
    policy = AdaptivePolicy("auto")
    for _ in range(30):  # a machine whose drafted steps take a little less than they should beside its plain ones
        policy.step_times[False].observe(16, 0.1, drafted=False)
        policy.step_times[False].observe(17, 0.095, drafted=True)
    plan(policy, [drafter], sequences)
    alone = policy.expected_gain
    plan(policy, [drafter], [sequence(f"t{i}") for i in range(16)], 400)
    assert policy.expected_gain <= 1.1 * alone


def test_sequences_that_ended_are_forgotten():
    drafter = Lookup("g", 0.9)
    policy, sequences = (
        AdaptivePolicy("auto"),
        [sequence(f"s{i}", remaining=40, wait_group="j") for i in range(3)],
    )
    live = sequences
    while live:
        step(policy, [drafter], live, lambda n, nodes, _: seconds_of(FLAT, n + nodes))
        live = [one for one in live if one.remaining]
    policy.learn()
    assert not policy._pace
    assert not policy._planned


def test_what_was_learnt_survives_a_restart_and_a_broken_state_changes_nothing():
    drafter, fresh = Lookup("g", 0.9), [sequence("t")]
    policy, again = AdaptivePolicy("auto"), AdaptivePolicy("auto")
    simulate(policy, [drafter], FLAT, [sequence("s")], 500)
    state = json.loads(json.dumps(policy.state()))
    again.load(state)
    assert plan(again, [drafter], fresh) == [DraftPlan()], "the first step says how fast the machine is now"
    again.observe(result_of([ResultRow(fresh[0], [1], False)]), StepTiming(1, 1, 0.02, {}))
    assert plan(again, [drafter], fresh)[0].max_nodes >= 4, "a one-shot request does not start cold"
    assert again.state()["survival"] == state["survival"]
    (greedy, sampled), record = state["steps"], state["survival"][0]
    for broken in (
        {},
        state | {"steps": 3},
        state | {"steps": [greedy]},
        *(state | {"steps": [greedy | {"slope": slope}, sampled]} for slope in (-1e3, 1e9, math.nan)),
        state | {"steps": [greedy | {"sums": [[math.nan] * len(GRID)] * 2}, sampled]},
        state | {"steps": [greedy | {"sums": [[0.0] * 3] * 2}, sampled]},
        *(state | {"survival": [[*record[:3], [one] * DEEPEST, *record[4:]]]} for one in (math.nan, math.inf, -1.0)),
    ):
        with pytest.raises((KeyError, TypeError, ValueError)):
            again.load(broken)
    assert plan(again, [drafter], fresh)[0].max_nodes >= 4


def test_expected_gain_is_what_the_formula_promises():
    drafter, one = Lookup("g", 0.95), [sequence("s")]
    policy = AdaptivePolicy("auto")
    assert policy.expected_gain is None
    simulate(policy, [drafter], FLAT, one, 300)
    floor, best = best_fixed(0.95, FLAT, 1)
    assert 1 + MARGIN < policy.expected_gain == pytest.approx(best / floor, rel=0.3)
