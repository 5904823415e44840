"""The method and the number of nodes of each row's draft, decided anew at each step by one formula.

A plan has the highest (rows + expected tokens of its nodes) / (step seconds(rows + nodes) + draft seconds), found by
`allocate` for each method; the empty plan is always a candidate. Expected tokens are learnt in `survival`, seconds in
`costs`; `guard` compares drafted steps with what was expected of them. All of it comes from committed tokens and
timings, never from the draft itself: that would bias the output.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

from paceline.config import MAX_K, NONE
from paceline.core.sequence import Sequence
from paceline.engine.batch import StepResult, StepTiming
from paceline.engine.policy import DraftPlan, Offers, allocate, any_sampled, wish
from paceline.engine.policy.allocate import Allocation, Candidate
from paceline.engine.policy.costs import FIRST_DRAFTS, StepTimes
from paceline.engine.policy.guard import Backoff, Guard
from paceline.engine.policy.learned_tables import BatchRows, PlannedStep, PolicyTables, slope
from paceline.engine.policy.priors import CPU, PassPrior
from paceline.engine.policy.survival import bucket

# Gain over plain decoding below which nothing is drafted: less is within the error of the tables. For lookups it is
# multiplied by sqrt(sequences): of many estimates the highest are chosen.
MARGIN = 0.02
# Steps between two plain steps, doubled from the first to the last; they keep the plain step time current.
PLAIN_FIRST, PLAIN_EVERY = 8, 128
SURPRISE = 0.1  # log(expected / measured seconds) above which the next plan tries more nodes
FADE_EVERY = 128  # steps after which the records of methods that were not tried are halved
# Steps whose timings a CPU processes together, one more for every 16 seen: with cold caches one costs as much as eight.
MOST_OBSERVED, STEPS_PER_OBSERVED = 8, 16
TRIAL_ROWS, TRIAL_NODES = 16, 2  # rows, and nodes of each, for a method with fewer than GUESS_TRIALS drafts
WORST = -2.0  # plain steps; cap on the loss of one drafted step, so that one slow step alone pauses no method

_draft_plan = cache(DraftPlan)


NO_ROWS = BatchRows([], [], [], {}, {}, {})


@dataclass
class PendingPlan:
    """The basis of the plan of the step under way, from which the policy learns once the step was observed."""

    drafts: bool = False  # some row drafts with a k that the policy chose
    sequences: int = 0  # that were planned; newcomers of the step are not among them
    plain_s: float = 0.0  # seconds of a plain step; 0 while the step also computes prompt rows
    times: StepTimes | None = None
    explores: bool = False  # it has more nodes than the best plan
    drafted: dict[str, tuple[int, int]] = field(default_factory=dict)  # by sequence: level, and limit of nodes or 0
    token_weights: dict[str, float] = field(default_factory=dict)


class _ObservedStep(NamedTuple):
    plan: PendingPlan
    result: StepResult
    timing: StepTiming
    paths: Mapping[int, SequenceOf[int]]  # by index in the result: the accepted nodes of its tree


class AdaptivePolicy:
    """`method`: auto, or one method; `k`: fixed, or None; a request's own choice outranks both.

    `prior`: how the time of a pass grows with its rows on this device.
    """

    def __init__(self, method: str = NONE, k: int | None = None, prior: PassPrior = CPU) -> None:
        self._method, self._k = method, k
        self._on_device = bool(prior.padded_to)  # steps are launched ahead where no row drafts
        self.tables, self.backoff = PolicyTables(prior), Backoff(self._on_device)
        self.guards: defaultdict[str, Guard] = defaultdict(Guard)  # by method
        self.pending, self.min_node_probability = PendingPlan(), 0.0
        self._rows = NO_ROWS  # of the last plan
        self._observed: list[_ObservedStep] = []  # steps observed and not learnt from
        self._urgent = False  # one of them is among the first of its method, so the next plan depends on it
        self.num_steps = 0  # that the policy has learnt from
        # Steps since a plain one, and the number at which one is due. Captured passes take equal times, so on a device
        # the first interval is the longest one.
        self._since_plain, self._plain_due = 0, PLAIN_EVERY if self._on_device else PLAIN_FIRST
        self._explores = self._drafted = False  # the next plan tries more nodes; a step drafted since the last fade
        self._checks = False  # the step under way is plain so that its time is known
        self._runs_ahead = False  # some step was launched ahead
        self.expected_gain: float | None = None  # over plain decoding, when drafting was last considered

    # -- planning

    def plan(
        self, sequences: SequenceOf[Sequence], offers: Offers, other_rows: int, others_wait: bool
    ) -> list[DraftPlan]:
        self.pending, self.min_node_probability = PendingPlan(), 0.0
        plans = [_draft_plan(NONE, 0)] * len(sequences)
        if not offers.working:
            return plans
        rows = self._rows_of(sequences)
        remaining = [sequence.max_len - len(sequence.tokens) for sequence in sequences]
        for method, ks in rows.fixed.items():
            self._plan_fixed(offers, method, {row: k for row, k in ks.items() if remaining[row] > 1}, remaining, plans)
        open_rows = rows.open
        if remaining and min(remaining) <= 1:
            open_rows = {method: [row for row in each if remaining[row] > 1] for method, each in open_rows.items()}
            open_rows = {method: each for method, each in open_rows.items() if each}
        if open_rows:
            base, times = len(sequences), self.tables.step_times[True in rows.sampled]
            if rows.fixed:
                base += sum([plan.max_nodes for plan in plans])
            if self._urgent or (len(self._observed) > 1 and not times.plain_known(base)):
                self._learn()
            self._count_step(times.plain_known(base))
            if not self._checks:
                stopped = self._stopped(len(sequences))
                all_stopped, backs_off = self._pauses(sequences, offers, stopped)
                self._count_pauses(len(sequences), backs_off)
                if not all_stopped and not backs_off:
                    step = PlannedStep(rows, remaining, times, base, other_rows, not others_wait)
                    self._choose(step, offers, open_rows, stopped, plans)
        return plans

    def _rows_of(self, sequences: SequenceOf[Sequence]) -> BatchRows:
        if self._rows.sequences == sequences:
            return self._rows
        keys, sampled = [sequence.key for sequence in sequences], [sequence.sampled for sequence in sequences]
        self._rows = rows = BatchRows(list(sequences), keys, sampled, {}, {}, {})
        for row, sequence in enumerate(sequences):
            method, k = wish(sequence, self._method, self._k)
            if k is not None and method != NONE:
                rows.fixed.setdefault(method, {})[row] = k
            elif method != NONE:
                rows.open.setdefault(method, []).append(row)
            rows.wait_groups.setdefault(sequence.wait_group, []).append(row)
        if len(rows.wait_groups) == len(keys):
            rows.wait_groups.clear()
        return rows

    def _plan_fixed(
        self, offers: Offers, method: str, ks: Mapping[int, int], remaining: list[int], plans: list[DraftPlan]
    ) -> None:
        """Choose the method with the highest level for rows whose k is fixed."""
        for offer in self.tables.read(offers, method, list(ks)):
            for row, level in zip(offer.rows, offer.levels, strict=True):
                key = self._rows.keys[row]
                if level > self.pending.drafted.get(key, (0, 0))[0]:
                    self.pending.drafted[key] = level, 0
                    # The target gives the last token itself, so a chain has at most remaining - 1 nodes.
                    most = MAX_K if remaining[row] > offer.max_depth else remaining[row] - 1
                    plans[row] = _draft_plan(offer.method, min(ks[row], most))

    # -- plain steps

    @property
    def _is_plain_due(self) -> bool:
        return self._since_plain + 1 >= self._plain_due

    def _count_step(self, plain_known: bool) -> None:
        """Decide whether the step is plain so that its time is known, and count it."""
        due = self._is_plain_due
        if due:
            self._plain_due, self._explores = min(2 * self._plain_due, PLAIN_EVERY), True
        self._checks = due or not plain_known
        self._since_plain = 0 if self._checks else self._since_plain + 1

    def _stopped(self, num_sequences: int) -> set[str]:
        """Return the methods that their guards have paused in batches of this size."""
        return {method for method, guard in self.guards.items() if guard.is_paused(num_sequences)}

    def _pauses(self, sequences: SequenceOf[Sequence], offers: Offers, stopped: set[str]) -> tuple[bool, bool]:
        """Return whether every method is paused by its guard, and else whether no plan is due after one that found
        nothing: the batch is as it was, and no lookup has a higher level than what was not worth a draft."""
        if stopped.issuperset(offers.methods(self._method) or offers.working):
            return True, False
        if not self.backoff.is_active(sequences):
            return False, False
        return False, not (self.backoff.may_look(len(sequences)) and self._finds_more(sequences, offers, stopped))

    def _finds_more(self, sequences: SequenceOf[Sequence], offers: Offers, stopped: set[str]) -> bool:
        lookups = self.tables.read(offers, self._method, range(len(sequences)), stopped | self.tables.models)
        return any(self.backoff.is_ended_by(offer.method, bucket(max(offer.levels))) for offer in lookups)

    def _count_pauses(self, num_sequences: int, backs_off: bool) -> None:
        for guard in self.guards.values():
            guard.tick(num_sequences)
        if backs_off:
            self.backoff.tick()

    def next_is_plain(self, sequences: SequenceOf[Sequence], offers: Offers) -> bool:
        if not offers.working:
            return True
        rows = self._rows_of(sequences)
        if not rows.open and not rows.fixed:
            return True
        if self.pending.drafts or rows.fixed:
            return False
        return self._checks or any(self._pauses(sequences, offers, self._stopped(len(sequences))))

    def skip_plan(self, sequences: SequenceOf[Sequence], offers: Offers) -> None:
        if self._checks:
            self._checks = False
        elif offers.working and self._rows_of(sequences).open:
            _, backs_off = self._pauses(sequences, offers, self._stopped(len(sequences)))
            self._count_pauses(len(sequences), backs_off)

    def may_repeat(self) -> bool:
        return self._method == NONE or self._k is not None or not self._is_plain_due

    # -- the formula

    def _choose(
        self,
        step: PlannedStep,
        offers: Offers,
        open_rows: Mapping[str, list[int]],
        stopped: set[str],
        plans: list[DraftPlan],
    ) -> None:
        """Plan the rows whose k is open."""
        number, times = len(step.remaining), step.times
        plain_s = times.seconds(step.base)
        by_wish = [
            [self.tables.candidate(step, offer) for offer in self.tables.read(offers, wished, rows, stopped)]
            for wished, rows in open_rows.items()
        ]
        considered = [candidate for each in by_wish for candidate in each]
        with_nodes = self.tables.with_nodes(step, considered)
        chosen, allocation = list[Candidate](), allocate.NOTHING
        for each in by_wish:
            best, allocation = self.tables.best(step, with_nodes, each)
            chosen += best
        if len(by_wish) > 1:  # rows that ask for different methods share the pass
            allocation = allocate.best(number, with_nodes, chosen)
        self.backoff.saw(step.rows.keys, number)
        gain = allocation.rate * plain_s / number
        self.expected_gain = gain or None
        models = any(candidate.method in self.tables.models for candidate in chosen)
        if gain > 1 + MARGIN * (1.0 if models else math.sqrt(number)):
            self.backoff.end()
            pending = self.pending
            pending.times, pending.sequences = times, number
            pending.plain_s = 0.0 if step.other_rows else plain_s
            pending.explores, self._explores = self._explores, False
            if pending.explores:
                allocation = allocate.best(number, with_nodes, chosen, explore=True)
            elif step.base == number:  # no row has its k fixed
                self.min_node_probability = allocation.rate * slope(with_nodes, round(allocation.drafted))
            self._give(step.rows.keys, chosen, allocation, plans)
        elif not offers.awaits_model:
            levels: dict[str, int] = {}
            for candidate in considered:
                levels[candidate.method] = max(bucket(max(candidate.levels)), levels.get(candidate.method, 0))
            self.backoff.begin(number, levels)

    def _give(
        self, keys: list[str], candidates: list[Candidate], allocation: Allocation, plans: list[DraftPlan]
    ) -> None:
        """Write the allocation into the plans; of a method hardly tried few rows draft, and short."""
        self.pending.drafts = True
        for candidate, nodes in zip(candidates, allocate.by_row(candidates, allocation), strict=True):
            self.pending.token_weights.update({keys[row]: weight for row, weight in candidate.token_weights.items()})
            left, most = len(candidate.rows), MAX_K
            if left > TRIAL_ROWS and not self.tables.survival.is_tried(candidate.method):
                left, most = TRIAL_ROWS, TRIAL_NODES
            for row, level, max_nodes in zip(candidate.rows, candidate.levels, nodes, strict=True):
                if max_nodes and left:
                    left -= 1
                    max_nodes = min(max_nodes, most)
                    plans[row] = self.tables.last_draft[keys[row]] = _draft_plan(candidate.method, max_nodes)
                    # On a device trees are not cut, and an early draft has the nodes of the last plan.
                    self.pending.drafted[keys[row]] = level, 0 if self._on_device else max_nodes

    # -- learning

    def observe(self, result: StepResult, timing: StepTiming) -> None:
        paths = {}
        for at, (method, _, accepted, _) in result.drafts.items():
            self._urgent |= not self.tables.survival.is_tried(method)
            if method in self.tables.trees:
                paths[at] = range(accepted) if result.paths is None else result.paths(at)
        self._observed.append(_ObservedStep(self.pending, result, timing, paths))
        self.pending = PendingPlan()  # a step launched ahead has no plan

    def learn(self) -> None:
        enough = 1 if self._on_device else min(1 + self.num_steps // STEPS_PER_OBSERVED, MOST_OBSERVED)
        if len(self._observed) >= enough:
            self._learn()

    def _learn(self) -> None:
        """Learn from all steps observed, and clear the caches."""
        if self._observed:
            for step in self._observed:
                self._learn_from(step)
            self._observed, self._urgent = [], False
            self.tables.changed()

    def _learn_from(self, step: _ObservedStep) -> None:
        plan, result, timing, paths = step
        self.num_steps += 1
        self._drafted |= plan.drafts
        if self.num_steps % FADE_EVERY == 0:
            self.tables.survival.fade()
            if not self._drafted:
                self.tables.draft_times.fade()
                for times in self.tables.step_times:
                    times.fade()
            self._drafted = False
        drafting: dict[str, int] = {}  # method -> sequences
        if timing.rows > timing.num_sequences:
            for method, *_ in result.drafts.values():
                drafting[method] = drafting.get(method, 0) + 1
        if result.sequences:
            self._learn_times(plan, result, timing, drafting)
        for at, (method, nodes, accepted, depth) in result.drafts.items():
            sequence = result.sequences[at]
            level, limit = plan.drafted.get(sequence.key, (1, 0))
            if at in paths:
                self.tables.survival.note_tree(method, sequence.sampled, level, limit, nodes, paths[at])
            else:
                self.tables.survival.note(method, sequence.sampled, level, depth, accepted)
        if drafting:
            self.tables.note_pace(result.sequences, result.tokens)
        for at in result.ended:
            self.forget(result.sequences[at])
        if result.drafts:
            self.tables.survival.end_step()

    def _learn_times(
        self, plan: PendingPlan, result: StepResult, timing: StepTiming, drafting: Mapping[str, int]
    ) -> None:
        times = self.tables.step_times[any_sampled(result.sequences)]
        for method, (depth, seconds) in timing.draft_s.items():
            skip = FIRST_DRAFTS if method in self.tables.models else 0
            self.tables.draft_times.observe(method, drafting.get(method, 1), depth, seconds, skip=skip)
        self._runs_ahead |= timing.ahead
        # Skip steps in which a drafter read earlier tokens: it is not timed, and their time is not typical.
        if not timing.time_is_typical or not drafting.keys() <= timing.draft_s.keys():
            return
        nodes = sum([draft.nodes for draft in result.drafts.values()])
        if plan.drafts and plan.plain_s:
            self._compare(plan, result, timing, drafting, nodes)
        # Skip steps that read prompts: on a machine unlike the prior one would pass for a slow plain step.
        whole = len(result) == timing.num_sequences and timing.rows <= timing.num_sequences + nodes
        taken = timing.step_s - sum([seconds for _, seconds in timing.draft_s.values()])
        if not whole or taken <= 0:
            return
        ratio = times.rescale_to_run(timing.rows, taken, drafted=plan.drafts)
        if ratio is not None:
            self.tables.draft_times.multiply(ratio)
            for table in self.tables.step_times:
                table.multiply(ratio)
            return
        # Where plain steps are launched ahead, one that was not takes longer than they do.
        if plan.drafts or timing.ahead or not self._runs_ahead or not times.plain_known(timing.rows):
            off = times.observe(timing.rows, taken, drafted=plan.drafts)  # drafts with k fixed are in steps of any plan
            self._explores |= plan.explores and off < -SURPRISE

    def _compare(
        self, plan: PendingPlan, result: StepResult, timing: StepTiming, drafting: Mapping[str, int], nodes: int
    ) -> None:
        """Note in the guards what a drafted step saved. The time of newcomers' prompts beside it is taken off, by their
        rows; a step in which that exceeds a plain step is skipped."""
        times, beside_s = plan.times, 0.0
        if timing.rows > timing.num_sequences + nodes and times is not None:
            beside_s = max(times.seconds(timing.rows - nodes) - times.seconds(timing.num_sequences), 0.0)
            if beside_s > plan.plain_s:
                return
        weights = plan.token_weights
        more = [weights.get(result.sequences[at].key, 1.0) * (len(result.tokens[at]) - 1) for at in result.drafts]
        saved = 1 + sum(more) / plan.sequences - (timing.step_s - beside_s) / plan.plain_s
        for method in drafting:
            self.guards[method].note(plan.sequences, max(saved, WORST))

    def plain_seconds(self, num_sequences: int, sampled: bool) -> float | None:
        times = self.tables.step_times[sampled]
        return None if times.speed is None else times.seconds(num_sequences)

    def forget(self, sequence: Sequence) -> None:
        self._rows = NO_ROWS
        self.tables.forget(sequence)
        self.backoff.forget(sequence)

    def relearn(self, method: str) -> None:
        """Drop the method's record and its pauses: the acceptance of its drafts has changed."""
        self._learn()
        self.tables.survival.forget(method)
        self.guards.pop(method, None)
        self.tables.changed()
        self.backoff.reset()

    # -- between runs

    def state(self) -> dict[str, Any]:
        self._learn()
        return self.tables.state()

    def load(self, state: Mapping[str, Any]) -> None:
        """Take over a stored state; raise KeyError, TypeError or ValueError on one of another form, unchanged."""
        self.tables.load(state)
        self.guards.clear()
        self._observed, self._urgent = [], False
