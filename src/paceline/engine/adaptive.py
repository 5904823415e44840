"""Which method drafts for each sequence, and how many nodes, decided anew each step by one formula.

The plan makes (rows + sum of survival over chosen nodes) / (step seconds(rows + nodes) + draft seconds) largest: nodes
of all rows in order of survival, taken while that ratio rises; none at all is always a candidate. Survival is learnt in
`acceptance`, seconds in `cost`; `guard` watches that drafted steps bring what was expected of them. Everything used
here is committed history and timings, never the draft at hand: that would bias the output.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from paceline.config import MAX_K
from paceline.drafters import NONE, Drafter
from paceline.engine.acceptance import Acceptance, bucket
from paceline.engine.cost import FIRST_DRAFTS, LOOKUP_GUESS, PASS_GUESS, DraftTimes, Floats, StepTimes, size_of
from paceline.engine.evidence import DrafterEvidence
from paceline.engine.guard import Guard
from paceline.engine.policy import Choice, StepReport, any_sampled, wish
from paceline.models.pass_prior import CPU, PassPrior
from paceline.sequence import Sequence

# Over plain decoding, that a plan must promise: less is within the error of the tables. For lookups times the root of
# the number of sequences: of many estimates here and there those are chosen that promise too much.
MARGIN = 0.02
LEAST = 0.005  # survival below which a node is not worth a row anywhere
MAX_NODES = 1024  # of one step: passes beyond are as dear as they are long
# Planned steps from one plain step to the next, twice as many each time: the measure that drafting is judged by ages.
PLAIN_FIRST, PLAIN_EVERY = 8, 128
RISK = 0.05  # of a step's rate that the plan after a plain step may stake on learning what more nodes cost
SURPRISE = 0.1  # log of the time it was expected to take over what it took: more of it, and more nodes are tried next
FADE_EVERY = 128  # steps after which methods that were not tried are forgotten by half
# Sequences that a method drafts for while hardly tried, and nodes of each: a large batch must not pay for a guess.
TRIAL_ROWS, TRIAL_NODES = 16, 2
SLOPE_NODES = 4  # over which the cost of one more node is taken, at least
# A pause after a look that found nothing: a step for so many rows, then twice that, and on. Short for few on a CPU,
# where a look takes some 3 % of a step.
LOOK_ROWS, LONGEST_PAUSE = 4, 64
FEW, FEW_PAUSE = 8, 8
NEW_SHARE = 8  # one in so many sequences, at least, has to be new to end a pause
BELIEF = 0.7  # in what a token is worth to a job, against every token being worth the same: the last row is a guess
FORESIGHT, PACE_DEPTH = 0.3, 4  # share of a draft's promise, so deep, that counts as the sequence's pace already
PACE_RATE = 0.1  # weight of the newest step in a sequence's tokens per step
WORST = -2.0  # plain steps that one drafted step may be seen to lose: more says something about the machine

NOTHING: tuple[float, list[int], float] = 0.0, [], 0.0  # the best of no offers

_choice = cache(Choice)


class _Open(NamedTuple):
    """A row whose k is left open."""

    sequence: Sequence
    at: int  # in the batch
    method: str  # that it asks for, or auto
    most: int  # nodes that it asks for


class _Offer(NamedTuple):
    """Drafts that one method could make for some rows."""

    method: str
    rows: list[_Open]
    evidence: list[int]
    worth: Floats  # (rows, nodes) of their nodes in tokens; 0 beyond what a row may have
    shares: Floats | None  # (rows, nodes) of drafts in which a node is a row of the pass; None: 1 each
    line: tuple[float, float]  # seconds of such a draft: a + b depth
    at_once: bool  # trees, whose time does not grow with their nodes: their depth counts as one
    values: dict[str, float]  # of a token, by sequence of the batch; empty: 1 each


class _Step(NamedTuple):
    """What is to be planned."""

    sequences: SequenceOf[Sequence]
    times: StepTimes
    base: int  # rows without prompts and without the drafts in question
    other_rows: int  # of prompts
    jobs: bool  # answers that are waited for together are told apart from others


@dataclass
class _Plan:
    """What a step was planned by, to learn from what came of it."""

    drafts: bool = False  # of the policy's own choosing
    plain_s: float = 0.0  # seconds that it would take without; 0: not known, since prompts are read beside it
    explores: bool = False  # more nodes than seem best
    evidence: dict[str, int] = field(default_factory=dict)  # by sequence that drafts
    asked: dict[str, int] = field(default_factory=dict)  # nodes at the most, by sequence that drafts
    values: dict[str, float] = field(default_factory=dict)  # as of an offer


class AdaptivePolicy:
    """`method` auto, or one method with k left open, or both fixed; what a request asks for outranks it.

    `prior` says how a pass's time grows with its rows where it runs.
    """

    def __init__(
        self, drafters: SequenceOf[Drafter], method: str = NONE, k: int | None = None, prior: PassPrior = CPU
    ) -> None:
        self._method, self._k, self._prior = method, k, prior
        self._on_device = bool(prior.padded_to)  # steps are launched ahead where none drafts
        self._evidence = DrafterEvidence(drafters, method)
        self._times = [StepTimes(prior), StepTimes(prior)]  # of greedy and of sampled batches
        self._draft_times, self._acceptance = DraftTimes(), Acceptance()
        self._guards: defaultdict[str, Guard] = defaultdict(Guard)  # by method
        self._stopped: set[str] = set()  # methods that their guards have stopped for now
        self._pace: dict[str, float] = {}  # tokens per step that drafts, by sequence
        self._drafter_of: dict[str, tuple[str, int]] = {}  # method and nodes of each sequence's last draft
        self._plan, self.least = _Plan(), 0.0
        self._lesson: tuple[_Plan, StepReport] | None = None  # not learnt yet
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

    def plan(self, sequences: SequenceOf[Sequence], other_rows: int, others_wait: bool) -> list[Choice]:
        self._plan, self.least = _Plan(), 0.0
        choices = [_choice(NONE, 0)] * len(sequences)
        if not self._evidence.drafters:
            return choices
        open_rows: list[_Open] = []
        fixed: dict[str, list[_Open]] = {}
        for at, sequence in enumerate(sequences):
            method, k = wish(sequence, self._method, self._k)
            row = _Open(sequence, at, method, k or MAX_K)
            if method != NONE and sequence.room > 1:
                (open_rows if k is None else fixed.setdefault(method, [])).append(row)
        for method, rows in fixed.items():
            self._choose_surest(method, rows, choices)
        if open_rows:
            drafted = {method for method, *_ in self._lesson[1].outputs.drafts.values()} if self._lesson else ()
            if not all(map(self._acceptance.is_tried, drafted)):
                self.meanwhile()  # a lesson waits for the next pass, unless the next draft depends on the first ones
            base, times = len(sequences) + sum(choice.budget for choice in choices), self._times[any_sampled(sequences)]
            if not self._check_due(times, base) and not self._pauses(sequences):
                self._choose(_Step(sequences, times, base, other_rows, not others_wait), open_rows, choices)
        return choices

    def _choose_surest(self, method: str, rows: list[_Open], choices: list[Choice]) -> None:
        """With k fixed only the method is left to choose: the one with the most evidence."""
        for name in self._evidence.allowed(method):
            for row, evidence in zip(rows, self._evidence.of([row.sequence for row in rows], name), strict=True):
                if evidence > self._plan.evidence.get(row.sequence.key, 0):
                    self._plan.evidence[row.sequence.key] = evidence
                    choices[row.at] = _choice(name, self._most(row, name))

    def _most(self, row: _Open, method: str) -> int:
        return min(row.most, self._evidence.most_nodes(method, row.sequence.room))

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
        shrank = size_of(len(sequences)) < self._looked_size
        new = sum(one.key not in self._looked_at for one in sequences)
        few = max(len(sequences) // NEW_SHARE, 1) if self._on_device else 1
        if self._pause_left <= 0 or shrank or new >= few:
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

    def _choose(self, step: _Step, open_rows: list[_Open], choices: list[Choice]) -> None:
        number, rows, times = len(step.sequences), step.base + step.other_rows, step.times
        plain_s = times.seconds(step.base)
        most = min(len(open_rows) * MAX_K, MAX_NODES)
        # Prompts beside them are read whatever is drafted, so their time does not count, only that of more nodes.
        # Between plain and drafted steps the tables differ by more, with many rows, than a plain step takes.
        with_nodes = times.seconds_with(rows, most)
        with_nodes += times.seconds_with(step.base, 1) - with_nodes[0]
        chosen, considered = list[_Offer](), list[_Offer]()
        wishes = dict.fromkeys(row.method for row in open_rows)
        for asked in wishes:
            asking, best_rate = [row for row in open_rows if row.method == asked], 0.0
            made = [self._offer(step, asking, method) for method in self._evidence.allowed(asked)]
            offers = [offer for offer in made if offer is not None]
            considered += offers
            for plan in [*([offer] for offer in offers), _mixed(offers)]:
                rate, nodes, rows_more = _best(number, with_nodes, plan) if plan else NOTHING
                if rate > best_rate:
                    best, best_rate, budgets, drafted = plan, rate, nodes, rows_more
            if best_rate:
                chosen += best
        if len(wishes) > 1:  # rows that ask for different methods share the pass
            best_rate, budgets, drafted = _best(number, with_nodes, chosen) if chosen else NOTHING
        self._looked_at.update(sequence.key for sequence in step.sequences)
        self._looked_size = size_of(number)
        gain = best_rate * plain_s / number
        self.expected_gain = gain or None
        models = any(self._evidence.runs_model(offer.method) for offer in chosen)
        if gain > 1 + MARGIN * (1.0 if models else math.sqrt(number)):
            self._pause, self._pause_left, self._in_vain = self._pause // 2, 0, {}
            self._plan.plain_s = 0.0 if step.other_rows else plain_s
            self._plan.explores, self._explores = self._explores, False
            if self._plan.explores:
                _, budgets, _ = _best(number, with_nodes, chosen, explore=True)
            elif step.base == number:  # no row has its k fixed
                self.least = best_rate * _slope(with_nodes, round(drafted))
            self._give(chosen, budgets, choices)
        elif not self._evidence.awaits(step.sequences):
            self._pause_left = max(self._pause, number // LOOK_ROWS, 1)
            most = LONGEST_PAUSE if number > FEW or self._on_device else FEW_PAUSE
            self._pause = min(2 * self._pause_left, most)
            for offer in considered:
                in_vain = bucket(max(offer.evidence)), self._in_vain.get(offer.method, 0)
                self._in_vain[offer.method] = max(in_vain)

    def _give(self, offers: list[_Offer], budgets: list[int], choices: list[Choice]) -> None:
        self._plan.drafts = True
        given = iter(budgets)
        for offer in offers:
            self._plan.values.update(offer.values)
            left, most = len(offer.rows), MAX_K
            if left > TRIAL_ROWS and not self._acceptance.is_tried(offer.method):
                left, most = TRIAL_ROWS, TRIAL_NODES
            for row, evidence in zip(offer.rows, offer.evidence, strict=True):
                budget = min(next(given), most)
                if budget and left:
                    left -= 1
                    choices[row.at] = _choice(offer.method, budget)
                    self._drafter_of[row.sequence.key] = offer.method, budget
                    self._plan.evidence[row.sequence.key] = evidence
                    self._plan.asked[row.sequence.key] = budget

    def _offer(self, step: _Step, rows: list[_Open], method: str) -> _Offer | None:
        if method in self._stopped:
            return None
        found = self._evidence.of([row.sequence for row in rows], method)
        rows, found = [row for row, some in zip(rows, found, strict=True) if some], [some for some in found if some]
        if not rows:
            return None
        alike = [(row.sequence.sampled, evidence) for row, evidence in zip(rows, found, strict=True)]
        tree = self._evidence.makes_trees(method)
        survival = {one: self._acceptance.survival(method, *one, tree=tree) for one in set(alike)}
        worth, values = np.array([survival[one] for one in alike]), dict[str, float]()
        models = self._evidence.runs_model(method)
        if step.jobs and not models:  # a model's drafts are as long for all
            promised = worth[:, :PACE_DEPTH].sum(axis=1).tolist()
            values = self._values(step.sequences, dict(zip([row.sequence.key for row in rows], promised, strict=True)))
        shares = None
        if tree:
            drafted = {one: self._acceptance.shares(method, *one) for one in survival}
            shares = np.array([drafted[one] for one in alike])
        if values:
            worth *= np.array([[values[row.sequence.key]] for row in rows])
        most = [self._most(row, method) for row in rows]
        if min(most) < worth.shape[1]:
            worth[np.array(most)[:, None] <= np.arange(worth.shape[1])] = 0.0
        guess_s = (PASS_GUESS if models else LOOKUP_GUESS) * step.times.seconds(1)
        a, b = self._draft_times.line(method, len(rows), guess_s)
        line = (a if models else a + self._leaving_s(rows, PASS_GUESS * step.times.seconds(1))), b
        return _Offer(method, rows, found, worth, shares, line, tree, values)

    def _leaving_s(self, rows: list[_Open], guess_s: float) -> float:
        """Seconds that a lookup costs besides, where a model has drafted so far: the model has to catch up before it
        drafts again, and on a device the draft it began behind the last step is lost."""
        seconds = 0.0
        for method, budget in {
            self._drafter_of[row.sequence.key] for row in rows if row.sequence.key in self._drafter_of
        }:
            if method not in self._evidence.drafters or not self._evidence.runs_model(method):
                continue
            a, b = self._draft_times.line(method, len(rows), guess_s)
            chain = self._on_device and not self._evidence.makes_trees(method)
            seconds = max(seconds, a + b * (budget if chain else 1))
        return seconds

    def _values(self, sequences: SequenceOf[Sequence], promised: Mapping[str, float]) -> dict[str, float]:
        """What a token of each sequence is worth: one that will end long before the others of its job saves little.

        How likely a sequence is to be the last grows with the square of the steps it still needs. `promised`: tokens
        that a draft may bring it in this step.
        """
        jobs: dict[str, list[Sequence]] = {}
        for sequence in sequences:
            jobs.setdefault(sequence.job, []).append(sequence)
        if len(jobs) == len(sequences):
            return {}
        values: dict[str, float] = {}
        for members in jobs.values():
            pace = [self._pace.get(one.key, 1.0) + FORESIGHT * promised.get(one.key, 0.0) for one in members]
            squares = [(one.room / each) ** 2 for one, each in zip(members, pace, strict=True)]
            scale = BELIEF * len(members) / max(sum(squares), 1e-9)
            values.update((one.key, 1 - BELIEF + scale * square) for one, square in zip(members, squares, strict=True))
        return values

    def rests(self, sequences: SequenceOf[Sequence]) -> bool:
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

    def drafts_on(self) -> bool:
        return self._method == NONE or self._k is not None or self._since_plain + 1 < self._plain_due

    # -- learning

    def observe(self, report: StepReport) -> None:
        self.meanwhile()
        if report.retired != self._evidence.retired:
            self._evidence.retire(report.retired)
        self._lesson, self._plan = (self._plan, report), _Plan()  # a step launched ahead has no plan

    def meanwhile(self) -> None:
        lesson, self._lesson = self._lesson, None
        if lesson is None:
            return
        plan, report = lesson
        self._steps += 1
        self._drafted |= plan.drafts
        if self._steps % FADE_EVERY == 0:
            self._acceptance.fade()
            if not self._drafted:
                self._draft_times.fade()
                for times in self._times:
                    times.fade()
            self._drafted = False
        drafted: Mapping[str, int] = {}  # method -> sequences
        if report.rows > report.num_sequences:
            drafted = Counter(method for method, *_ in report.outputs.drafts.values())
        outputs = report.outputs
        if outputs.sequences:
            self._learn_times(plan, report, drafted)
        for at, (method, nodes, accepted, depth) in outputs.drafts.items():
            sequence = outputs.sequences[at]
            known = method, sequence.sampled, plan.evidence.get(sequence.key, 1)
            if method in self._evidence.drafters and self._evidence.makes_trees(method):
                path = range(accepted) if outputs.paths is None else outputs.paths(at)
                self._acceptance.note_tree(*known, plan.asked.get(sequence.key, nodes), nodes, path)
            else:
                self._acceptance.note(*known, depth, accepted)
        for sequence, tokens in zip(outputs.sequences, outputs.tokens, strict=True) if drafted else ():
            pace = self._pace.get(sequence.key, 1.0)  # in other steps all have the same
            self._pace[sequence.key] = pace + PACE_RATE * (len(tokens) - pace)
        for at in outputs.ended:
            self.forget(outputs.sequences[at])
        self._acceptance.end_step(drafted.keys())

    def _learn_times(self, plan: _Plan, report: StepReport, drafted: Mapping[str, int]) -> None:
        outputs = report.outputs
        times = self._times[any_sampled(outputs.sequences)]
        for method, (depth, seconds) in report.draft_s.items():
            if method in self._evidence.drafters:
                skip = FIRST_DRAFTS if self._evidence.runs_model(method) else 0
                self._draft_times.observe(method, drafted.get(method, 1), depth, seconds, skip=skip)
        self._runs_ahead |= report.ahead
        # A drafter that had to catch up is not timed, and its step is no measure of such steps.
        whole = len(outputs) == report.num_sequences and drafted.keys() <= report.draft_s.keys()
        # One that reads prompts is none either: on a machine unlike the prior it would pass for a slow plain step.
        whole &= report.rows <= report.num_sequences + sum(nodes for _, nodes, *_ in outputs.drafts.values())
        taken = report.step_s - sum(seconds for _, seconds in report.draft_s.values())
        if not (report.warm and whole and taken > 0):
            return
        if plan.drafts and plan.plain_s:
            worth = [plan.values.get(sequence.key, 1.0) for sequence in outputs.sequences]
            tokens = sum(len(each) * value for each, value in zip(outputs.tokens, worth, strict=True))
            saved = tokens / report.num_sequences - report.step_s / plan.plain_s
            for method in drafted:
                self._guards[method].note(report.num_sequences, max(saved, WORST))
        # Where plain steps are launched ahead, one that was not takes longer than they do.
        if plan.drafts or report.ahead or not self._runs_ahead or not times.plain_known(report.rows):
            off = times.observe(report.rows, taken, drafted=plan.drafts)  # drafts with k fixed belong to any plan
            self._explores |= plan.explores and off < -SURPRISE

    def plain_seconds(self, num_sequences: int, sampled: bool) -> float | None:
        times = self._times[sampled]
        return None if times.scale is None else times.seconds(num_sequences)

    def forget(self, sequence: Sequence) -> None:
        self._pace.pop(sequence.key, None)
        self._drafter_of.pop(sequence.key, None)
        self._looked_at.discard(sequence.key)

    def relearn(self, method: str) -> None:
        """How often the method's drafts are accepted has changed: measure it again, and without a pause."""
        self.meanwhile()
        self._acceptance.forget(method)
        self._guards.pop(method, None)
        self._pause, self._pause_left = 1, 0

    # -- between runs

    def state(self) -> dict[str, Any]:
        self.meanwhile()
        tables = {"drafts": self._draft_times.state(), "acceptance": self._acceptance.state()}
        return {"steps": [times.state() for times in self._times], **tables}

    def load(self, state: Mapping[str, Any]) -> None:
        """Raises KeyError, TypeError or ValueError on a state of another form, and is then as before."""
        greedy, sampled = (StepTimes.of_state(one, self._prior) for one in state["steps"])
        draft_times, acceptance = DraftTimes.of_state(state["drafts"]), Acceptance.of_state(state["acceptance"])
        self._times, self._draft_times, self._acceptance = [greedy, sampled], draft_times, acceptance
        self._guards.clear()
        self._lesson = None


def _mixed(offers: SequenceOf[_Offer]) -> list[_Offer]:
    """Each row with the method that promises it most; nothing where one method does for all of them."""
    best: dict[int, tuple[float, int]] = {}
    for which, offer in enumerate(offers):
        for row, promised in zip(offer.rows, offer.worth.sum(axis=1).tolist(), strict=True):
            best[row.at] = max(best.get(row.at, (0.0, which)), (promised, which))
    if len({which for _, which in best.values()}) < 2:
        return []
    mixed = []
    for which, offer in enumerate(offers):
        kept = [at for at, row in enumerate(offer.rows) if best[row.at][1] == which]
        rows, evidence = [offer.rows[at] for at in kept], [offer.evidence[at] for at in kept]
        shares = None if offer.shares is None else offer.shares[kept]
        offer = offer._replace(rows=rows, evidence=evidence, worth=offer.worth[kept], shares=shares)
        mixed += [offer] if kept else []
    return mixed


def _best(
    num_sequences: int, with_nodes: Floats, offers: SequenceOf[_Offer], *, explore: bool = False
) -> tuple[float, list[int], float]:
    """The most tokens per second that these offers promise, the nodes of each of their rows for it, and how many of
    them are drafted on average.

    `explore`: the largest number of nodes that promises nearly as much.

    A node's survival is never more than that of the one before it, so the best so many are drafts without gaps.
    """
    worth = _stacked([offer.worth for offer in offers])
    flat = worth.ravel()
    order = np.argsort(-flat, kind="stable")[: min(np.count_nonzero(flat >= LEAST), len(with_nodes))]
    if not len(order):
        return NOTHING
    row, depth = np.divmod(order, worth.shape[1])
    nodes_by_then, seconds, end = np.arange(1, len(order) + 1), with_nodes[: len(order)], 0
    if not explore and any(offer.shares is not None for offer in offers):  # where more nodes are tried none is left out
        given = [np.ones_like(offer.worth) if offer.shares is None else offer.shares for offer in offers]
        nodes_by_then = _stacked(given).ravel()[order].cumsum()
        seconds = np.interp(nodes_by_then, np.arange(1, len(with_nodes) + 1), with_nodes)
    for offer in offers:
        start, end = end, end + len(offer.rows)
        deepest = np.maximum.accumulate(np.where((start <= row) & (row < end), 1 if offer.at_once else depth + 1, 0))
        seconds = seconds + np.where(deepest > 0, offer.line[0] + offer.line[1] * deepest, 0.0)
    rates = (num_sequences + np.cumsum(flat[order])) / seconds
    best = int(rates.argmax())
    if explore:
        best = int(np.flatnonzero(rates >= (1 - RISK) * rates[best])[-1])
    nodes: list[int] = np.bincount(row[: best + 1], minlength=len(worth)).tolist()
    return float(rates[best]), nodes, float(nodes_by_then[best])


def _stacked(parts: SequenceOf[Floats]) -> Floats:
    """Below each other; zeros beyond the end of a shorter row."""
    if len(parts) == 1:
        return parts[0]
    width = max(part.shape[1] for part in parts)
    return np.concatenate([np.pad(part, ((0, 0), (0, width - part.shape[1]))) for part in parts])


def _slope(with_nodes: Floats, nodes: int) -> float:
    """Seconds of one more node, over so many nodes and at least the first few: neighbours alone are within noise."""
    last = min(max(nodes, SLOPE_NODES), len(with_nodes)) - 1
    return float(with_nodes[last] - with_nodes[0]) / max(last, 1)
