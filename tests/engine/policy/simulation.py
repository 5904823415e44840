"""A simulated clock for policies: drafters whose drafts are right by chance, and the steps that they take part in."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np

from paceline.config import TRAINED_LEVEL
from paceline.core.sequence import Sequence
from paceline.drafters.base import HostDrafter
from paceline.engine.batch import DraftWork, StepTiming
from paceline.engine.block_manager import BlockManager
from paceline.engine.drafter_set import DrafterSet
from paceline.engine.policy import DEEPEST, DraftPlan
from paceline.engine.policy.priors import GPU
from paceline.sampling_params import SamplingParams
from tests.helpers.results import ResultRow, result_of

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


class TreeModel(Model):
    """The n-th node is on the accepted path so often, whatever the others; all nodes take one pass."""

    trees = True

    def __init__(self, *, seconds, falls=1.3, first=0.7, seed=0):
        super().__init__("trees", 0.0, seconds=seconds)
        self.noise = random.Random(seed)
        self.shares = first * (1 + np.arange(64) / 2) ** -falls


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
    outputs, work = [], {}
    for one, choice in zip(sequences, choices, strict=True):
        drafter = by_name.get(choice.method)
        accepted = drafter.accepted(one, choice.max_nodes) if drafter else 0
        if drafter:
            passes = max(choice.max_nodes, work[choice.method].passes if choice.method in work else 0)
            work[choice.method] = DraftWork(passes, 0, drafter.seconds * passes)
        committed = [1] * min(accepted + 1, one.remaining)
        one.tokens += committed
        ended = one.remaining == 0
        outputs.append(ResultRow(one, committed, ended, choice.method, choice.max_nodes, accepted, choice.max_nodes))
    nodes = sum(choice.max_nodes for choice in choices)
    taken = seconds(len(sequences), nodes, resting) + sum(each.seconds for each in work.values())
    reported = taken * noise.uniform(0.9, 1.1) if noise else taken
    rows = len(sequences) + nodes
    policy.observe(result_of(outputs), StepTiming(len(sequences), rows, reported, work, ahead=resting))
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
    work = {drafter.name: DraftWork(1, 0, drafter.seconds)} if nodes else {}
    taken = seconds_of(curve, len(sequences) + nodes) + (drafter.seconds if nodes else 0.0)
    made = result_of(outputs, paths.__getitem__)
    policy.observe(made, StepTiming(len(sequences), len(sequences) + nodes, taken, work))
    expected = sum(1 + drafter.shares[: choice.max_nodes].sum() for choice in choices)
    return expected, taken, [choice.max_nodes for choice in choices]


def best_fixed(alpha, curve, num_sequences):
    """Expected tokens per second of plain decoding and of the best fixed k."""
    rates = [
        num_sequences * sum(alpha**i for i in range(k + 1)) / seconds_of(curve, num_sequences * (1 + k))
        for k in range(DEEPEST + 1)
    ]
    return rates[0], max(rates)


def on_a_device(policy, drafter, sequences, steps, arriving=None):
    """Tokens per simulated second, and the choices; plain steps that need no plan are launched ahead.

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
        resting = policy.skip_plan(sequences, offers_of([drafter], sequences))
        tokens, clock = tokens + said, clock + taken
        planned.append(choices)
    return tokens / clock, planned
