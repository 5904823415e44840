"""The policy on a simulated clock: it finds what pays, and is never slower than plain decoding for long."""

from __future__ import annotations

import pytest

from paceline.engine.policy import DEEPEST, DraftPlan
from paceline.engine.policy.adaptive import AdaptivePolicy
from paceline.engine.policy.costs import DraftCost
from tests.engine.policy.simulation import (
    DEVICE,
    FLAT,
    H200_MS,
    ON_TWO_CORES,
    STEEP,
    Lookup,
    Model,
    Uneven,
    best_fixed,
    offers_of,
    on_a_device,
    plan,
    seconds_of,
    sequence,
    simulate,
    step,
    two_plans,
)


@pytest.mark.parametrize("curve", [FLAT, STEEP], ids=["flat", "steep"])
@pytest.mark.parametrize("alpha", [0.05, 0.4, 0.8, 0.95])
@pytest.mark.parametrize("num_sequences", [1, 8])
def test_auto_is_within_five_per_cent_of_the_best_fixed_k(curve, alpha, num_sequences):
    drafter = Lookup("g", alpha)
    floor, best = best_fixed(alpha, curve, num_sequences)
    policy, sequences = AdaptivePolicy("auto"), [sequence(f"s{i}") for i in range(num_sequences)]
    assert simulate(policy, [drafter], curve, sequences, 500) > 0.94 * floor, "not even while it learns"
    rate = simulate(policy, [drafter], curve, sequences, 1500)
    assert rate > 0.97 * floor
    assert rate > 0.95 * best or best < 1.15 * floor, "less is within the margin of a lookup's first guesses"


@pytest.mark.parametrize("alpha", [0.1, 0.95])
@pytest.mark.parametrize("num_sequences", [1, 4, 16, 64, 128])
def test_on_a_device_a_cold_policy_costs_next_to_nothing_and_gets_what_the_best_fixed_k_gets(alpha, num_sequences):
    model = Model("model", alpha, seconds=0.0007 if num_sequences <= 16 else 0.001)
    policy = AdaptivePolicy("auto", prior=DEVICE)
    sequences = [sequence(f"s{i}") for i in range(num_sequences)]
    rates = []
    for k in [k for k in range(DEEPEST + 1) if num_sequences * (1 + k) <= 1024]:
        rows = min(rows for rows in H200_MS if num_sequences * (1 + k) <= rows)
        host = 0.25 + num_sequences * (0.015 + 0.005 * k) if k else 0.0
        seconds = 1e-3 * (H200_MS[rows] + host) + model.seconds * k
        rates.append(num_sequences * sum(alpha**i for i in range(k + 1)) / seconds)
    cold, _ = on_a_device(policy, model, sequences, 128)
    assert cold > (0.96 if num_sequences > 16 else 0.93) * rates[0], "not even in the first round"
    rate, _ = on_a_device(policy, model, sequences, 400)
    assert rate > 0.98 * rates[0]
    assert rate > 0.94 * max(rates)


def test_a_method_that_is_never_right_is_tried_in_few_steps():
    model = Model("model", 0.0, seconds=0.001)
    policy, sequences = AdaptivePolicy("auto", prior=DEVICE), [sequence(f"s{i}") for i in range(128)]
    _, planned = on_a_device(policy, model, sequences, 100)
    assert 0 < sum(any(choice.max_nodes for choice in choices) for choices in planned) <= 4


def test_new_sequences_among_many_do_not_end_every_pause():
    """In every third step one of 128 answers ends and another begins: a step that is planned is not launched ahead."""
    model = Model("model", 0.05, seconds=0.001)
    policy, sequences = AdaptivePolicy("auto", prior=DEVICE), [sequence(f"s{i}") for i in range(128)]
    on_a_device(policy, model, sequences, 60)
    rate, _ = on_a_device(policy, model, sequences, 300, arriving=3)
    assert rate > 0.97 * 128 / (1e-3 * H200_MS[128])


@pytest.mark.parametrize("size", [4, 16, 32])
def test_answers_that_run_ahead_do_not_delay_a_job_that_is_waited_for_as_a_whole(size):
    drafter = Uneven({f"{j}-{i}/0" for j in range(6) for i in range(0, size, 4)})
    policy, clock = AdaptivePolicy("auto"), 0.0

    def seconds(count, nodes, _):
        return seconds_of(ON_TWO_CORES, count + nodes) + (0.0004 + 0.00008 * nodes if nodes else 0.0)

    for j in range(6):
        live = [sequence(f"{j}-{i}", remaining=128, wait_group=f"{j}") for i in range(size)]
        while live:
            clock += step(policy, [drafter], live, seconds)[1]
            live = [one for one in live if one.remaining]
    assert clock < 1.02 * 6 * 128 * seconds(size, 0, False)


def test_a_plan_that_promises_more_than_it_brings_is_stopped():
    """Lookups that are right in every eighth step only, all at once: their record is better than their worth."""
    drafter = Lookup("g", 1.0, seconds=0.06)
    policy, sequences = AdaptivePolicy("auto"), [sequence(f"s{i}") for i in range(8)]
    policy.draft_costs["g"] = cost = DraftCost(1e-6)  # the cost is wrong, and stays so
    cost.observe = lambda *_: None
    drafter.accepted = lambda one, budget: budget if len(one.tokens) % 8 == 0 else 0
    floor = 8 / seconds_of(STEEP, 8)
    assert simulate(policy, [drafter], STEEP, sequences, 3000) > 0.93 * floor


def test_a_costly_model_that_guesses_badly_is_left_alone_and_a_good_one_found_again():
    dear = Model("dear", 0.2, seconds=0.01)
    policy, one = AdaptivePolicy("auto"), [sequence("s")]
    floor = 1 / seconds_of(FLAT, 1)
    simulate(policy, [dear], FLAT, one, 200)
    assert simulate(policy, [dear], FLAT, one, 1000) > 0.97 * floor
    dear.alpha = 0.95  # the workload changes
    simulate(policy, [dear], FLAT, one, 3000)
    assert simulate(policy, [dear], FLAT, one, 500) > 1.15 * floor


def test_a_method_whose_acceptance_fell_is_measured_again_and_found_again():
    changing = Model("changing", 0.9, seconds=0.001)
    policy, one = AdaptivePolicy("auto"), [sequence("s")]
    floor = 1 / seconds_of(FLAT, 1)
    good = simulate(policy, [changing], FLAT, one, 400)
    assert good > 2 * floor
    changing.alpha = 0.05
    policy.relearn("changing")
    assert policy.state()["survival"] == []
    simulate(policy, [changing], FLAT, one, 100)
    assert simulate(policy, [changing], FLAT, one, 500) > 0.97 * floor
    changing.alpha = 0.9
    policy.relearn("changing")
    assert simulate(policy, [changing], FLAT, one, 100) > 0.8 * good


def test_a_fixed_k_and_each_requests_own_wish_are_honoured_in_one_batch():
    good, bad = Lookup("good", 0.9), Lookup("bad", 0.3, level=3)
    policy = AdaptivePolicy("auto")
    mixed = [
        sequence("a"),
        sequence("b", speculation="none"),
        sequence("c", speculation={"method": "bad", "k": 3}),
        sequence("d", speculation={"k": 5}),
        sequence("e", speculation="good"),
    ]
    simulate(policy, [good, bad], FLAT, mixed, 300)
    plans = two_plans(policy, [bad, good], mixed)
    for _, off, fixed, surest, _ in plans:
        assert (off, fixed, surest) == (DraftPlan(), DraftPlan("bad", 3), DraftPlan("good", 5))
    mine, *_, named = max(plans, key=lambda choices: choices[0].max_nodes)
    assert mine.method == named.method == "good"
    assert mine.max_nodes >= 4
    assert named.max_nodes >= 4


def test_rows_that_ask_for_different_methods_draft_in_one_step():
    both = [Lookup("one", 0.9), Lookup("other", 0.9), Lookup("silent", 0.9, level=0)]
    policy = AdaptivePolicy("auto")
    mixed = [sequence(f"s{i}", speculation=wish) for i, wish in enumerate(["one", "other", "one", "other", "silent"])]
    simulate(policy, both, FLAT, mixed, 200)
    plans = two_plans(policy, both, mixed)
    choices = max(plans, key=lambda choices: choices[0].max_nodes)
    assert [choice.method for choice in choices] == ["one", "other", "one", "other", "none"]
    assert all(choice.max_nodes >= 3 for choice in choices[:4])
    for one in mixed[1:4]:
        one.params = mixed[4].params
    plans = two_plans(policy, both, mixed)
    assert max(choices[0].max_nodes for choices in plans) >= 3, "whatever the others find"


@pytest.mark.parametrize("order", [1, -1])
def test_the_better_method_drafts_whichever_is_asked_first(order):
    both = [Lookup("good", 0.95), Lookup("bad", 0.2)]
    policy, alone, one = AdaptivePolicy("auto"), AdaptivePolicy("auto"), [sequence("a")]
    for each in (policy, alone):
        simulate(each, both, FLAT, one, 300)
    assert simulate(policy, both, FLAT, one, 300) > 0.95 * simulate(alone, both, FLAT, one, 300)


def test_budgets_never_pass_what_may_be_committed():
    drafters, policy, short = [Lookup("g", 0.95)], AdaptivePolicy("g", 8), sequence("s")
    short.max_len = len(short.tokens) + 3
    assert plan(policy, drafters, [short]) == [DraftPlan("g", 2)]
    short.max_len = len(short.tokens) + 1
    assert plan(policy, drafters, [short]) == [DraftPlan()]


def test_requests_without_speculation_let_the_policy_rest():
    drafters = [Lookup("g", 0.9)]

    def rests(*sequences):
        return policy.skip_plan(sequences, offers_of(drafters, sequences))

    policy, fixed = AdaptivePolicy("auto"), sequence("k", speculation={"k": 2})
    off = [sequence("a", speculation="none"), sequence("b", speculation="none")]
    assert rests(*off)
    assert not rests(*off, sequence("c"))
    assert not rests(*off, fixed)
    drafters.clear()
    assert rests(sequence("c"))


def test_many_sequences_where_nothing_pays_are_seldom_looked_at():
    drafter = Lookup("g", 0.05, level=2)
    policy, many = AdaptivePolicy("auto"), [sequence(f"s{i}") for i in range(64)]
    simulate(policy, [drafter], STEEP, many, 200)
    drafter.asked.clear()
    simulate(policy, [drafter], STEEP, many, 256)
    assert 64 * 2 <= len(drafter.asked) <= 64 * 8, "but they are"
    two_plans(policy, [drafter], [*many, sequence("new")])
    assert "new/0" in drafter.asked, "and a new one at once"
