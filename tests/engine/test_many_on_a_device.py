"""`auto` for many sequences on a device, where drafts do not pay and prompts arrive: to find out must cost little."""

import random
from dataclasses import replace

import numpy as np
import pytest

from paceline.engine.batch import DraftWork, StepTiming
from paceline.engine.policy import DraftPlan
from paceline.engine.policy.adaptive import AdaptivePolicy
from paceline.engine.policy.priors import GPU
from paceline.models.buckets import STEPS
from tests.engine.policy.simulation import Lookup, TreeModel, offers_of, plan, sequence
from tests.helpers.results import ResultRow, result_of

# An 8B shape on an H200, by rows. A step that is not launched ahead shows the host's time as well.
PASS_MS = {1: 3.86, 16: 4.1, 32: 4.4, 64: 4.65, 128: 5.6, 256: 8.2, 384: 11.8, 512: 14.3, 1024: 27.4, 2048: 54.0}
PROMPT, ANSWER = 100, (20, 256)  # tokens
CONTEXT_KV_MS = 0.0015  # each unread token, whose context K/V a draft writes first


def pass_ms(rows):
    return float(np.interp(next(size for size in STEPS if size >= rows), list(PASS_MS), list(PASS_MS.values())))


class Serving:
    """Sequences that end and are followed by new ones, answered step by step; time is by the tables above."""

    def __init__(self, count, seed, *, first=0.74, draft_ms=0.0, slow=()):
        """`draft_ms`: of a draft, 0: as measured; `slow`: turns of a step that takes four times as long."""
        self.count, self.slow, self.rng = count, slow, random.Random(seed)
        seconds = 1e-3 * (draft_ms or 0.74 + 0.028 * count)
        self.drafter = TreeModel(seconds=seconds, first=first, falls=0.9, seed=seed)
        self.drafters = [self.drafter, Lookup("lookup", 0.3, level=1)]
        self.policy = AdaptivePolicy("auto", prior=replace(GPU, padded_to=STEPS))
        self.sequences = [sequence(f"s{at}") for at in range(count)]
        self.left = {one.key: self.rng.randrange(1, ANSWER[1]) for one in self.sequences}
        self.unread_tokens = dict.fromkeys(self.left, 99)
        self.resting, self.ms, self.plain_ms = False, 0.0, 0.0
        self.begun: dict[str, int] = {}  # by sequence: nodes that the last plan asked for
        self.rows: list[int] = []  # of passes without prompts

    def newcomers(self, turn):
        found = []
        for at, one in enumerate(self.sequences):
            if self.left[one.key] <= 0:
                self.policy.forget(one)
                self.sequences[at] = new = sequence(f"n{turn}/{at}")
                self.left[new.key], self.unread_tokens[new.key] = self.rng.randrange(*ANSWER), 99
                found.append(new)
        return found

    def step(self, turn):
        new = {one.key for one in self.newcomers(turn)}
        decoding = [one for one in self.sequences if one.key not in new]
        planned = [DraftPlan()] * len(decoding) if self.resting else plan(self.policy, self.drafters, decoding)
        choices = dict(zip([one.key for one in decoding], planned, strict=True))
        begun, self.begun = self.begun, {key: one.max_nodes for key, one in choices.items() if one.method == "trees"}
        self.policy.learn()
        outputs, paths, unread, drafts = [], [], 0, 0
        for one in self.sequences:
            choice, path = choices.get(one.key, DraftPlan()), []
            self.unread_tokens[one.key] += 1
            if choice.method == "trees":
                choices[one.key] = choice = DraftPlan("trees", min(choice.max_nodes, begun.get(one.key, 64)))
                path = [node for node in range(choice.max_nodes) if self.rng.random() < self.drafter.shares[node]]
                unread, drafts, self.unread_tokens[one.key] = unread + self.unread_tokens[one.key], drafts + 1, 0
            committed = [1] * (len(path) + 1)
            one.tokens += committed
            self.left[one.key] -= len(committed)
            outputs.append(ResultRow(one, committed, False, choice.method, choice.max_nodes, len(path), 8))
            paths.append(path)
        nodes = sum(choice.max_nodes for choice in choices.values())
        rows = len(decoding) + PROMPT * len(new)
        if not new:
            self.rows.append(rows + nodes)
        taken = pass_ms(rows + nodes) + (0.0 if self.resting else 1.0 + 0.02 * self.count)
        taken *= 4 if turn in self.slow else 1
        timed = {}
        if drafts:
            taken += 1e3 * self.drafter.seconds + CONTEXT_KV_MS * unread + 0.02 * self.count
            timed["trees"] = DraftWork(1, unread, self.drafter.seconds + 1e-3 * CONTEXT_KV_MS * unread)
        made = result_of(outputs, paths.__getitem__)
        seconds = 1e-3 * taken * self.rng.uniform(0.97, 1.03)
        self.policy.observe(made, StepTiming(self.count, rows + nodes, seconds, timed, ahead=self.resting))
        self.ms += taken
        self.plain_ms += pass_ms(rows) * made.num_tokens / self.count
        offers = offers_of(self.drafters, self.sequences)
        self.resting = not nodes and self.policy.skip_plan(self.sequences, offers)


@pytest.mark.parametrize(("count", "least"), [(64, 0.966), (128, 0.976)])
def test_what_does_not_pay_for_many_costs_little_to_find_out(count, least):
    shares = []
    for seed in range(3):
        serving = Serving(count, seed)
        for turn in range(700):
            serving.step(turn)
        shares.append(serving.plain_ms / serving.ms)
    assert sum(shares) / len(shares) > least, shares


@pytest.mark.parametrize("seed", range(3))
def test_drafts_that_were_begun_with_fewer_nodes_do_not_lead_to_passes_just_over_a_size(seed):
    """16 trees of 7 nodes are a pass of 128 rows; one node more takes as long as 64."""
    serving = Serving(16, seed, first=0.8)
    for turn in range(500):
        serving.step(turn)
    over = sum(128 < rows < 160 for rows in serving.rows[20:])
    assert over < 0.05 * len(serving.rows), over / len(serving.rows)


@pytest.mark.parametrize("seed", [0, 2, 4])
def test_one_slow_step_does_not_stop_what_pays_for_many(seed):
    serving = Serving(64, seed, first=0.95, draft_ms=0.6, slow={100})
    for turn in range(400):
        serving.step(turn)
    assert serving.plain_ms / serving.ms > 1.25
