"""The policy on a simulated clock: it finds what pays, and is never slower than plain decoding for long."""

from __future__ import annotations

import json
import math
import random
import statistics
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from paceline.config import NONE, TRAINED_LEVEL, SpeculationConfig
from paceline.core.sequence import Sequence
from paceline.drafters.base import HostDrafter
from paceline.drafters.speculative_config import read
from paceline.engine.batch import StepTiming
from paceline.engine.block_manager import BlockManager
from paceline.engine.drafter_set import DrafterSet
from paceline.engine.policy import DEEPEST, DraftPlan
from paceline.engine.policy.adaptive import FADE_EVERY, MARGIN, TRIAL_ROWS, WORST, AdaptivePolicy
from paceline.engine.policy.costs import GRID, DraftTimes, StepTimes
from paceline.engine.policy.guard import CREDIT, LEAST_LOSS, Guard
from paceline.engine.policy.priors import CPU, GPU
from paceline.engine.policy.survival import SurvivalTable
from paceline.errors import InvalidParameter
from paceline.sampling_params import SamplingParams
from tests.helpers.contract_toys import make_drafter, make_engine, params, plain, prompt_of
from tests.helpers.results import ResultRow, result_of, rows_of

FLAT = {1: 1.0, 64: 1.3}  # a memory-bound pass
STEEP = {1: 1.0, 64: 20.0}  # a saturated one, ten times as steep as the prior
ON_TWO_CORES = {1: 1.0, 8: 1.25, 16: 1.6, 32: 2.35, 64: 4.2, 512: 32.0}  # as measured
ROWS = (1, 8, 16, 32, 64, 128, 192, 256, 384, 512, 1024, 1536)
H200_MS = dict(zip(ROWS, (4.35, 4.4, 4.5, 4.9, 5.2, 8.0, 9.8, 11.5, 13.5, 17.5, 30.0, 58.0), strict=True))
DEVICE = replace(GPU, padded_to=tuple(H200_MS))


class Lookup(HostDrafter):
    """Right with probability `alpha` at each token; its evidence is constant."""

    def __init__(self, name, alpha, *, level=4, seconds=0.0):
        self.name, self.alpha, self._evidence, self.seconds = name, alpha, level, seconds
        self.noise, self.asked = random.Random(name), []

    def level(self, sequence):
        self.asked.append(sequence.key)
        return self._evidence

    def accepted(self, sequence, budget):
        count = 0
        while count < budget and self.noise.random() < self.alpha:
            count += 1
        return count


class Model(Lookup):
    """Each token ahead takes `seconds`."""

    def __init__(self, name, alpha, *, seconds=0.0):
        super().__init__(name, alpha, level=TRAINED_LEVEL, seconds=seconds)

    def unread_tokens(self, sequence):
        return 1


class Uneven(Lookup):
    """Right on some sequences, wrong on the others, and its evidence shows it."""

    def __init__(self, sure):
        super().__init__("uneven", 0.0)
        self._sure = sure

    def level(self, sequence):
        return 12 if sequence.key in self._sure else 2

    def accepted(self, sequence, budget):
        self.alpha = 0.95 if sequence.key in self._sure else 0.15
        return super().accepted(sequence, budget)


def sequence(name, remaining=10**6, wait_group=None, **options):
    made = Sequence(
        name,
        [5],
        SamplingParams(max_tokens=remaining, **options).resolve({}),
        max_len=remaining + 2,
        wait_group=wait_group,
    )
    made.tokens += [1, 1]
    made.num_computed = 2
    return made


def seconds_of(curve, rows):
    """Beyond the last point the curve goes on as before it."""
    at, times = list(curve), list(curve.values())
    beyond = max(rows - at[-1], 0) * (times[-1] - times[-2]) / (at[-1] - at[-2])
    return 0.02 * (float(np.interp(rows, at, times)) + beyond)


def offers_of(drafters, sequences, retired=()):
    drafter_set = DrafterSet(drafters, 100, BlockManager(1, 1))
    drafter_set.retire(retired)
    return drafter_set.offers(sequences)


def plan(policy, drafters, sequences, other_rows=0):
    return policy.plan(sequences, offers_of(drafters, sequences), other_rows, False)


def two_plans(policy, drafters, sequences):
    """One of them may be plain but for what is fixed."""
    return [plan(policy, drafters, sequences) for _ in range(2)]


def step(policy, drafters, sequences, seconds, *, resting=False, others_wait=False, retired=(), noise=None):
    """One step, by `seconds(sequences, nodes, ahead)`: (tokens committed, its time, choices)."""
    by_name = {drafter.name: drafter for drafter in drafters}
    offers = offers_of(drafters, sequences, retired)
    choices = [DraftPlan()] * len(sequences) if resting else policy.plan(sequences, offers, 0, others_wait)
    policy.learn()
    outputs, drafting = [], {}
    for one, choice in zip(sequences, choices, strict=True):
        drafter = by_name.get(choice.method)
        accepted = drafter.accepted(one, choice.max_nodes) if drafter else 0
        if drafter:
            depth = max(choice.max_nodes, drafting.get(choice.method, (0, 0.0))[0])
            drafting[choice.method] = depth, drafter.seconds * depth
        committed = [1] * min(accepted + 1, one.remaining)
        one.tokens += committed
        ended = one.remaining == 0
        outputs.append(ResultRow(one, committed, ended, choice.method, choice.max_nodes, accepted, choice.max_nodes))
    nodes = sum(choice.max_nodes for choice in choices)
    taken = seconds(len(sequences), nodes, resting) + sum(each for _, each in drafting.values())
    reported = taken * noise.uniform(0.9, 1.1) if noise else taken
    rows = len(sequences) + nodes
    policy.observe(result_of(outputs), StepTiming(len(sequences), rows, reported, drafting, ahead=resting))
    return sum(len(output.tokens) for output in outputs), taken, choices


def simulate(policy, drafters, curve, sequences, steps, **options):
    """Tokens per simulated second."""
    noise, tokens, clock = random.Random(3), 0, 0.0
    for _ in range(steps):
        said, taken, _ = step(
            policy, drafters, sequences, lambda n, nodes, _: seconds_of(curve, n + nodes), noise=noise, **options
        )
        tokens, clock = tokens + said, clock + taken
    return tokens / clock


def best_fixed(alpha, curve, num_sequences):
    """Expected tokens per second of plain decoding and of the best fixed k."""
    rates = [
        num_sequences * sum(alpha**i for i in range(k + 1)) / seconds_of(curve, num_sequences * (1 + k))
        for k in range(DEEPEST + 1)
    ]
    return rates[0], max(rates)


# -- the formula, and never slower


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
    assert rate > 0.95 * best


def on_a_device(policy, drafter, sequences, steps, arriving=None):
    """Tokens per simulated second, and the choices; steps that the policy rests in are launched ahead.

    `arriving`: in every so many steps a sequence ends and another begins.
    """

    def seconds(count, nodes, ahead):
        """Passes are padded, and the host's work hides behind one launched ahead."""
        rows = min(rows for rows in H200_MS if count + nodes <= rows)
        return 1e-3 * (H200_MS[rows] + (0.0 if ahead else 0.25 + 0.015 * count + 0.005 * nodes))

    tokens, clock, resting, planned = 0, 0.0, False, []
    for turn in range(steps):
        if arriving and turn % arriving == 0:
            policy.forget(sequences[turn % len(sequences)])
            sequences[turn % len(sequences)] = sequence(f"new{turn}")
        said, taken, choices = step(policy, [drafter], sequences, seconds, resting=resting)
        resting = policy.next_is_plain(sequences, offers_of([drafter], sequences))
        if resting:
            policy.skip_plan(sequences, offers_of([drafter], sequences))
        tokens, clock = tokens + said, clock + taken
        planned.append(choices)
    return tokens / clock, planned


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
    assert cold > (0.97 if num_sequences > 16 else 0.93) * rates[0], "not even in the first round"
    rate, _ = on_a_device(policy, model, sequences, 400)
    assert rate > 0.98 * rates[0]
    assert rate > 0.94 * max(rates)


def test_a_method_is_tried_for_a_few_of_many_sequences_and_in_few_steps():
    model = Model("model", 0.05, seconds=0.001)
    policy, sequences = AdaptivePolicy("auto", prior=DEVICE), [sequence(f"s{i}") for i in range(128)]
    _, planned = on_a_device(policy, model, sequences, 100)
    drafted = [sum(choice.max_nodes > 0 for choice in choices) for choices in planned]
    assert 0 < max(drafted) <= TRIAL_ROWS
    assert sum(drafted) <= 2 * TRIAL_ROWS


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


def test_a_plan_that_promises_more_than_it_brings_is_stopped():
    """Lookups that are right in every eighth step only, all at once: their record is better than their worth."""
    drafter = Lookup("g", 1.0, seconds=0.06)
    policy, sequences = AdaptivePolicy("auto"), [sequence(f"s{i}") for i in range(8)]
    policy.tables.draft_times.line = lambda *_: (0.0, 0.0)  # the cost table is wrong, and stays so
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
    assert policy.state()["acceptance"] == []
    simulate(policy, [changing], FLAT, one, 100)
    assert simulate(policy, [changing], FLAT, one, 500) > 0.97 * floor
    changing.alpha = 0.9
    policy.relearn("changing")
    assert simulate(policy, [changing], FLAT, one, 100) > 0.8 * good


# -- wishes


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
        return policy.next_is_plain(sequences, offers_of(drafters, sequences))

    policy, fixed = AdaptivePolicy("auto"), sequence("k", speculation={"k": 2})
    off = [sequence("a", speculation="none"), sequence("b", speculation="none")]
    assert rests(*off)
    assert not rests(*off, sequence("c"))
    assert not rests(*off, fixed)
    drafters.clear()
    assert rests(sequence("c"))


# -- methods


class Narrow(Lookup):
    only_by_name = True


@pytest.mark.parametrize("many", [2, 12])
def test_a_method_that_is_chosen_by_name_drafts_for_requests_that_name_it_alone(many):
    both = [Narrow("narrow", 0.9), Lookup("wide", 0.8)]
    policy = AdaptivePolicy("auto")
    mixed = [*(sequence(f"s{i}") for i in range(many)), sequence("n", speculation="narrow")]
    simulate(policy, both, FLAT, mixed, 100)
    methods = [choice.method for choice in max(two_plans(policy, both, mixed), key=str)]
    assert methods == ["wide"] * many + ["narrow"]


def test_ngram_takes_nothing_in_until_a_request_names_it():
    ngram, suffix = make_drafter("ngram"), make_drafter("suffix")
    engine = make_engine([ngram, suffix], policy=AdaptivePolicy("auto"))
    request = (0, "a", prompt_of(0, 9), params(max_tokens=30))
    (first,) = engine.add_request(*request[1:])
    engine.step()
    while engine.has_work:
        assert not ngram.states
        engine.step()
    assert first.output_tokens == plain([request])["a"].output_tokens
    engine.add_request("b", prompt_of(1, 9), params(max_tokens=20, speculation={"method": "ngram", "k": 4}))
    methods = set()
    while engine.has_work:
        methods |= {output.method for output in rows_of(engine.step()) if output.drafted}
    assert methods == {"ngram"}


def test_a_drafter_that_cannot_answer_warns_once_and_silences_no_other_row(caplog):
    sequences = [sequence(f"s{i}") for i in range(3)]

    class Partly(Lookup):
        def levels(self, sequences):
            return [4]  # for three

        def level(self, one):
            return 4 if one is not sequences[1] else 1 // 0

    policy, drafters = AdaptivePolicy("g", 3), DrafterSet([Partly("g", 0.9)], 100, BlockManager(1, 1))
    for _ in range(3):
        assert policy.plan(sequences, drafters.offers(sequences), 0, False) == [
            DraftPlan("g", 3),
            DraftPlan(),
            DraftPlan("g", 3),
        ]
    assert len([record for record in caplog.records if "failed to say" in record.message]) == 2, "one for each cause"


def test_the_first_tokens_of_an_answer_do_not_wait_for_a_model_that_must_read_the_prompt():
    model, new = Model("model", 0.9), sequence("s")
    model.unread_tokens = lambda sequence: 4000
    policy = AdaptivePolicy("model", 4)
    del new.tokens[2:]
    assert plan(policy, [model], [new]) == [DraftPlan()]
    new.tokens.append(1)
    assert plan(policy, [model], [new]) == [DraftPlan("model", 4)]


def test_many_sequences_where_nothing_pays_are_seldom_looked_at():
    drafter = Lookup("g", 0.05, level=2)
    policy, many = AdaptivePolicy("auto"), [sequence(f"s{i}") for i in range(64)]
    simulate(policy, [drafter], STEEP, many, 200)
    drafter.asked.clear()
    simulate(policy, [drafter], STEEP, many, 256)
    assert 64 * 2 <= len(drafter.asked) <= 64 * 8, "but they are"
    two_plans(policy, [drafter], [*many, sequence("new")])
    assert "new/0" in drafter.asked, "and a new one at once"


# -- learning


def test_acceptance_is_counted_by_depth_and_not_by_nodes():
    """A tree of 8 nodes and depth 2, wholly accepted, is no miss at depth 3."""
    acceptance = SurvivalTable()
    before = acceptance.survival("m", False, 4)
    for _ in range(60):
        acceptance.note("m", False, 4, depth=2, accepted=2)
        acceptance.end_step()
    after = acceptance.survival("m", False, 4)
    assert after[1] > 0.85
    assert after[2] / after[1] == pytest.approx(before[2] / before[1])
    for _ in range(300):
        acceptance.note("m", False, 4, depth=4, accepted=2)
        acceptance.end_step()
    assert max(acceptance.survival("m", False, 4)[2:]) < 0.1


def test_what_is_learnt_comes_from_the_evidence_known_when_a_draft_was_chosen():
    """The next plan may come before the lesson; and the tokens drafted are not looked at."""
    lookup, noted = Lookup("lookup", 0.9), []
    policy, one = AdaptivePolicy("lookup", 2), sequence("s")
    policy.tables.survival.note = lambda method, sampled, level, depth, accepted: noted.append((level, depth))
    for level in (4, 9):
        lookup._evidence = level
        assert plan(policy, [lookup], [one]) == [DraftPlan("lookup", 2)]
        policy.learn()
        policy.observe(result_of([ResultRow(one, [1], False, "lookup", 3, 0, 2)]), StepTiming(1, 4, 0.02, {}))
    policy.learn()
    assert noted == [(4, 2), (9, 2)]


def test_a_model_whose_first_drafts_held_is_trusted_further_ahead_at_once():
    acceptance = SurvivalTable()
    before = {level: acceptance.survival("m", False, level) for level in (2, TRAINED_LEVEL)}
    for level in before:
        acceptance.note("m", False, level, depth=8, accepted=8)
    acceptance.end_step()
    assert acceptance.survival("m", False, TRAINED_LEVEL)[15] > 1.3 * before[TRAINED_LEVEL][15]
    after = acceptance.survival("m", False, 2)
    assert after[15] / after[7] == pytest.approx(before[2][15] / before[2][7]), "a short match is another matter"


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


def test_a_machine_whose_passes_are_cheaper_than_the_prior_says_is_found_out():
    drafter, many = Lookup("g", 0.95), [sequence(f"s{i}") for i in range(8)]
    policy = AdaptivePolicy("auto")
    first = simulate(policy, [drafter], FLAT, many, 20)
    simulate(policy, [drafter], FLAT, many, 600)
    assert simulate(policy, [drafter], FLAT, many, 400) > max(1.3 * first, 0.9 * best_fixed(0.95, FLAT, 8)[1])
    assert StepTimes(CPU).seconds(72) > 2 * policy.tables.step_times[False].seconds_with(8, 64)[-1] / 0.02


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
        policy.tables.step_times[False].observe(16, 0.1, drafted=False)
        policy.tables.step_times[False].observe(17, 0.095, drafted=True)
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
    assert not policy.tables.pace
    assert not policy.backoff.seen


# -- between runs


def test_what_was_learnt_survives_a_restart_and_a_broken_state_changes_nothing():
    drafter, fresh = Lookup("g", 0.9), [sequence("t")]
    policy, again = AdaptivePolicy("auto"), AdaptivePolicy("auto")
    simulate(policy, [drafter], FLAT, [sequence("s")], 500)
    state = json.loads(json.dumps(policy.state()))
    again.load(state)
    assert plan(again, [drafter], fresh)[0].max_nodes >= 4, "a one-shot request does not start cold"
    assert again.state()["acceptance"] == state["acceptance"]
    (greedy, sampled), record, drafts = state["steps"], state["acceptance"][0], state["drafts"]
    for broken in (
        {},
        state | {"steps": 3},
        state | {"steps": [greedy]},
        *(state | {"steps": [greedy | {"scale": scale}, sampled]} for scale in (0, -1e-3, 1e9, math.nan)),
        state | {"steps": [greedy | {"factor": [[math.nan] * len(GRID)] * 2}, sampled]},
        state | {"steps": [greedy | {"factor": [[0.0] * 3] * 2}, sampled]},
        *(state | {"acceptance": [record | {"tried": [one] * DEEPEST}]} for one in (math.nan, math.inf, -1.0)),
        *(state | {"drafts": [[*drafts[0][:2], one, *drafts[0][3:]]]} for one in (0.0, math.nan)),
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


def test_vllms_speculative_config_is_understood_and_lossy_options_are_refused():
    base = SpeculationConfig(method="auto")
    config = read('{"method": "ngram", "num_speculative_tokens": 6, "prompt_lookup_max": 4}', base)
    assert (config.method, config.k, config.ngram_max) == ("ngram", 6, 4)
    assert read({"model": "smollm2"}, base).method == "draft-model"
    assert read({"prompt_lookup_max": 1}, base).ngram_min == 1
    for beside in (
        SpeculationConfig(drafter="a"),
        SpeculationConfig(method="auto", k=3),
        SpeculationConfig(method="suffix"),
    ):
        with pytest.raises(InvalidParameter, match="give it once"):
            read({"method": "dspark", "model": "b", "num_speculative_tokens": 4}, beside)
    for wrong, problem in (
        ({"posterior_threshold": 0.1}, "posterior_threshold would change"),
        ({"method": "mlp_speculator"}, "mlp_speculator"),
        ({"method": ["ngram"]}, "ngram"),
        ({"method": "suffix", "prompt_lookup_max": 3}, "prompt_lookup_max has no meaning"),
        ({"method": "ngram", "model": "smollm2"}, "model has no meaning"),
        ({"warp": 9}, "'warp' is not understood"),
        ({"num_speculative_tokens": 0}, "between 1 and 64"),
        ({"num_speculative_tokens": "many"}, "whole number"),
        ("{", "not JSON"),
        ("[]", "empty list"),
    ):
        with pytest.raises(InvalidParameter, match=problem):
            read(wrong, base)


# -- trees


class DraftShape(Model):
    """The n-th node is on the accepted path so often, whatever the others; all nodes take one pass."""

    trees = True

    def __init__(self, *, seconds, falls=1.3, first=0.7, seed=0):
        super().__init__("trees", 0.0, seconds=seconds)
        self.noise = random.Random(seed)
        self.shares = first * (1 + np.arange(64) / 2) ** -falls


def tree_step(policy, drafter, sequences, curve):
    """One step: (tokens it brings on average, its time, nodes by sequence)."""
    choices = plan(policy, [drafter], sequences)
    policy.learn()
    outputs, paths = [], []
    for one, choice in zip(sequences, choices, strict=True):
        path = [node for node in range(choice.max_nodes) if drafter.noise.random() < drafter.shares[node]]
        committed = [1] * (len(path) + 1)
        one.tokens += committed
        outputs.append(ResultRow(one, committed, False, choice.method, choice.max_nodes, len(path), 8))
        paths.append(path)
    nodes = sum(choice.max_nodes for choice in choices)
    drafting = {drafter.name: (1, drafter.seconds)} if nodes else {}
    taken = seconds_of(curve, len(sequences) + nodes) + (drafter.seconds if nodes else 0.0)
    made = result_of(outputs, paths.__getitem__)
    policy.observe(made, StepTiming(len(sequences), len(sequences) + nodes, taken, drafting))
    expected = sum(1 + drafter.shares[: choice.max_nodes].sum() for choice in choices)
    return expected, taken, [choice.max_nodes for choice in choices]


@pytest.mark.parametrize(("curve", "count"), [(FLAT, 1), (ON_TWO_CORES, 1), (ON_TWO_CORES, 4), (STEEP, 1)])
def test_trees_get_the_nodes_that_pay(curve, count):
    """Against every fixed number of nodes, by what they bring on average, with the luck of several runs."""
    tokens, clock, budgets = 0, 0.0, []
    for seed in range(6):
        drafter = DraftShape(seconds=0.004, seed=seed)
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
    assert tokens / clock > 0.93 * best
    if curve is FLAT:
        assert max(budgets) > 40, "a pass of many rows costs hardly more here"


def test_nodes_that_a_drafter_leaves_out_cost_nothing():
    """Where a drafter knows when it is right, many nodes are asked for and few are drafted."""
    drafter, answer, rng = DraftShape(seconds=0.004), sequence("a"), random.Random(2)
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
        drafting = {drafter.name: (1, 0.004)} if kept else {}
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
        policy.guards["slow"].note(1, -1.0)
    choices = []
    for _ in range(20):
        choices += plan(policy, [slow, lookup], [answer])
        policy.learn()
        outputs = result_of([ResultRow(answer, [1], False)])
        policy.observe(outputs, StepTiming(1, 1, 0.02, {}))
    assert {choice.method for choice in choices} == {"lookup", NONE}


def test_a_few_unlucky_trees_do_not_end_drafting():
    """Nodes of a tree are accepted together or not at all: four trees that bring nothing are four misses, not sixty."""
    drafter, answer = DraftShape(seconds=0.0065), sequence("a")
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
    drafter, answer = DraftShape(seconds=0.0065), sequence("a")
    policy = AdaptivePolicy("trees", None, GPU)
    drafter.seconds = 0.5
    while all(tree_step(policy, drafter, [answer], FLAT)[2]) or policy.num_steps < 8:
        pass
    drafter.seconds = 0.0065
    drafted = [bool(tree_step(policy, drafter, [answer], FLAT)[2][0]) for _ in range(8 * FADE_EVERY)]
    assert sum(drafted[-FADE_EVERY:]) > 0.9 * FADE_EVERY


def test_what_is_known_of_trees_is_kept_between_runs():
    drafter = DraftShape(seconds=0.004)
    policy = AdaptivePolicy("trees")
    for _ in range(60):
        tree_step(policy, drafter, [sequence("a")], FLAT)
    again = AdaptivePolicy("trees")
    again.load(json.loads(json.dumps(policy.state())))
    survival = again.tables.survival.survival("trees", False, TRAINED_LEVEL, tree=True)
    assert survival.shape == (64,)
    assert (np.diff(survival) <= 0).all(), "no node has more than the one before"
    assert abs(survival[:16].sum() - drafter.shares[:16].sum()) < 0.4


@pytest.mark.parametrize("slower", [0.125, 8.0])
def test_what_was_learnt_on_a_busy_machine_holds_when_it_is_quiet_and_the_other_way_round(slower):
    """Steps and drafts alike take so many times as long as in the run before, and the first steps are plain. Drafts
    pay, by a quarter."""
    answer, state, shares = sequence("a"), None, []
    for times in (slower, 1.0, slower, 1.0):
        drafter = DraftShape(seconds=0.01 * times)
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
    drafter = DraftShape(seconds=0.004)
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
    chosen = Counter()
    policy.tables.draft_times.observe(
        "model", 2, 4, 4 * model.seconds
    )  # else a first guess of its time stands against it
    for _ in range(200):
        *_, choices = step(policy, [model, lookup], sequences, lambda n, nodes, _: seconds_of(FLAT, n + nodes))
        chosen.update((one.key, choice.method) for one, choice in zip(sequences, choices, strict=True))
    assert chosen["0/0", "uneven"] > 100
    assert chosen["3/0", "model"] > 100


def test_a_model_is_not_left_for_a_lookup_that_is_hardly_better():
    """Coming back would cost the model's catching up."""
    used = {}
    for seconds in (0.0, 0.006):
        model = Model("model", 0.8, seconds=0.0005)
        lookup = Lookup("lookup", 0.82, level=9)
        policy = AdaptivePolicy("auto", None, DEVICE)
        policy.tables.leaving_s = lambda rows, guess, seconds=seconds: seconds
        one, chosen = [sequence("a")], Counter()
        for _ in range(300):
            *_, choices = step(policy, [model, lookup], one, lambda n, nodes, _: seconds_of(FLAT, n + nodes))
            chosen[choices[0].method] += 1
        used[seconds] = chosen["lookup"]
    assert used[0.006] < used[0.0]


@pytest.mark.parametrize(("count", "first"), [(1, 0.5), (1, 0.75), (16, 0.6)])
def test_late_nodes_of_trees_are_not_judged_one_by_one(count, first):
    """On an H200's passes many nodes pay, each accepted once in thirty drafts or less: the lowest rate of some of them
    is chance."""
    drafter = DraftShape(seconds=0.02 * 0.85, first=first, falls=1.35)
    policy, sequences = AdaptivePolicy("auto", prior=DEVICE), [sequence(f"s{i}") for i in range(count)]
    padded = {rows: H200_MS[next(size for size in H200_MS if size >= rows)] for rows in range(1, 1025)}
    steps = [tree_step(policy, drafter, sequences, padded) for _ in range(300)]
    rate = sum(tokens for tokens, *_ in steps) / sum(seconds for _, seconds, _ in steps)
    best = max(count * (1 + drafter.shares[:k].sum()) / (padded[count * (1 + k)] + 0.85) for k in range(1, 63)) / 0.02
    assert rate > 0.96 * best
