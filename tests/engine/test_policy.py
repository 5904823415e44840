"""The policy on a simulated clock: it must find the best k and stay off where drafting loses."""

from __future__ import annotations

import itertools
import json
import math
import random
from dataclasses import replace

import numpy as np
import pytest

from paceline.config import SpeculationConfig
from paceline.drafters.base import HostDrafter
from paceline.engine.acceptance import Acceptance
from paceline.engine.adaptive import PLAIN_EVERY, AdaptivePolicy
from paceline.engine.batch import StepOutput
from paceline.engine.budget import DEEPEST, Budget, Offer, Terms, prospect_of
from paceline.engine.cost import FINE, CostModel, DraftTimes, Lines
from paceline.engine.plans import Plan, Standing
from paceline.engine.policy import Choice, StepReport
from paceline.engine.value import token_values, values_of_few
from paceline.errors import InvalidParameter
from paceline.models.pass_prior import CPU as CPU_PRIOR
from paceline.models.pass_prior import GPU
from paceline.sampling_params import SamplingParams
from paceline.sequence import Sequence, Status
from paceline.speculative_config import read

FLAT = {1: 1.0, 64: 1.3}  # a memory-bound pass
STEEP = {1: 1.0, 64: 50.0}  # a saturated one


def seconds_of(curve, rows):
    (a, x), (b, y) = sorted(curve.items())
    return 0.02 * (x + (y - x) * (rows - a) / (b - a))


class Guesser(HostDrafter):
    """Right with probability `alpha` at each token; its evidence is constant."""

    def __init__(self, name, alpha, *, evidence=4, seconds=0.0, shadow=True):
        self.name, self.alpha, self._evidence, self.seconds, self.shadow = name, alpha, evidence, seconds, shadow
        self.noise = random.Random(name)

    def evidence(self, sequence):
        return self._evidence

    def guess(self, sequence, count):
        """Token 1 is what is always committed in the simulation; anything else is wrong."""
        return [1 if self.noise.random() < self.alpha else 0 for _ in range(count)] if self.shadow else []

    def accepted(self, budget):
        count = 0
        while count < budget and self.noise.random() < self.alpha:
            count += 1
        return count


def timeless(guessers, *args):
    """A policy that takes no time itself, so that what it does is the same in every run."""
    return AdaptivePolicy(guessers, *args, clock=lambda: 0.0)


def sequence(name, **params):
    made = Sequence(name, [5], SamplingParams(max_tokens=10**6, **params).resolve({}), max_len=10**6)
    made.tokens.append(1)
    made.num_computed = 1
    return made


def simulate(policy, guessers, curve, sequences, steps):
    """Tokens per simulated second, after the policy has planned and learnt every step."""
    by_name = {guesser.name: guesser for guesser in guessers}
    noise, tokens, clock = random.Random(3), 0, 0.0
    for _ in range(steps):
        choices = policy.plan(sequences, 0, False)
        policy.meanwhile()
        outputs, rows, drafting = [], 0, {}
        for one, choice in zip(sequences, choices, strict=True):
            rows += 1 + choice.budget
            accepted = by_name[choice.method].accepted(choice.budget) if choice.budget else 0
            if choice.budget:
                depth, _ = drafting.get(choice.method, (0, 0.0))
                depth = max(depth, choice.budget)
                drafting[choice.method] = depth, by_name[choice.method].seconds * depth
            committed = [1] * (accepted + 1)
            one.tokens += committed
            outputs.append(StepOutput(one, committed, "", [], False, choice.method, choice.budget, accepted))
            tokens += len(committed)
        taken = seconds_of(curve, rows) * noise.uniform(0.9, 1.1) + sum(s for _, s in drafting.values())
        clock += taken
        policy.observe(StepReport(len(sequences), rows, taken, drafting, outputs))
    return tokens / clock


CPU = {1: 1.0, 8: 1.25, 16: 1.6, 32: 2.35, 64: 4.2, 512: 32.0}  # two cores, as measured


class Uneven(Guesser):
    """Sure of some sequences (those that loop, say), lost in the others, and it knows."""

    def __init__(self, sure):
        super().__init__("uneven", 0.0)
        self._sure = sure

    def evidence(self, sequence):
        return 12 if sequence.key in self._sure else 2

    def guess(self, sequence, count):
        self.alpha = 0.95 if sequence.key in self._sure else 0.15
        return super().guess(sequence, count)


def cpu_seconds(rows, nodes):
    """A pass, and what drafting costs on the host: something for any draft, and something for each node."""
    at = sorted(CPU)
    low = max(point for point in at if point <= rows)
    high = min((point for point in at if point > low), default=low)
    share = (rows - low) / (high - low) if high > low else 0.0
    return 0.025 * (CPU[low] * (1 - share) + CPU[high] * share) + (0.0004 + 0.00008 * nodes if nodes else 0.0)


def run_job(policy, guesser, sequences, *, others_wait):
    """Seconds until every sequence has used up its room."""
    noise, clock, live = random.Random(4), 0.0, list(sequences)
    while live:
        choices = policy.plan(live, 0, others_wait)
        policy.meanwhile()
        outputs = []
        for one, choice in zip(live, choices, strict=True):
            guess = guesser.guess(one, choice.budget)
            accepted = guess.index(0) if 0 in guess else len(guess)
            committed = [1] * min(accepted + 1, one.room)
            one.tokens += committed
            outputs.append(StepOutput(one, committed, "", [], one.room == 0, choice.method, choice.budget, accepted))
        nodes = sum(choice.budget for choice in choices)
        taken = cpu_seconds(len(live) + nodes, nodes) * noise.uniform(0.95, 1.05)
        clock += taken
        policy.observe(StepReport(len(live), len(live) + nodes, taken, {}, outputs))
        live = [one for one in live if one.room]
    return clock


def job_of(size, name, room=128):
    made = [sequence(f"{name}-{i}") for i in range(size)]
    for one in made:
        one.job, one.max_len = name, len(one.tokens) + room
    return made


@pytest.mark.parametrize("size", [4, 16, 32])
def test_answers_that_run_ahead_do_not_delay_a_job_that_is_waited_for_as_a_whole(size):
    guesser = Uneven({f"job{j}-{i}/0" for j in range(6) for i in range(0, size, 4)})
    policy = timeless([guesser], "auto")
    greedy = timeless([guesser], "auto")
    jobs = [job_of(size, f"job{j}") for j in range(6)]
    taken = sum(run_job(policy, guesser, job, others_wait=False) for job in jobs)
    plain = 6 * 128 * cpu_seconds(size, 0)
    assert taken < 1.02 * plain
    hasty = sum(run_job(greedy, guesser, job_of(size, f"job{j}"), others_wait=True) for j in range(6))
    assert size == 32 or taken < hasty, "counting every token alike is what made batches slower"


@pytest.mark.parametrize("size", [4, 16])
def test_a_job_whose_answers_all_draft_well_ends_sooner(size):
    guesser = Uneven({f"job{j}-{i}/0" for j in range(6) for i in range(size)})
    policy = timeless([guesser], "auto")
    taken = sum(run_job(policy, guesser, job_of(size, f"job{j}"), others_wait=False) for j in range(6))
    assert taken < 0.85 * 6 * 128 * cpu_seconds(size, 0)


def test_the_value_of_a_token_is_what_it_takes_off_the_time_until_all_have_ended():
    """Against simulation: answers end at random; 400,000 draws, 4 standard errors (false alarm below 1e-4)."""
    paces, rooms, pass_s, row_s = [1.0, 1.0, 2.0, 4.0], [100.0, 50.0, 100.0, 100.0], 0.025, 0.0012
    noise = np.random.default_rng(5)
    ends = noise.exponential(1.0, (400_000, 4)) * np.array(rooms) / np.array(paces)
    values = token_values(paces, rooms, pass_s=pass_s, row_s=row_s)
    for index, value in enumerate(values):
        others = np.delete(ends, index, axis=1).max(axis=1)
        # Without it: the pass of the steps in which it is the last, and its row in all its steps.
        saved = pass_s * np.maximum(ends[:, index] - others, 0.0) + row_s * ends[:, index]
        expected = saved.mean() / rooms[index] * 4 / (pass_s + 4 * row_s)
        error = saved.std() / 400_000**0.5 / rooms[index] * 4 / (pass_s + 4 * row_s)
        assert abs(value - expected) < 4 * error + 0.01 * expected
    assert token_values([1.0] * 16, [99.0] * 16, pass_s=1.0, row_s=0.1) == pytest.approx([1.0] * 16, rel=1e-4)


def test_a_few_sequences_are_asked_more_often():
    earned = {}
    for size in (4, 16):
        policy, several = timeless([Guesser("a", 0.5)], "auto"), [sequence(f"s{i}") for i in range(size)]
        policy._asking.purse.empty()
        outputs = [StepOutput(one, [1], "", [], False, "none", 0, 0) for one in several]
        policy.observe(StepReport(size, size, 0.03, {}, outputs))
        policy.meanwhile()
        earned[size] = policy._asking.purse.seconds
    assert earned[4] == pytest.approx(0.01 * 0.03)
    assert earned[16] == pytest.approx(0.005 * 0.03)


def test_of_a_few_the_one_that_will_be_the_last_is_worth_most_the_more_the_nearer_the_limit():
    assert values_of_few([1.0] * 4, [99.0] * 4, pass_s=1.0, row_s=0.1) == pytest.approx([1.0] * 4)
    shares = []
    for room in (1e6, 200.0, 40.0):
        values = values_of_few([1.0] * 4, [room, room, room, room / 2], pass_s=0.025, row_s=0.0005)
        assert values[0] == values[1] == values[2] > 1 > values[3] > 0.0005 * 4 / 0.027, "its row at least"
        shares.append(values[3] / values[0])
    assert shares == sorted(shares, reverse=True)
    two = {"paces": [1.0, 3.0], "rooms": [1e9, 2e9], "pass_s": 0.025, "row_s": 0.001}
    assert values_of_few(**two) == pytest.approx(token_values(**two), rel=0.02), "of two without a limit it is exact"


def best_fixed(alpha, curve, num_sequences):
    """Expected tokens per second of plain decoding and of the best fixed k."""
    rates = [
        num_sequences * sum(alpha**i for i in range(k + 1)) / seconds_of(curve, num_sequences * (1 + k))
        for k in range(17)
    ]
    return rates[0], max(rates)


@pytest.mark.parametrize("curve", [FLAT, STEEP], ids=["flat", "steep"])
@pytest.mark.parametrize("alpha", [0.05, 0.4, 0.8, 0.95])
@pytest.mark.parametrize("num_sequences", [1, 8])
def test_auto_is_within_five_per_cent_of_the_best_fixed_k(curve, alpha, num_sequences):
    guesser = Guesser("g", alpha)
    plain, best = best_fixed(alpha, curve, num_sequences)
    policy = timeless([guesser], "auto")
    sequences = [sequence(f"s{i}") for i in range(num_sequences)]
    assert simulate(policy, [guesser], curve, sequences, 500) > 0.94 * plain, "not even while it learns"
    rate = simulate(policy, [guesser], curve, sequences, 1500)
    assert rate > 0.97 * plain
    assert rate > 0.95 * best


DEVICE = {
    1: 4.35,
    8: 4.4,
    16: 4.5,
    32: 4.9,
    64: 5.2,
    128: 8.0,
    192: 9.8,
    256: 11.5,
    384: 13.5,
    512: 17.5,
    1024: 30.0,
    1536: 58.0,
}


def device_seconds(sequences, nodes, depth, *, ahead=False):
    """A large GPU: passes padded to a few sizes, a draft model of its own, and a host that hides in plain decoding."""
    rows = min(rows for rows in DEVICE if sequences + nodes <= rows)
    host = 0.0 if ahead else 0.25 + 0.015 * sequences + 0.005 * nodes
    drafting = 0.6 + (0.65 if sequences <= 16 else 0.9) * depth if depth else 0.0
    return 1e-3 * (DEVICE[rows] + host), 1e-3 * drafting


def on_a_device(policy, guesser, sequences, steps):
    """Tokens per simulated second; steps that the policy does not want to plan are launched ahead."""
    noise, tokens, clock, resting = random.Random(5), 0, 0.0, False
    for _ in range(steps):
        choices = [Choice()] * len(sequences) if resting else policy.plan(sequences, 0, False)
        ahead, resting = resting, policy.rests(sequences)
        policy.meanwhile()
        outputs = []
        for one, choice in zip(sequences, choices, strict=True):
            accepted = guesser.accepted(choice.budget)
            one.tokens += [1] * (accepted + 1)
            tokens += accepted + 1
            outputs.append(StepOutput(one, [1] * (accepted + 1), "", [], False, choice.method, choice.budget, accepted))
        nodes, depth = sum(choice.budget for choice in choices), max(choice.budget for choice in choices)
        step_s, draft_s = device_seconds(len(sequences), nodes, depth, ahead=ahead)
        # One step in fifty is slow: a collection, somebody else's work.
        taken = step_s * noise.uniform(0.97, 1.03) * noise.choice([1] * 49 + [4]) + draft_s
        clock += step_s + draft_s
        drafts = {guesser.name: (depth, draft_s)} if depth else {}
        policy.observe(StepReport(len(sequences), len(sequences) + nodes, taken, drafts, outputs, ahead=ahead))
    return tokens / clock


@pytest.mark.parametrize("alpha", [0.3, 0.95])
@pytest.mark.parametrize("num_sequences", [1, 4, 16, 64, 128])
def test_on_a_device_auto_costs_nothing_and_gets_what_the_best_fixed_k_gets(alpha, num_sequences):
    """Cold as well: the first 150 steps are all it has to learn what passes, drafts and guesses are worth there."""
    model, ticks = Guesser("model", alpha, evidence=6, shadow=False), itertools.count()
    prior = replace(GPU, padded_to=tuple(DEVICE))
    policy = AdaptivePolicy([model], "auto", prior=prior, clock=lambda: 20e-6 * next(ticks))
    sequences = [sequence(f"s{i}") for i in range(num_sequences)]
    rates = [num_sequences / device_seconds(num_sequences, 0, 0, ahead=True)[0]]
    for k in [k for k in range(1, 17) if num_sequences * (1 + k) <= 1024]:
        seconds = sum(device_seconds(num_sequences, num_sequences * k, k))
        rates.append(num_sequences * sum(alpha**i for i in range(k + 1)) / seconds)
    assert on_a_device(policy, model, sequences, 150) > 0.93 * rates[0], "not even while it learns"
    rate = on_a_device(policy, model, sequences, 300)
    assert rate > 0.98 * rates[0]
    assert rate > 0.95 * max(rates)
    policy.load(AdaptivePolicy([]).state())
    others = [sequence(f"t{i}") for i in range(num_sequences)]
    assert on_a_device(policy, model, others, 150) > 0.93 * rates[0], "having forgotten what it knew, for others"


def test_slow_first_drafts_and_single_slow_steps_poison_no_cost():
    times, cost = DraftTimes(), CostModel()
    for depth, seconds in ((4, 0.9), (4, 0.5), (4, 0.004), (8, 0.006), (4, 0.2), (4, 0.004), (8, 0.006), (4, 0.004)):
        times.observe("m", 16, depth, seconds)  # captured, compiled, and once somebody else's work
    assert times.lines("m", 16, 1.0, 0.0).at(16, 4) == pytest.approx(0.004, rel=0.2)
    assert times.lines("m", 16, 1.0, 0.0).at(16, 8) == pytest.approx(0.006, rel=0.2)
    for seconds in (0.02, 0.02, 9.0, 0.02, 0.02):
        cost.observe(4, seconds)
    assert cost.seconds(4) == pytest.approx(0.02, rel=0.01)


def test_a_plan_that_models_draft_by_stands_for_some_steps_and_not_for_newcomers():
    asked, model = [], Guesser("model", 0.9, evidence=6, shadow=False)
    model.evidence = lambda sequence: asked.append(sequence.key) or 6
    policy, sequences = timeless([model], "auto"), [sequence(f"s{i}") for i in range(4)]
    simulate(policy, [model], FLAT, sequences, 100)
    asked.clear()
    simulate(policy, [model], FLAT, sequences, 48)
    assert 4 * 8 <= len(asked) <= 4 * 24, "in one step of six, or a few more while depths change"
    joined = [*sequences, sequence("new")]
    plans = [policy.plan(joined, 0, False) for _ in range(2)]  # one may be a check of what plain steps take
    assert max(choices[-1].budget for choices in plans) >= 4, "a newcomer gets its draft at once"


def led_by_a_model(num_sequences):
    """A policy on a device that knows a good model and a lookup method, and what each was asked where."""
    model, lookup = Guesser("model", 0.95, evidence=6, shadow=False), Guesser("lookup", 0.6)
    asked = {"planning": [], "behind a pass": []}
    where = ["behind a pass"]
    for one in (model, lookup):
        one.evidence = lambda sequence, one=one: asked[where[0]].append((one.name, sequence.key)) or one._evidence
    policy = timeless([model, lookup], "auto", None, replace(GPU, padded_to=tuple(DEVICE)))
    plan = policy.plan

    def planned(*args):
        where[0] = "planning"
        choices = plan(*args)
        where[0] = "behind a pass"
        return choices

    policy.plan = planned
    sequences = [sequence(f"s{i}") for i in range(num_sequences)]
    on_a_device(policy, model, sequences, 60)
    return policy, model, sequences, asked


def test_where_a_model_leads_plans_are_made_behind_passes_and_lookups_ask_no_newcomer():
    policy, model, sequences, asked = led_by_a_model(8)
    for questions in asked.values():
        questions.clear()
    on_a_device(policy, model, sequences, 24)
    assert not asked["planning"]
    assert asked["behind a pass"]
    new = sequence("new")  # for which a model would have to read the prompt
    choices = policy.plan([*sequences, new], 0, False)
    assert [choice.method for choice in choices] == ["model"] * 8 + ["none"]
    assert ("lookup", new.key) not in asked["planning"]
    new.tokens += [1]
    assert policy.plan([*sequences, new], 0, False)[-1].method == "model"


def test_a_batch_that_shrinks_keeps_its_plan_where_drafts_have_begun():
    policy, model, sequences, asked = led_by_a_model(8)
    on_a_device(policy, model, sequences, 2)
    asked["planning"].clear()
    choices = policy.plan(sequences[:3], 0, False)
    assert [choice.method for choice in choices] == ["model"] * 3
    assert not asked["planning"]
    policy.meanwhile()
    assert len(policy._standing.choices) == 3, "and has another one for the step after it"


def test_prompts_beside_them_do_not_make_drafts_longer():
    policy, _, sequences, _ = led_by_a_model(8)
    policy._standing = None
    alone = policy.plan(sequences, 0, False)
    policy._standing = None
    beside = policy.plan(sequences, 900, False)
    assert max(choice.budget for choice in beside) <= max(choice.budget for choice in alone)


def test_whoever_drafts_in_step_with_others_has_one_node_at_least():
    curve = replace(GPU, padded_to=(8, 31, 4096))
    cost = CostModel(curve)
    cost.observe(8, 4e-3)
    line = Lines([0.0] * 4, [1e-4] * 4)
    good, bad = ([each**ahead for ahead in range(1, DEEPEST + 1)] for each in (0.98, 0.3))
    offers = [Offer(i, "model", bad if i == 3 else good) for i in range(4)]
    in_step = Terms(
        cost, 4, cost.seconds(4), 4, 4.0, 0.0, cost.seconds_with(4, 4 * DEEPEST), {"model": line}, in_step=True
    )
    each_alone = in_step._replace(in_step=False)
    assert Budget().spread(prospect_of(offers, each_alone), each_alone)[3] == 0
    depths = Budget().spread(prospect_of(offers, in_step), in_step)
    assert depths[3] == 1
    assert sum(depths) == 27, "and the others what is left of the bucket"


def test_drafts_are_shorter_where_answers_end_soon():
    cost = CostModel(replace(GPU, padded_to=(8, 64)))
    cost.observe(8, 4e-3)
    offer = Offer(0, "m", [0.95**ahead for ahead in range(1, DEEPEST + 1)])
    far = Terms(cost, 1, cost.seconds(1), 1, 1.0, 0.0, cost.seconds_with(1, DEEPEST), {"m": Lines([0.0], [3e-4])})
    limits = [prospect_of([offer], far._replace(room=room)).limit for room in (1e6, 40.0)]
    assert limits[0] > limits[1] >= 4


def test_a_models_draft_half_as_deep_is_taken_to_cost_half():
    times = DraftTimes()
    for _ in range(8):
        times.observe("m", 4, 16, 0.016, passes=True)
    assert times.lines("m", 4, 1.0, 0.0).at(4, 8) == pytest.approx(0.008, rel=0.06)


def test_one_bad_step_at_one_depth_does_not_end_a_models_drafts_there():
    acceptance = Acceptance()
    for _ in range(60):
        acceptance.note("s", "m", False, 6, drafted=4, accepted=4)
    for _ in range(4):
        acceptance.note("s", "m", False, 6, drafted=8, accepted=4)
    alive = acceptance.survival("m", False, 6, 16)
    assert alive[4] > 0.7 * alive[3]


def test_of_a_crowd_of_newcomers_some_are_asked_once_their_prompts_were_taken_in():
    asked, guesser = [], Guesser("g", 0.05)
    guesser.evidence = lambda sequence: asked.append(sequence.key) or 2
    policy = AdaptivePolicy([guesser], "auto", prior=replace(GPU, padded_to=(128,)), clock=lambda: 2e-4 * len(asked))
    simulate(policy, [guesser], FLAT, [sequence("before")], 60)  # it casts shadows, and what plain steps take is known
    crowd, before = [sequence(f"s{i}") for i in range(100)], len(asked)
    policy.plan(crowd, 0, False)
    assert len(asked) == before, "not before a pass has hidden the work"
    for one in crowd:
        one.tokens += [1]
    policy.plan(crowd, 0, False)
    policy.plan(crowd, 0, False)  # one may be a check of what plain steps take
    assert 16 <= len({*asked[before:]}) < 60, "and then not all of them in one step"


def test_a_smaller_batch_on_a_device_needs_no_plain_step_to_know_what_plain_steps_take():
    policy = AdaptivePolicy([], "auto", prior=replace(GPU, padded_to=tuple(DEVICE)))
    costs = policy._known.costs
    for _ in range(3):
        costs.of(64, False).observe(64, 5e-3)
    smaller = costs.of(8, False)
    assert smaller.plain_seen(8) >= 3
    assert 4e-3 < smaller.seconds(8) < 5e-3
    assert not costs.of(256, False).plain_seen(256), "a larger one takes longer, nobody knows how much"


def test_on_a_device_a_model_that_guesses_badly_is_tried_in_one_step_and_not_in_two():
    model = Guesser("model", 0.1, evidence=6, shadow=False)
    policy = timeless([model], "auto", None, replace(GPU, padded_to=tuple(DEVICE)))
    drafts, budgets = [sequence(f"s{i}") for i in range(64)], []
    plan = policy.plan
    policy.plan = lambda *args: budgets.append(plan(*args)) or budgets[-1]
    on_a_device(policy, model, drafts, 24)
    assert sum(any(choice.budget > 2 for choice in choices) for choices in budgets) == 1


def test_a_draft_for_fewer_sequences_is_taken_to_cost_less_than_one_for_many():
    times = DraftTimes()
    for depth in (4, 8, 4, 8, 4, 8):
        times.observe("m", 64, depth, 0.001 * depth)
    lines = times.lines("m", 64, 1.0, 0.0)
    assert lines.at(8, 8) == pytest.approx(0.8**3 * lines.at(64, 8))


def test_a_model_whose_first_drafts_held_is_trusted_further_ahead_at_once():
    acceptance = Acceptance()
    before = acceptance.survival("m", False, 6, 16)
    acceptance.note("s", "m", False, 6, drafted=8, accepted=8)
    after = acceptance.survival("m", False, 6, 16)
    assert after[15] > 1.5 * before[15]
    acceptance.note("s", "n", False, 2, drafted=8, accepted=8)
    assert acceptance.survival("n", False, 2, 16)[3:] < after[3:], "a match of two tokens is another matter"


def test_many_sequences_that_do_not_draft_are_seldom_asked():
    asked, guesser = [], Guesser("g", 0.05)
    guesser.evidence = lambda sequence: asked.append(sequence.key) or 2
    policy = AdaptivePolicy([guesser], "auto", clock=lambda: 30e-6 * len(asked))
    many = [sequence(f"s{i}") for i in range(64)]
    simulate(policy, [guesser], FLAT, many, 200)
    assert {*asked} == {one.key for one in many}
    asked.clear()
    simulate(policy, [guesser], FLAT, many, 200)
    assert {*asked} == {one.key for one in many}, "nobody is forgotten"
    assert len(asked) * 30e-6 < 0.01 * 200 * seconds_of(FLAT, 64), "and it takes less than a hundredth of the time"


def test_a_costly_drafter_that_guesses_badly_is_left_alone_and_a_good_one_found_again():
    dear = Guesser("dear", 0.2, evidence=6, seconds=0.01, shadow=False)
    policy = timeless([dear], "auto")
    many = [sequence("s")]
    plain = 1 / seconds_of(FLAT, 1)
    simulate(policy, [dear], FLAT, many, 200)
    assert simulate(policy, [dear], FLAT, many, 1000) > 0.97 * plain
    dear.alpha = 0.95  # the workload changes: rare probes notice
    simulate(policy, [dear], FLAT, many, 6000)
    assert simulate(policy, [dear], FLAT, many, 500) > 1.15 * plain


def test_the_better_of_two_methods_is_chosen_per_sequence():
    good, bad = Guesser("good", 0.9), Guesser("bad", 0.3)
    policy = timeless([bad, good], "auto")
    many = [sequence("a"), sequence("b", speculation="none"), sequence("c", speculation={"method": "bad", "k": 3})]
    simulate(policy, [good, bad], FLAT, many, 600)
    mine, off, fixed = policy.plan(many, 0, False)
    assert mine.method == "good"
    assert off == Choice()
    assert fixed == Choice("bad", 3)


@pytest.mark.parametrize("order", [1, -1])
def test_a_lone_sequence_gets_the_better_method_in_full_whichever_is_asked_first(order):
    both = [Guesser("good", 0.95), Guesser("bad", 0.2)]
    policy, alone, many = timeless(both[::order], "auto"), timeless(both[:1], "auto"), [sequence("a")]
    for each in (policy, alone):
        simulate(each, both, FLAT, many, 300)
    rate = simulate(policy, both, FLAT, many, 300)
    assert rate > 0.95 * simulate(alone, both, FLAT, many, 300)


def test_a_slow_first_timing_of_a_draft_does_not_end_drafting():
    good, many = Guesser("good", 0.95, seconds=0.001, shadow=False), [sequence("a")]
    policy = timeless([good], "auto")
    for _ in range(3):
        policy._known.draft_times.observe("good", 1, 1, 0.9)
    simulate(policy, [good], FLAT, many, 300)
    assert simulate(policy, [good], FLAT, many, 300) > 1.3 / seconds_of(FLAT, 1)


def test_requests_without_speculation_let_the_policy_rest():
    policy = timeless([Guesser("g", 0.9)], "auto")
    assert policy.rests([sequence("a", speculation="none"), sequence("b", speculation="none")])
    assert not policy.rests([sequence("a", speculation="none"), sequence("c")])


def test_budgets_never_pass_what_may_be_committed():
    policy = AdaptivePolicy([Guesser("g", 0.95)], "g", 8)
    short = sequence("s")
    short.max_len = len(short.tokens) + 3
    assert policy.plan([short], 0, False) == [Choice("g", 2)]
    short.max_len = len(short.tokens) + 1
    assert policy.plan([short], 0, False) == [Choice()]


def test_what_was_learnt_survives_a_restart():
    guesser = Guesser("g", 0.9)
    policy = timeless([guesser], "auto")
    simulate(policy, [guesser], FLAT, [sequence("s")], 500)
    again = timeless([guesser], "auto")
    again.load(json.loads(json.dumps(policy.state())))
    fresh = [sequence("t")]
    assert again.plan(fresh, 0, False)[0].budget >= 4, "a one-shot request does not start cold"
    cost, record = policy.state()["costs"][0], policy.state()["acceptance"][0]
    for broken in (
        {},
        {"costs": [{"sampled": 1, "size": 0, "scale": 1, "plain": {"rows": [7], "factor": [1]}}]},
        {"costs": 3},
        *(policy.state() | {"costs": [cost | {"scale": scale}]} for scale in (0, -1e-3, 1e9, math.nan)),
        *(policy.state() | {"acceptance": [record | {"tried": [one] * 16}]} for one in (math.nan, math.inf, -1.0)),
    ):
        with pytest.raises((KeyError, TypeError, ValueError)):
            again.load(broken)
    assert again.plan(fresh, 0, False)[0].budget >= 4, "a broken state changes nothing"


def test_costs_follow_the_machine_and_keep_their_shape():
    cost, noise = CostModel(), random.Random(0)
    for _ in range(400):
        rows = noise.choice([1, 2, 5, 9, 16])
        cost.observe(rows, seconds_of(STEEP, rows) * noise.uniform(0.8, 1.25))
    assert cost.seconds(16) / cost.seconds(1) == pytest.approx(seconds_of(STEEP, 16) / seconds_of(STEEP, 1), rel=0.15)
    before = cost.seconds(16) / cost.seconds(1)
    for _ in range(60):
        cost.observe(1, 3 * seconds_of(STEEP, 1))  # the machine slows down threefold while only one row is seen
    assert cost.seconds(1) == pytest.approx(3 * seconds_of(STEEP, 1), rel=0.1)
    assert cost.seconds(16) / cost.seconds(1) == pytest.approx(before, rel=0.5)
    assert cost.seconds(2 * FINE[-1]) == pytest.approx(2 * cost.seconds(FINE[-1]))


def test_a_slow_spell_that_begins_with_new_numbers_of_rows_is_not_put_down_to_them_for_long():
    dear = {}
    for drifts in (False, True):
        cost = CostModel(replace(CPU_PRIOR, drifts=drifts))
        for _ in range(40):
            cost.observe(1, 0.02)
        for rows in (2, 3, 5):
            cost.observe(rows, 0.04, drafted=True)
        for _ in range(3):
            cost.observe(5, 0.08, drafted=True)
            cost.observe(1, 0.04)
        dear[drifts] = float(cost.seconds_with(1, 4)[3]) / cost.seconds(1)
    assert dear[True] < 2.7, "two in truth"
    assert dear[False] > 3.5


def test_short_matches_that_fail_at_first_are_neither_given_up_nor_blamed_twice():
    acceptance = Acceptance()
    first = acceptance.survival("m", False, 2, 1)[0]
    for _ in range(12):
        acceptance.note("s", "m", False, 2, drafted=1, accepted=0)
        acceptance.note_promises({"m": (first, 0)})
    assert acceptance.survival("m", False, 2, 1)[0] > 0.4 * first
    assert acceptance.trust("m") < 0.6
    assert acceptance.trust("m", shadowed=True) > acceptance.trust("m") + 0.1
    for _ in range(400):
        acceptance.note_promises({"m": (1.0, 0)})
    assert acceptance.trust("m", shadowed=True) < 0.2, "what keeps failing is no bad luck"


def test_acceptance_is_counted_by_position_reached():
    acceptance = Acceptance()
    for _ in range(300):
        acceptance.note("s", "m", False, 4, drafted=4, accepted=2)  # positions 1 and 2 hold, 3 fails, 4 is never tried
    first, second, *rest = acceptance.survival("m", False, 4, 4)
    assert first == pytest.approx(0.99, abs=0.02)
    assert second == pytest.approx(0.98, abs=0.03)
    assert all(worth < 0.05 for worth in rest)


def test_vllms_speculative_config_is_understood_and_lossy_options_are_refused():
    base = SpeculationConfig(method="auto")
    config = read('{"method": "ngram", "num_speculative_tokens": 6, "prompt_lookup_max": 4}', base)
    assert (config.method, config.k, config.ngram_max) == ("ngram", 6, 4)
    assert read({"model": "smollm2"}, base).method == "draft-model"
    assert read({"prompt_lookup_max": 1}, base).ngram_min == 1
    for wrong, says in (
        ({"posterior_threshold": 0.1}, "posterior_threshold would change"),
        ({"method": "medusa"}, "medusa"),
        ({"method": ["ngram"]}, "ngram"),
        ({"method": "suffix", "prompt_lookup_max": 3}, "prompt_lookup_max has no meaning"),
        ({"method": "ngram", "model": "smollm2"}, "model has no meaning"),
        ({"warp": 9}, "warp is not understood"),
        ({"num_speculative_tokens": 0}, "between 1 and 64"),
        ({"num_speculative_tokens": "many"}, "whole number"),
        ("{", "not JSON"),
        ("[]", "JSON object"),
    ):
        with pytest.raises(InvalidParameter, match=says):
            read(wrong, base)


def test_a_method_that_was_switched_off_is_not_chosen_and_one_that_cannot_answer_complains_once(caplog):
    good, gone = Guesser("good", 0.6), Guesser("gone", 0.95)
    policy, one = timeless([gone, good], "auto"), sequence("s")
    simulate(policy, [gone, good], FLAT, [one], 200)
    assert policy.plan([one], 0, False)[0].method == "gone"
    policy.observe(StepReport(1, 1, 0.02, {}, [], frozenset({"gone"})))
    assert policy.plan([one], 0, False)[0].method == "good"
    good.evidence = lambda sequence: 1 // 0
    for _ in range(3):
        assert policy.plan([one], 0, False) == [Choice()]
    assert len([record for record in caplog.records if "failed to say" in record.message]) == 1


def test_the_first_pass_of_a_shape_teaches_nothing_about_costs():
    policy, one = timeless([Guesser("g", 0.9)], "auto"), sequence("s")
    output = StepOutput(one, [1], "", [], False)
    policy.observe(StepReport(1, 1, 9.0, {}, [output], warm=False))
    policy.meanwhile()
    assert policy.plain_seconds(1, False) is None
    policy.observe(StepReport(1, 1, 0.02, {}, [output]))
    policy.meanwhile()
    assert policy.plain_seconds(1, False) == pytest.approx(0.02)


def test_what_plain_steps_took_is_checked_as_fast_after_a_million_of_them():
    policy, one = timeless([Guesser("guesser", 0.9)], "auto"), sequence("s")
    simulate(policy, [Guesser("guesser", 0.9)], FLAT, [one], 8)
    policy._known.costs.of(1, False)._plain.seen[1] = 10**9  # three to the power of that fits no memory
    policy.plan([one], 0, False)
    assert policy._plain_due == PLAIN_EVERY


def test_a_step_is_learnt_from_by_what_was_known_when_its_draft_was_chosen():
    """Of a few that draft by lookup amid a model's, while the plan stands: the next plan comes before the lesson."""
    model, lookup = Guesser("model", 0.9, evidence=6, shadow=False), Guesser("lookup", 0.9)
    policy, sequences = timeless([model, lookup], "auto"), [sequence(f"s{i}") for i in range(8)]
    policy._known.shadows._casts.add("lookup")
    plan = Plan(evidence={(sequences[0].key, "lookup"): 4}, drafts=True)
    choices = {one.key: Choice("model", 2) for one in sequences} | {sequences[0].key: Choice("lookup", 2)}
    policy._standing = Standing(choices, plan, steps=4, left=3)
    policy._known.costs.of(8, False).observe(8, 0.02)
    noted = []
    policy._known.acceptance.note = lambda key, method, sampled, evidence, *_: noted.append((method, evidence))
    for evidence in (4, 9):
        lookup._evidence = evidence
        assert policy.plan(sequences, 0, False)[0] == Choice("lookup", 2)
        policy.meanwhile()
        policy.observe(StepReport(8, 10, 0.02, {}, [StepOutput(sequences[0], [1], "", [], False, "lookup", 2, 0)]))
    policy._learn()
    assert noted == [("lookup", 4), ("lookup", 9)]


def test_a_plan_does_not_stand_by_a_method_that_was_switched_off():
    model, other = Guesser("model", 0.9, evidence=6, shadow=False), Guesser("other", 0.9, evidence=6, shadow=False)
    policy, one = timeless([model, other], "auto"), sequence("s")
    policy._known.costs.of(1, False).observe(1, 0.02)
    policy._standing = Standing({one.key: Choice("model", 2)}, Plan(drafts=True), steps=6, left=5)
    assert policy.plan([one], 0, False) == [Choice("model", 2)]
    spoken = [StepOutput(one, [1], "", [], False, "model", 0, 0)]
    policy.observe(StepReport(1, 1, 0.02, {}, spoken, retired=frozenset(["model"])))
    assert policy.plan([one], 0, False)[0].method != "model"


@pytest.mark.parametrize("answers", [[4], [4, 4, 4, 4], None])
def test_one_of_many_that_cannot_be_looked_up_silences_no_other(answers):
    """Whether all at once fails or gives too few or too many."""
    sequences = [sequence(f"s{i}") for i in range(3)]

    class Partly(Guesser):
        def look(self, sequences):
            if answers is None:
                raise RuntimeError("one of them")
            return answers

        def evidence(self, sequence):
            return 4 if sequence is not sequences[1] else 1 // 0

    policy = timeless([Partly("g", 0.9)], "g", 3)
    assert policy.plan(sequences, 0, False) == [Choice("g", 3), Choice(), Choice("g", 3)]


def test_behind_a_pass_nobody_asks_about_those_that_have_left():
    policy, _, sequences, asked = led_by_a_model(8)
    gone = sequences[0]
    policy.plan(sequences, 0, False)
    gone.status = Status.FINISHED
    policy.forget(gone)
    policy._standing.left = 0
    for questions in asked.values():
        questions.clear()
    policy.meanwhile()
    assert asked["behind a pass"]
    assert gone.key not in {key for _, key in asked["behind a pass"]}
    assert gone.key not in policy._heard


@pytest.mark.parametrize("slope", [0.0, 0.002, 0.02])
@pytest.mark.parametrize("in_step", [False, True])
def test_one_offer_alone_promises_what_it_does_beside_one_that_is_worth_nothing(slope, in_step):
    noise, nothing = np.random.default_rng(3), Offer(1, "a", [])
    for nodes in range(DEEPEST + 1):
        cost, most = CostModel(), int(noise.integers(1, DEEPEST + 1))
        for _ in range(nodes):
            cost.observe(int(noise.integers(1, 30)), noise.uniform(0.01, 0.1), drafted=noise.random() < 0.5)
        survival = np.cumprod(noise.uniform(0.6, 1.0, nodes)).tolist()
        offer = Offer(0, "a", survival, noise.uniform(0.5, 1.0), most)
        scale = cost.scale or 1.0
        lines = {"a": Lines((scale * noise.uniform(0, 0.1, 2)).tolist(), [scale * slope] * 2, scale * 1e-3)}
        many, few = cost.seconds_with(2, 2 * DEEPEST), cost.seconds_with_few(2, DEEPEST)
        assert few == pytest.approx(many[:DEEPEST].tolist(), rel=1e-12)
        terms = Terms(cost, 2, cost.seconds(2), 2, 2.0, 0.0, many, lines, in_step, room=noise.uniform(32, 99))
        alone, beside = prospect_of([offer], terms._replace(with_nodes=few)), prospect_of([offer, nothing], terms)
        assert (alone is None) == (beside is None) == (nodes == 0)
        if alone is not None:
            assert alone.limit == beside.limit
            assert alone.of == beside.of.tolist()
            assert alone.rates == pytest.approx(beside.rates.tolist(), rel=1e-12)
            for trial in (0, 1):
                budgets = Budget(), Budget()
                for budget in budgets:
                    budget._allowance = 4.0
                asked = terms._replace(trial=trial)
                depths = budgets[0].spread(alone, asked), budgets[1].spread(beside, asked)
                assert depths[0] == depths[1][:1]
                assert budgets[0].explores == budgets[1].explores


def test_a_few_offers_promise_the_same_without_arrays():
    noise = np.random.default_rng(4)
    for trial in range(20):
        cost = CostModel()
        for _ in range(trial):
            cost.observe(int(noise.integers(1, 40)), noise.uniform(0.01, 0.1), drafted=noise.random() < 0.5)
        scale, offers = cost.scale or 1.0, []
        for at in range(4):
            survival = np.cumprod(noise.uniform(0.3, 1.0, int(noise.integers(0, DEEPEST)))).tolist()
            most = int(noise.integers(1, DEEPEST + 1))
            offers.append(Offer(at, "ab"[int(noise.integers(2))], survival, noise.uniform(0.5, 1.0), most))
        lines = {
            name: Lines((scale * noise.uniform(0, 0.1, 3)).tolist(), [scale * 0.001] * 3, scale * 1e-3) for name in "ab"
        }
        arrays = Terms(cost, 4, cost.seconds(4), 4, 4.0, 0.0, cost.seconds_with(4, 4 * DEEPEST), lines)
        many = prospect_of(offers, arrays)
        few = prospect_of(offers, arrays._replace(with_nodes=cost.seconds_with_few(4, 4 * DEEPEST)))
        assert isinstance(few.rates, list)
        assert few.of == many.of.tolist()
        assert few.rates == pytest.approx(many.rates.tolist(), rel=1e-9)
        for number in range(len(few.rates) + 1):
            assert few.depths(number) == many.depths(number)


@pytest.mark.parametrize(("sequences", "by_model", "drafts"), [(1, False, True), (1, True, False), (8, False, False)])
def test_a_promise_of_three_per_cent_is_enough_for_one_sequence_that_looks_up(sequences, by_model, drafts):
    cost = CostModel()
    for rows in (sequences, sequences + 1):
        cost.observe(rows, 0.03)
    terms = Terms(
        cost, sequences, cost.seconds(sequences), sequences, float(sequences), 0.0, cost.seconds_with(sequences, 1), {}
    )
    promised = np.array([1.03 * terms.value / terms.plain_s])
    assert Budget()._best_number(promised, terms, by_model) == int(drafts)


def test_a_method_that_cannot_say_how_far_behind_it_is_costs_no_step():
    guessers = [Guesser("a", 0.9), Guesser("b", 0.9)]
    guessers[0].lag = lambda sequence: 1 // 0
    sequences = [sequence(f"s{i}") for i in range(2)]
    simulate(timeless(guessers, "auto"), guessers, FLAT, sequences, 40)
    assert len(sequences[0].tokens) > 60, "they draft all the same"
