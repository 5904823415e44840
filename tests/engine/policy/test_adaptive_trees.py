"""Plans of trees, and of methods side by side."""

from __future__ import annotations

import json
import random
import statistics
from collections import Counter

import numpy as np
import pytest

from paceline.config import NONE, TRAINED_LEVEL
from paceline.engine.batch import DraftWork, StepTiming
from paceline.engine.policy.adaptive import LONG, AdaptivePolicy
from paceline.engine.policy.costs import DraftCost
from paceline.engine.policy.priors import CPU, GPU
from tests.engine.policy.simulation import (
    DEVICE,
    FLAT,
    H200_MS,
    ON_TWO_CORES,
    STEEP,
    Lookup,
    Model,
    TreeModel,
    Uneven,
    plan,
    seconds_of,
    sequence,
    step,
    tree_step,
)
from tests.helpers.results import ResultRow, result_of


@pytest.mark.parametrize(("curve", "count"), [(FLAT, 1), (ON_TWO_CORES, 1), (ON_TWO_CORES, 4), (STEEP, 1)])
def test_trees_get_the_nodes_that_pay(curve, count):
    """Against every fixed number of nodes, by what they bring on average, with the luck of several runs."""
    tokens, clock, budgets = 0, 0.0, []
    for seed in range(6):
        drafter = TreeModel(seconds=0.004, seed=seed)
        prior = GPU if curve is FLAT else CPU
        policy, sequences = AdaptivePolicy("trees", None, prior), [sequence(str(at)) for at in range(count)]
        for _ in range(150):
            tree_step(policy, drafter, sequences, curve)
        for _ in range(250):
            said, taken, nodes = tree_step(policy, drafter, sequences, curve)
            tokens, clock, budgets = tokens + said, clock + taken, budgets + nodes
    best = max(
        count * (1 + drafter.shares[:nodes].sum()) / (seconds_of(curve, count * (1 + nodes)) + 0.004 * (nodes > 0))
        for nodes in range(65)
    )
    assert tokens / clock > 0.88 * best
    if curve is FLAT:
        assert max(budgets) > 40, "a pass of many rows costs hardly more here"


def test_nodes_that_a_drafter_leaves_out_cost_nothing():
    """Where a drafter knows when it is right, many nodes are asked for and few are drafted."""
    drafter, answer, rng = TreeModel(seconds=0.004), sequence("a"), random.Random(2)
    policy, tokens, clock, asked, drafted, plain_s = AdaptivePolicy("trees", None, CPU), 0, 0.0, [], [], 0.0
    for step_number in range(500):
        (choice,) = plan(policy, [drafter], [answer])
        policy.learn()
        likely = [0.95] * 8 if rng.random() < 0.5 else [0.02] * 8
        kept = (
            max(sum(one >= policy.min_node_probability for one in likely[: choice.max_nodes]), 1)
            if choice.max_nodes
            else 0
        )
        path = [node for node in range(kept) if rng.random() < likely[node]]
        committed = [1] * (len(path) + 1)
        answer.tokens += committed
        row = ResultRow(answer, committed, False, choice.method, kept, len(path), 8)
        taken = seconds_of(STEEP, 1 + kept) + (0.004 if kept else 0.0)
        drafting = {drafter.name: DraftWork(1, 0, 0.004)} if kept else {}
        policy.observe(result_of([row], [path].__getitem__), StepTiming(1, 1 + kept, taken, drafting))
        if step_number >= 200:
            tokens, clock, plain_s = tokens + len(committed), clock + taken, seconds_of(STEEP, 1)
            asked.append(choice.max_nodes)
            drafted.append(kept)
    assert statistics.mean(asked) > 6
    assert statistics.mean(drafted) < 5.5
    every = [(1 + 0.485 * n) / (seconds_of(STEEP, 1 + n) + 0.004) for n in range(1, 9)]
    assert tokens / clock > 1.15 * max(*every, 1 / plain_s), "more than any fixed number of nodes brings"


def test_a_method_that_loses_does_not_stop_the_others():
    slow, lookup = Model("slow", 0.1, seconds=0.02), Lookup("lookup", 0.9)
    policy, answer = AdaptivePolicy("auto"), sequence("a")
    for _ in range(40):
        policy.accounts["slow", 0].add(-1.0, 0)
    choices = []
    for _ in range(20):
        choices += plan(policy, [slow, lookup], [answer])
        policy.learn()
        outputs = result_of([ResultRow(answer, [1], False)])
        policy.observe(outputs, StepTiming(1, 1, 0.02, {}))
    assert {choice.method for choice in choices} == {"lookup", NONE}


def test_a_few_unlucky_trees_do_not_end_drafting():
    """Nodes of a tree are accepted together or not at all: four trees that bring nothing are four misses, not sixty."""
    drafter, answer = TreeModel(seconds=0.0065), sequence("a")
    policy = AdaptivePolicy("trees", None, GPU)
    shares, drafter.shares = drafter.shares, np.zeros(64)
    unlucky = 0
    while unlucky < 4:
        unlucky += bool(tree_step(policy, drafter, [answer], FLAT)[2][0])
    drafter.shares = shares
    drafted = [bool(tree_step(policy, drafter, [answer], FLAT)[2][0]) for _ in range(24)]
    assert sum(drafted) > 18


def test_a_draft_that_once_took_long_is_timed_again():
    """Something else ran on the machine just then. Draft after draft is given up, so nothing but time can tell."""
    drafter, answer = TreeModel(seconds=0.0065), sequence("a")
    policy = AdaptivePolicy("trees", None, GPU)
    drafter.seconds = 0.5
    for _ in range(20):
        tree_step(policy, drafter, [answer], FLAT)
    drafter.seconds = 0.0065
    drafted = [bool(tree_step(policy, drafter, [answer], FLAT)[2][0]) for _ in range(8 * LONG)]
    assert sum(drafted[-LONG:]) > 0.9 * LONG


def test_what_is_known_of_trees_is_kept_between_runs():
    drafter = TreeModel(seconds=0.004)
    policy = AdaptivePolicy("trees")
    for _ in range(60):
        tree_step(policy, drafter, [sequence("a")], FLAT)
    again = AdaptivePolicy("trees")
    again.load(json.loads(json.dumps(policy.state())))
    survival = np.array(again.survival.estimate("trees", False, TRAINED_LEVEL, tree=True).survival)
    assert survival.shape == (64,)
    assert (np.diff(survival) <= 0).all(), "no node has more than the one before"
    assert abs(survival[:16].sum() - drafter.shares[:16].sum()) < 0.4


@pytest.mark.parametrize("slower", [0.125, 8.0])
def test_what_was_learnt_on_a_busy_machine_holds_when_it_is_quiet_and_the_other_way_round(slower):
    """Steps and drafts alike take so many times as long as in the run before, and the first steps are plain. Drafts
    pay, by a quarter."""
    answer, state, shares = sequence("a"), None, []
    for times in (slower, 1.0, slower, 1.0):
        drafter = TreeModel(seconds=0.01 * times)
        curve = {rows: times * seconds for rows, seconds in ON_TWO_CORES.items()}
        policy = AdaptivePolicy("trees")
        if state is not None:
            policy.load(json.loads(json.dumps(state)))
            for _ in range(30):
                plain = result_of([ResultRow(answer, [1], False)])
                policy.observe(plain, StepTiming(1, 1, seconds_of(curve, 1), {}))
                policy.learn()
        drafted = [bool(tree_step(policy, drafter, [answer], curve)[2][0]) for _ in range(100)]
        shares.append(sum(drafted[:30]) / 30)
        state = policy.state()
    assert min(shares[1:]) > 0.8, shares


def test_plans_of_batches_with_as_many_rows_are_told_apart_by_their_sequences():
    """Two rows that ask for a method, beside one with k fixed to 3 or beside four that ask for none: six rows."""

    def planned(policy, *batches):
        for others in batches:
            plan(policy, [drafter], [sequence("a"), sequence("b"), *others])
        return policy.expected_gain

    fixed = [sequence("c", speculation={"method": "trees", "k": 3})]
    none = [sequence(f"d{at}", speculation="none") for at in range(4)]
    drafter = TreeModel(seconds=0.004)
    learnt = AdaptivePolicy("trees")
    for _ in range(60):
        tree_step(learnt, drafter, [sequence(str(at)) for at in range(6)], FLAT)
    found = []
    for batches in ([none], [fixed, none], [none, none]):
        policy = AdaptivePolicy("trees")
        policy.load(json.loads(json.dumps(learnt.state())))
        found.append(planned(policy, *batches))
    assert found[1] == found[0] == found[2]


def test_rows_of_one_batch_may_draft_by_different_methods():
    """A lookup that is sure of half the rows, and a model for the others."""
    model = Model("model", 0.9, seconds=0.0003)
    lookup = Uneven({"0/0", "1/0"})
    policy, sequences = AdaptivePolicy("auto"), [sequence(str(at)) for at in range(4)]
    policy.draft_costs["model"] = DraftCost(0.015)  # as its bytes would say
    chosen = Counter()
    for _ in range(200):
        *_, choices = step(policy, [model, lookup], sequences, lambda n, nodes, _: seconds_of(FLAT, n + nodes))
        chosen.update((one.key, choice.method) for one, choice in zip(sequences, choices, strict=True))
    assert chosen["0/0", "uneven"] > 100
    assert chosen["3/0", "model"] > 100


@pytest.mark.parametrize(("count", "first"), [(1, 0.5), (1, 0.75), (16, 0.6)])
def test_late_nodes_of_trees_are_not_judged_one_by_one(count, first):
    """On an H200's passes many nodes pay, each accepted once in thirty drafts or less: the lowest rate of some of them
    is chance."""
    drafter = TreeModel(seconds=0.02 * 0.85, first=first, falls=1.35)
    policy, sequences = AdaptivePolicy("auto", prior=DEVICE), [sequence(f"s{i}") for i in range(count)]
    padded = {rows: H200_MS[next(size for size in H200_MS if size >= rows)] for rows in range(1, 1025)}
    steps = [tree_step(policy, drafter, sequences, padded) for _ in range(300)]
    rate = sum(tokens for tokens, *_ in steps) / sum(seconds for _, seconds, _ in steps)
    best = max(count * (1 + drafter.shares[:k].sum()) / (padded[count * (1 + k)] + 0.85) for k in range(1, 63)) / 0.02
    assert rate > 0.96 * best
