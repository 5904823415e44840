"""Which method drafts for each sequence, and how many nodes, decided anew each step by one formula.

The plan makes (rows + sum of survival over chosen nodes) / (step seconds(rows + nodes) + draft seconds) largest, as
`budgets` does for each method; none at all is always a candidate. Survival is learnt in `acceptance`, seconds in
`cost`; `guard` watches that drafted steps bring what was expected of them. Everything used here is committed history
and timings, never the draft at hand: that would bias the output.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from functools import cache
from itertools import compress
from typing import Any, NamedTuple

from paceline.config import MAX_K
from paceline.core.sequence import Sequence
from paceline.drafters import NONE, Drafter
from paceline.engine.batch import StepResult, StepTiming
from paceline.engine.policy import allocate as budgets
from paceline.engine.policy.allocate import Budgets, Kind, Offer
from paceline.engine.policy.costs import (
    FIRST_DRAFTS,
    LOOKUP_GUESS,
    MAX_NODES,
    PASS_GUESS,
    DraftTimes,
    Floats,
    StepTimes,
    size_of,
)
from paceline.engine.policy.evidence import DrafterEvidence
from paceline.engine.policy.guard import Guard
from paceline.engine.policy.interface import DEEPEST, DraftPlan, any_sampled, wish
from paceline.engine.policy.job_values import JobValues
from paceline.engine.policy.priors import CPU, PassPrior
from paceline.engine.policy.survival import Acceptance, bucket

# Over plain decoding, that a plan must promise: less is within the error of the tables. For lookups times the root of
# the number of sequences: of many estimates here and there those are chosen that promise too much.
MARGIN = 0.02
# Planned steps from one plain step to the next, twice as many each time: the measure that drafting is judged by ages.
PLAIN_FIRST, PLAIN_EVERY = 8, 128
SURPRISE = 0.1  # log of the time it was expected to take over what it took: more of it, and more nodes are tried next
FADE_EVERY = 128  # steps after which methods that were not tried are forgotten by half
# Steps of which a CPU learns at once, one more for every so many seen: what they teach by then is little, and behind a
# pass, with cold caches, the lesson of one takes as long as that of several. A device computes meanwhile.
MOST_LESSONS, STEPS_A_LESSON = 8, 16
# Sequences that a method drafts for while hardly tried, and nodes of each: a large batch must not pay for a guess.
TRIAL_ROWS, TRIAL_NODES = 16, 2
SLOPE_NODES = 4  # over which the cost of one more node is taken, at least
# A pause after a look that found nothing: a step for so many rows, then twice that, and on, up to so many or two for
# each row. Short for few on a CPU, where a look takes some 3 % of a step.
LOOK_ROWS, LONGEST_PAUSE = 4, 64
FEW, FEW_PAUSE = 8, 8
NEW_SHARE = 2  # on a device one in so many of the sequences beyond FEW, at least, has to be new to end a pause
PACE_DEPTH = 4  # of a draft: what it promises so far may count as the sequence's pace
# Plain steps that one drafted step may be seen to lose: more says something about the machine. No more than the guard's
# LEAST_LOSS, so that it takes two steps to stop a method.
WORST = -2.0

_choice = cache(DraftPlan)


class _Rows(NamedTuple):
    """What of a batch's sequences never changes: the same come again and again."""

    sequences: list[Sequence]
    keys: list[str]
    sampled: list[bool]
    open: dict[str, list[int]]  # by method: rows whose k is left open
    fixed: dict[str, dict[int, int]]  # by method: the others, and k
    wait_groups: dict[str, list[int]]  # whose answers are waited for together; empty: none has two rows


NO_ROWS = _Rows([], [], [], {}, {}, {})


class _Step(NamedTuple):
    """What is to be planned."""

    rows: _Rows
    remaining: list[int]  # tokens that each may still commit
    times: StepTimes
    base: int  # rows without prompts and without the drafts in question
    other_rows: int  # of prompts
    wait_groups: bool  # answers that are waited for together are told apart from others


@dataclass
class _Plan:
    """What a step was planned by, to learn from what came of it."""

    drafts: bool = False  # of the policy's own choosing
    sequences: int = 0  # newcomers of the step are not among them
    plain_s: float = 0.0  # seconds that it would take without; 0: not known, since a prompt goes on beside it
    times: StepTimes | None = None  # by which it was planned
    explores: bool = False  # more nodes than seem best
    # By sequence that drafts: the evidence for it, and how many nodes may be drafted; 0: as many as there are.
    asked: dict[str, tuple[int, int]] = field(default_factory=dict)
    values: dict[str, float] = field(default_factory=dict)  # as of an offer


class _Lesson(NamedTuple):
    plan: _Plan
    result: StepResult
    timing: StepTiming
    paths: Mapping[int, SequenceOf[int]]  # by output: the accepted nodes of its tree


class AdaptivePolicy:
    """`method` auto, or one method with k left open, or both fixed; what a request asks for outranks it.

    `prior` says how a pass's time grows with its rows where it runs.
    """

    def __init__(
        self, drafters: SequenceOf[Drafter], method: str = NONE, k: int | None = None, prior: PassPrior = CPU
    ) -> None:
        self._method, self._k, self._prior = method, k, prior
        self._on_device = bool(prior.padded_to)  # steps are launched ahead where none drafts
        self._evidence = DrafterEvidence(drafters)
        self._times = [StepTimes(prior), StepTimes(prior)]  # of greedy and of sampled batches
        self._draft_times, self._acceptance = DraftTimes(), Acceptance()
        self._guards: defaultdict[str, Guard] = defaultdict(Guard)  # by method
        self._stopped: set[str] = set()  # methods that their guards have stopped for now
        self._job_values = JobValues()
        self._drafter_of: dict[str, DraftPlan] = {}  # of each sequence's last draft
        self._plan, self.min_node_probability = _Plan(), 0.0
        self._rows = NO_ROWS  # of the last plan
        self._lessons: list[_Lesson] = []  # not learnt yet
        # What follows from the tables, until something is learnt: seconds of steps with nodes, kinds of rows, and the
        # best of some offers, which are often those of a step before.
        self._seconds: dict[Hashable, Floats] = {}
        self._kinds: dict[Hashable, Kind] = {}
        self._found: dict[Hashable, Budgets] = {}
        self._urgent = False  # a lesson is among the first of its method, so the next draft depends on it
        self._steps = 0
        # Passes that are replayed take what they took before: one check is enough at first.
        self._since_plain, self._plain_due = 0, PLAIN_EVERY if self._on_device else PLAIN_FIRST
        self._explores = self._drafted = False  # the next plan tries more nodes than seem best; one drafted lately
        self._checks = False  # the plain step under way is for its time: on a device one launched ahead is timed
        self._pause, self._pause_left = 1, 0  # between looks: the next, and what is left of the one under way
        self._looked_at: set[str] = set()  # sequences
        self._in_vain: dict[str, int] = {}  # by method: the most evidence that did not make a draft worth its cost
        self._looked_size = 0  # of the batch, when it was last looked at
        self._runs_ahead = False
        self.expected_gain: float | None = None  # over plain decoding, when drafting was last considered

    # -- deciding

    def plan(self, sequences: SequenceOf[Sequence], other_rows: int, others_wait: bool) -> list[DraftPlan]:
        self._plan, self.min_node_probability = _Plan(), 0.0
        choices = [_choice(NONE, 0)] * len(sequences)
        if not self._evidence.drafters:
            return choices
        rows = self._rows if self._rows.sequences == sequences else self._of(sequences)
        remaining = [sequence.max_len - len(sequence.tokens) for sequence in sequences]
        for method, ks in rows.fixed.items():
            self._choose_surest(method, rows, {at: k for at, k in ks.items() if remaining[at] > 1}, remaining, choices)
        asking = rows.open
        if remaining and min(remaining) <= 1:
            asking = {method: [at for at in those if remaining[at] > 1] for method, those in asking.items()}
            asking = {method: those for method, those in asking.items() if those}
        if asking:
            base, times = len(sequences), self._times[True in rows.sampled]
            if rows.fixed:
                base += sum([choice.max_nodes for choice in choices])
            if self._urgent or (len(self._lessons) > 1 and not times.plain_known(base)):
                self._learn()
            if not self._check_due(times, base) and not self._pauses(sequences):
                self._choose(_Step(rows, remaining, times, base, other_rows, not others_wait), asking, choices)
        return choices

    def _of(self, sequences: SequenceOf[Sequence]) -> _Rows:
        keys, sampled = [sequence.key for sequence in sequences], [sequence.sampled for sequence in sequences]
        self._rows = rows = _Rows(list(sequences), keys, sampled, {}, {}, {})
        for at, sequence in enumerate(sequences):
            method, k = wish(sequence, self._method, self._k)
            if k is not None and method != NONE:
                rows.fixed.setdefault(method, {})[at] = k
            elif method != NONE:
                rows.open.setdefault(method, []).append(at)
            rows.wait_groups.setdefault(sequence.wait_group, []).append(at)
        if len(rows.wait_groups) == len(keys):
            rows.wait_groups.clear()
        return rows

    def _choose_surest(
        self, method: str, rows: _Rows, ks: Mapping[int, int], remaining: list[int], choices: list[DraftPlan]
    ) -> None:
        """With k fixed only the method is left to choose: the one with the most evidence."""
        for name in self._evidence.allowed(method):
            found = self._evidence.of([rows.sequences[at] for at in ks], name)
            for (at, k), level in zip(ks.items(), found, strict=True):
                if level > self._plan.asked.get(rows.keys[at], (0, 0))[0]:
                    self._plan.asked[rows.keys[at]] = level, 0
                    choices[at] = _choice(name, min(k, self._evidence.most_nodes(name, remaining[at])))

    def _check_due(self, times: StepTimes, base: int) -> bool:
        """The step is to be plain so that its time is known."""
        self._since_plain += 1
        due = self._since_plain >= self._plain_due
        if due:
            self._plain_due, self._explores = min(2 * self._plain_due, PLAIN_EVERY), True
        self._checks = due or not times.plain_known(base)
        if self._checks:
            self._since_plain = 0
        return self._checks

    def _pauses(self, sequences: SequenceOf[Sequence]) -> bool:
        """The next step is to be plain, since drafts lost or nothing was found lately; counts it.

        A new sequence is looked at; on a device once they are a share of the batch, since with many there is a new one
        in every few steps, and none of these could be launched ahead. So is a batch that has shrunk: what did not pay
        for many may pay for fewer. For few sequences on a CPU a lookup that has found more ends a pause too.
        """
        self._stopped = {method for method, guard in self._guards.items() if guard.pauses(len(sequences))}
        if self._stopped.issuperset(self._evidence.allowed(self._method) or self._evidence.drafters):
            return True
        if self._pause_left <= 0 or size_of(len(sequences)) < self._looked_size:
            return False
        few = max((len(sequences) - FEW) // NEW_SHARE, 1) if self._on_device else 1
        if len({one.key for one in sequences} - self._looked_at) >= few:
            return False
        if len(sequences) <= FEW and not self._on_device and self._finds_more(sequences):
            return False
        self._pause_left -= 1
        return True

    def _finds_more(self, sequences: SequenceOf[Sequence]) -> bool:
        """Some lookup has more evidence for a draft of one of these than what was in vain lately."""
        return any(
            bucket(max(self._evidence.of(sequences, method))) > self._in_vain.get(method, 0)
            for method in self._evidence.allowed(self._method)
            if not self._evidence.runs_model(method) and method not in self._stopped
        )

    def _choose(self, step: _Step, asking: Mapping[str, list[int]], choices: list[DraftPlan]) -> None:
        number, times = len(step.remaining), step.times
        plain_s = times.seconds(step.base)
        offers = {asked: self._offers(step, rows, asked) for asked, rows in asking.items()}
        considered = [offer for each in offers.values() for offer in each]
        with_nodes = self._with_nodes(step, considered)
        chosen, found = list[Offer](), budgets.NOTHING
        for each in offers.values():
            best, found = self._best(step, with_nodes, each)
            chosen += best
        if len(offers) > 1:  # rows that ask for different methods share the pass
            found = budgets.best(number, with_nodes, chosen)
        self._looked_at.update(step.rows.keys)
        self._looked_size = size_of(number)
        gain = found.rate * plain_s / number
        self.expected_gain = gain or None
        models = any(self._evidence.runs_model(offer.method) for offer in chosen)
        if gain > 1 + MARGIN * (1.0 if models else math.sqrt(number)):
            self._pause, self._pause_left, self._in_vain = self._pause // 2, 0, {}
            self._plan.times, self._plan.sequences = times, number
            self._plan.plain_s = 0.0 if step.other_rows else plain_s
            self._plan.explores, self._explores = self._explores, False
            if self._plan.explores:
                found = budgets.best(number, with_nodes, chosen, explore=True)
            elif step.base == number:  # no row has its k fixed
                self.min_node_probability = found.rate * _slope(with_nodes, round(found.drafted))
            self._give(step.rows.keys, chosen, found, choices)
        elif not self._evidence.awaits(step.rows.sequences):
            self._pause_left = max(self._pause, number // LOOK_ROWS, 1)
            most = max(LONGEST_PAUSE, 2 * number) if number > FEW or self._on_device else FEW_PAUSE
            self._pause = min(2 * self._pause_left, most)
            for offer in considered:
                in_vain = bucket(max(offer.level)), self._in_vain.get(offer.method, 0)
                self._in_vain[offer.method] = max(in_vain)

    def _best(self, step: _Step, with_nodes: Floats, offers: list[Offer]) -> tuple[list[Offer], Budgets]:
        """The offers to take, and how many nodes of each."""
        best, found = list[Offer](), budgets.NOTHING
        for plan in (budgets.mixed(offers), *([offer] for offer in offers)):
            key = (step.times, step.base, step.other_rows, len(step.remaining), *[offer.key for offer in plan])
            better = self._found.get(key)
            if better is None:
                better = budgets.best(len(step.remaining), with_nodes, plan, beat=found.rate)
                if better.rate and None not in key:
                    self._found[key] = better
            if better.rate > found.rate:
                best, found = plan, better
        return best, found

    def _with_nodes(self, step: _Step, offers: list[Offer]) -> Floats:
        """Seconds of the step with 1, 2, ... nodes, as many as all these could have, at least."""
        nodes = sum([kind.rows * len(kind.worth) for offer in offers for kind in offer.kinds])
        nodes = min(1 << max(nodes, SLOPE_NODES).bit_length(), MAX_NODES)
        key = step.times, step.base, step.other_rows, nodes
        if key not in self._seconds:
            self._seconds[key] = self._seconds_with(step, nodes)
        return self._seconds[key]

    @staticmethod
    def _seconds_with(step: _Step, nodes: int) -> Floats:
        seconds = step.times.seconds_with(step.base + step.other_rows, nodes)
        if step.other_rows:
            # Prompts beside them are read whatever is drafted, so their time does not count, only that of more nodes.
            # Between plain and drafted steps the tables differ by more, with many rows, than a plain step takes.
            seconds += step.times.seconds_with(step.base, 1) - seconds[0]
        return seconds

    def _give(self, keys: list[str], offers: list[Offer], found: Budgets, choices: list[DraftPlan]) -> None:
        self._plan.drafts = True
        for offer, nodes in zip(offers, budgets.by_row(offers, found), strict=True):
            self._plan.values.update(offer.values)
            left, most = len(offer.rows), MAX_K
            if left > TRIAL_ROWS and not self._acceptance.is_tried(offer.method):
                left, most = TRIAL_ROWS, TRIAL_NODES
            for at, level, budget in zip(offer.rows, offer.level, nodes, strict=True):
                if budget and left:
                    left -= 1
                    budget = min(budget, most)
                    choices[at] = self._drafter_of[keys[at]] = _choice(offer.method, budget)
                    # On a device trees are not cut, and one begun before it was planned has as many nodes as the last.
                    self._plan.asked[keys[at]] = level, 0 if self._on_device else budget

    def _offers(self, step: _Step, rows: list[int], asked: str) -> list[Offer]:
        made = [self._offer(step, rows, method) for method in self._evidence.allowed(asked)]
        return [offer for offer in made if offer is not None]

    def _offer(self, step: _Step, rows: list[int], method: str) -> Offer | None:
        if method in self._stopped:
            return None
        every = len(rows) == len(step.remaining)
        found = self._evidence.of(step.rows.sequences if every else [step.rows.sequences[at] for at in rows], method)
        if not all(found):
            rows, found = list(compress(rows, found)), [some for some in found if some]
        if not rows:
            return None
        tree, models = self._evidence.makes_trees(method), self._evidence.runs_model(method)
        values: dict[str, float] = {}
        if step.wait_groups and not models and step.rows.wait_groups:  # a model's drafts are as long for all
            by_row = dict(zip(rows, found, strict=True))

            def promised(at: int) -> float:
                return self._promised(method, step.rows.sampled[at], by_row.get(at, 0))

            values = self._job_values.of(step.rows.keys, step.remaining, step.rows.wait_groups, promised)
        guess_s = step.times.seconds(1)
        a, b = self._draft_times.line(method, len(rows), guess_s * (PASS_GUESS if models else LOOKUP_GUESS))
        if not models:
            a += self._leaving_s([step.rows.keys[at] for at in rows], guess_s * PASS_GUESS)
        # Rows of a kind have all of this in common: sampled or not, evidence, the most nodes, what a token is worth.
        remaining, sampled, width = step.remaining, step.rows.sampled, MAX_K if tree else DEEPEST
        beyond = min(self._evidence.depth(method), width)  # with more room than that any number of nodes fits
        alike = [
            (sampled[at], bucket(level), MAX_K if remaining[at] > beyond else remaining[at] - 1)
            for at, level in zip(rows, found, strict=True)
        ]
        valued = [values[step.rows.keys[at]] for at in rows] if values else [1.0] * len(rows)
        of_rows = list(zip(alike, valued, strict=True))
        place = {one: at for at, one in enumerate(dict.fromkeys(of_rows))}
        kind_of = [place[one] for one in of_rows]
        kinds = [self._kind(method, tree, *one, kind_of.count(at)) for one, at in place.items()]
        # A tree's time does not grow with its nodes: its depth counts as one.
        line = (a + b, 0.0) if tree else (a, b)
        key = None if values else (method, line, *place, *rows, *kind_of)
        return Offer(method, rows, found, kind_of, kinds, line, values, key)

    def _kind(self, method: str, tree: bool, alike: tuple[bool, int, int], value: float, rows: int) -> Kind:
        key = method, alike, value, rows
        if key in self._kinds:
            return self._kinds[key]
        sampled, level, most = alike
        worth, shares, promised = self._acceptance.outlook(method, sampled, level, tree=tree)
        if value != 1.0:
            worth, promised = value * worth, value * promised
        if most < len(worth):
            worth, shares = worth[:most], None if shares is None else shares[:most]
            promised = worth.sum().item()
        self._kinds[key] = Kind(worth, shares, promised, rows)
        return self._kinds[key]

    def _leaving_s(self, keys: SequenceOf[str], guess_s: float) -> float:
        """Seconds that a lookup costs besides, where a model has drafted so far: the model has to catch up before it
        drafts again, and on a device the draft it began behind the last step is lost."""
        drafted: dict[str, int] = {}  # by model: the most nodes
        for key in keys:
            last = self._drafter_of.get(key)
            if last is not None and last.max_nodes > drafted.get(last.method, 0):
                drafted[last.method] = last.max_nodes
        seconds = 0.0
        for method, budget in drafted.items():
            if self._evidence.runs_model(method):
                a, b = self._draft_times.line(method, len(keys), guess_s)
                chain = self._on_device and not self._evidence.makes_trees(method)
                seconds = max(seconds, a + b * (budget if chain else 1))
        return seconds

    def _promised(self, method: str, sampled: bool, level: int) -> float:
        """Tokens of a draft's first few that may be accepted."""
        if not level:
            return 0.0
        return float(self._acceptance.survival(method, sampled, level)[:PACE_DEPTH].sum())

    def next_is_plain(self, sequences: SequenceOf[Sequence]) -> bool:
        if not self._evidence.drafters:
            return True
        wishes = {wish(sequence, self._method, self._k) for sequence in sequences}
        ks = {k for method, k in wishes if method != NONE}
        if not ks:
            return True
        if self._plan.drafts or ks != {None}:
            return False
        if self._checks:
            self._checks = False
            return True
        return self._pauses(sequences)

    def may_repeat(self) -> bool:
        return self._method == NONE or self._k is not None or self._since_plain + 1 < self._plain_due

    # -- learning

    def observe(self, result: StepResult, timing: StepTiming) -> None:
        if not self._evidence.drafters:
            return
        if timing.retired != self._evidence.retired:
            self._evidence.retire(timing.retired)
        paths = {}
        for at, (method, _, accepted, _) in result.drafts.items():
            self._urgent |= not self._acceptance.is_tried(method)
            if method in self._evidence.drafters and self._evidence.makes_trees(method):
                paths[at] = range(accepted) if result.paths is None else result.paths(at)
        self._lessons.append(_Lesson(self._plan, result, timing, paths))
        self._plan = _Plan()  # a step launched ahead has no plan

    def learn(self) -> None:
        enough = 1 if self._on_device else min(1 + self._steps // STEPS_A_LESSON, MOST_LESSONS)
        if len(self._lessons) >= enough:
            self._learn()

    def _learn(self) -> None:
        """From all steps seen; what followed from the tables before is worked out anew when it is asked for."""
        if self._lessons:
            for lesson in self._lessons:
                self._learn_from(lesson)
            self._lessons, self._urgent = [], False
            self._changed()

    def _changed(self) -> None:
        self._seconds.clear()
        self._kinds.clear()
        self._found.clear()

    def _learn_from(self, lesson: _Lesson) -> None:
        plan, result, timing, paths = lesson
        self._steps += 1
        self._drafted |= plan.drafts
        if self._steps % FADE_EVERY == 0:
            self._acceptance.fade()
            if not self._drafted:
                self._draft_times.fade()
                for times in self._times:
                    times.fade()
            self._drafted = False
        drafted: dict[str, int] = {}  # method -> sequences
        if timing.rows > timing.num_sequences:
            for method, *_ in result.drafts.values():
                drafted[method] = drafted.get(method, 0) + 1
        if result.sequences:
            self._learn_times(plan, result, timing, drafted)
        for at, (method, nodes, accepted, depth) in result.drafts.items():
            sequence = result.sequences[at]
            level, asked = plan.asked.get(sequence.key, (1, 0))
            if at in paths:
                self._acceptance.note_tree(method, sequence.sampled, level, asked, nodes, paths[at])
            else:
                self._acceptance.note(method, sequence.sampled, level, depth, accepted)
        if drafted:
            self._job_values.note(result.sequences, result.tokens)
        for at in result.ended:
            self.forget(result.sequences[at])
        if result.drafts:
            self._acceptance.end_step()

    def _learn_times(self, plan: _Plan, result: StepResult, timing: StepTiming, drafted: Mapping[str, int]) -> None:
        times = self._times[any_sampled(result.sequences)]
        for method, (depth, seconds) in timing.draft_s.items():
            if method in self._evidence.drafters:
                skip = FIRST_DRAFTS if self._evidence.runs_model(method) else 0
                self._draft_times.observe(method, drafted.get(method, 1), depth, seconds, skip=skip)
        self._runs_ahead |= timing.ahead
        # A drafter that had to catch up is not timed, and its step is no measure of such steps.
        if not timing.time_is_typical or not drafted.keys() <= timing.draft_s.keys():
            return
        nodes = sum([draft[1] for draft in result.drafts.values()])
        if plan.drafts and plan.plain_s:
            self._judge(plan, result, timing, drafted, nodes)
        # One that reads prompts is none either: on a machine unlike the prior it would pass for a slow plain step.
        whole = len(result) == timing.num_sequences and timing.rows <= timing.num_sequences + nodes
        taken = timing.step_s - sum([seconds for _, seconds in timing.draft_s.values()])
        if not whole or taken <= 0:
            return
        slower = times.settle(timing.rows, taken, drafted=plan.drafts)
        if slower is not None:
            self._draft_times.slow_down(slower)
            for table in self._times:
                table.slow_down(slower)
            return
        # Where plain steps are launched ahead, one that was not takes longer than they do.
        if plan.drafts or timing.ahead or not self._runs_ahead or not times.plain_known(timing.rows):
            off = times.observe(timing.rows, taken, drafted=plan.drafts)  # drafts with k fixed belong to any plan
            self._explores |= plan.explores and off < -SURPRISE

    def _judge(
        self, plan: _Plan, result: StepResult, timing: StepTiming, drafted: Mapping[str, int], nodes: int
    ) -> None:
        """Tell the guards what a drafted step brought. Newcomers' prompts beside it are left out, by the time of their
        rows; where that is more than a plain step takes, the step says nothing."""
        times, beside_s = plan.times, 0.0
        if timing.rows > timing.num_sequences + nodes and times is not None:
            beside_s = max(times.seconds(timing.rows - nodes) - times.seconds(timing.num_sequences), 0.0)
            if beside_s > plan.plain_s:
                return
        more = [plan.values.get(result.sequences[at].key, 1.0) * (len(result.tokens[at]) - 1) for at in result.drafts]
        saved = 1 + sum(more) / plan.sequences - (timing.step_s - beside_s) / plan.plain_s
        for method in drafted:
            self._guards[method].note(plan.sequences, max(saved, WORST))

    def plain_seconds(self, num_sequences: int, sampled: bool) -> float | None:
        times = self._times[sampled]
        return None if times.scale is None else times.seconds(num_sequences)

    def forget(self, sequence: Sequence) -> None:
        self._rows = NO_ROWS
        self._job_values.forget(sequence)
        self._drafter_of.pop(sequence.key, None)
        self._looked_at.discard(sequence.key)

    def relearn(self, method: str) -> None:
        """How often the method's drafts are accepted has changed: measure it again, and without a pause."""
        self._learn()
        self._acceptance.forget(method)
        self._guards.pop(method, None)
        self._changed()
        self._pause, self._pause_left = 1, 0

    # -- between runs

    def state(self) -> dict[str, Any]:
        self._learn()
        tables = {"drafts": self._draft_times.state(), "acceptance": self._acceptance.state()}
        return {"steps": [times.state() for times in self._times], **tables}

    def load(self, state: Mapping[str, Any]) -> None:
        """Raises KeyError, TypeError or ValueError on a state of another form, and is then as before."""
        greedy, sampled = (StepTimes.of_state(one, self._prior) for one in state["steps"])
        draft_times, acceptance = DraftTimes.of_state(state["drafts"]), Acceptance.of_state(state["acceptance"])
        self._times, self._draft_times, self._acceptance = [greedy, sampled], draft_times, acceptance
        self._guards.clear()
        self._lessons, self._urgent = [], False
        self._changed()


def _slope(with_nodes: Floats, nodes: int) -> float:
    """Seconds of one more node, over so many nodes and at least the first few: neighbours alone are within noise."""
    last = min(max(nodes, SLOPE_NODES), len(with_nodes)) - 1
    return float(with_nodes[last] - with_nodes[0]) / max(last, 1)
