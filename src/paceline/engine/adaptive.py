"""Which method drafts for a sequence, and how far ahead, decided anew each step by expected tokens per second.

Who is asked what it knows is decided by `asking`, how many nodes each gets by `budget`, from what steps and drafts cost
(`cost`) and how often drafts held (`acceptance`). Everything used here is committed history and timings, never the
draft at hand: that would bias the output.

Methods that live on the host are tried in the shadow (`shadows`), so their acceptance is known without paying for it;
where several answers are waited for together, a token of one that runs ahead is worth less (`value`).
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np

from paceline.config import MAX_K
from paceline.drafters import NONE, Drafter
from paceline.engine.acceptance import HOPELESS, Acceptance, bucket
from paceline.engine.asking import Asking, Purse
from paceline.engine.batch import StepOutput
from paceline.engine.budget import DEEPEST, MAX_NODES, Budget, Offer, Prospect, Terms, prospect_of
from paceline.engine.cost import NOTHING_S, CostModel, DraftTimes, Floats, size_of
from paceline.engine.policy import AUTO, Choice, StepReport, wish
from paceline.engine.shadows import Shadows
from paceline.engine.value import token_values
from paceline.models.pass_prior import CPU, PassPrior
from paceline.sequence import Sequence

log = logging.getLogger("paceline")
PROBE_EVERY = 64  # looks after which a method that casts no shadow is tried once more
PROBE_BUDGET = 2
PLAIN_FIRST, PLAIN_EVERY = 4, 128  # steps until the next plain one: three times as many after each
SHADOWS, SHADOWS_SHARE = 4, 0.0025  # sequences whose shadows are compared in one step, and the time it may take
OVERHEAD_RATE = 0.1
BELIEF = 0.65  # in what a token is worth to a job, against a token being a token: who will be the last is a guess
FAR = 256  # an answer's end is not foreseen further than that
PACE_FADES = 0.9
CHEAP, DEAR = 0.01, 0.1  # of a plain step: what a token drafted ahead is taken to cost before that was timed
READ_AT_ONCE = 16  # tokens a drafter with a lag reads in about the time it drafts one
READ_FOR = 16  # steps that what was read is taken to serve
LEAVING = 0.95  # of what another method promises where a model drafts for most: its draft may have begun, and it must
# read what others said when it is back
PATIENT_TOKENS, SMALL_LAG, LAGS = 2, 8, 64  # a drafter that must read the prompt first does not delay the first tokens
STANDS, STILL_THERE = 6, 0.9  # steps a plan serves at most, and the share of its sequences that must be left
TRIAL = 3  # steps that a plan for what it teaches serves, where the drafts of the first have begun before it
SHOWN = 0.02  # of a step: deciding that takes longer may show in it
MANY = 16  # sequences: planning for them takes so long that a plan serves for two steps at least
DOUBTED = 0.5  # not while so little is known of what promises are worth
LOOKUPS = 4  # one in so many of those that draft may do so by lookup
NEWCOMERS, NEWCOMERS_SHARE = 16, 0.05  # asked in one step at least, and for what share of its time more of them

Candidate = tuple[str, int]  # method, evidence
Open = dict[int, tuple[str, int]]  # sequence -> (method or auto, most nodes)


@cache
def _choice(method: str, budget: int) -> Choice:
    return Choice(method, budget)


@dataclass
class _Costs:
    """Step times, apart for greedy and sampled batches and for few and many sequences: their overheads differ."""

    prior: PassPrior
    models: dict[tuple[bool, int], CostModel]

    def of(self, num_sequences: int, sampled: bool) -> CostModel:
        key = sampled, size_of(num_sequences)
        if key not in self.models:
            alike = [size for known, size in self.models if known == sampled]
            nearest = min(alike, key=lambda size: abs(size - key[1]), default=None)
            self.models[key] = CostModel(self.prior)
            if nearest is not None:
                self.models[key] = self.models[sampled, nearest].as_a_guess()
        return self.models[key]


@dataclass
class _Plan:
    """What the last plan was made of, for whoever learns from what came of it."""

    evidence: dict[tuple[str, str], int] = field(default_factory=dict)  # by sequence and method
    promises: dict[str, list[float]] = field(default_factory=dict)  # by sequence: how likely it is to get how far
    drafts: bool = False  # of the policy's own choosing
    seconds: float = 0.0  # that it took
    asked: bool = False  # somebody was asked
    ahead: bool = False  # it was made behind a pass


@dataclass(frozen=True)
class _Question:
    """What a plan is asked for."""

    sequences: SequenceOf[Sequence]
    open_ended: Open
    others_wait: bool
    cost: CostModel
    base: int  # rows without prompts and without the drafts in question
    other_rows: int  # of prompts
    said: int = 0  # tokens that each will have said more by then, at least

    def patient(self, sequence: Sequence) -> bool:
        """Its first tokens do not wait for a drafter that must read the prompt."""
        return sequence.num_output + self.said < PATIENT_TOKENS


@dataclass
class _Standing:
    """A plan that serves for some steps: what models draft changes little from one to the next."""

    choices: dict[str, Choice]  # by sequence
    plan: _Plan
    steps: int  # it serves for
    left: int

    def like(self, choices: Mapping[str, Choice]) -> bool:
        """Whether another plan says much the same."""
        same = 0
        for key, choice in choices.items():
            known = self.choices.get(key)
            same += known is not None and choice.method == known.method and abs(choice.budget - known.budget) <= 1
        return same >= STILL_THERE * len(choices)


class AdaptivePolicy:
    """`method` auto, or one method with k left open, or both fixed; what a request asks for outranks it.

    `prior` says how a pass's time grows with its rows where it runs, `clock` what deciding takes.
    """

    def __init__(
        self,
        drafters: SequenceOf[Drafter],
        method: str = NONE,
        k: int | None = None,
        prior: PassPrior = CPU,
        clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self._drafters = {drafter.name: drafter for drafter in drafters}
        self._method, self._k, self._clock = method, k, clock
        self._costs, self._draft_times, self._acceptance = _Costs(prior, {}), DraftTimes(), Acceptance()
        self._shadows, self._shadow_purse = Shadows(), Purse(SHADOWS_SHARE)
        self._asking, self._budget = Asking(clock), Budget()
        self._made = _Plan()
        self._lesson: tuple[_Plan, StepReport, list[int]] | None = None  # not learnt yet; where its tokens begin
        self._complained: set[tuple[str, type]] = set()
        self._retired: frozenset[str] = frozenset()
        self._heard: set[str] = set()  # sequences that were asked
        self._drafting_now: dict[str, str] = {}  # sequences the last plan drafted for -> method
        self._standing: _Standing | None = None
        self._live: list[Sequence] = []  # that were planned for
        self._others_wait = False
        self._on_device = bool(prior.padded_to)  # passes are replayed, and drafts by models begin ahead
        self._led_by: dict[int, str] = {}  # by size of the batch: the method that most drafted by
        self._since_tried: dict[str, int] = {}  # looks since a method that casts no shadow was asked for a draft
        self._pace: dict[str, float] = {}  # tokens per step, by sequence
        self._turn = self._since_plain = 0
        self._waiting = False  # a method for somebody to have said its first tokens
        self._plain_due = PLAIN_EVERY  # steps from one that was plain to see what that takes to the next
        self._asked_for = 0  # size of the batch when somebody was last asked
        self._checking = False  # what plain steps take
        self._runs_ahead = False  # steps are launched before the one before is read, where nobody drafts
        self._overhead_s = 0.0  # what deciding takes where somebody drafts, questions aside

    @property
    def expected_gain(self) -> float | None:
        """What drafting promised over plain decoding when it was last considered."""
        return self._budget.expected_gain

    # -- deciding

    def plan(self, sequences: SequenceOf[Sequence], other_rows: int, others_wait: bool) -> list[Choice]:
        began = self._clock()
        self._made = plan = _Plan()
        choices = [_choice(NONE, 0)] * len(sequences)
        if not self._drafters:
            return choices
        open_ended: Open = {}
        common = self._method, self._k
        for index, sequence in enumerate(sequences):
            method, k = common if sequence.params.speculation is None else self._wish(sequence)
            most = min(k or MAX_K, sequence.room - 1)
            if method == NONE or most < 1:
                continue
            if k is None:
                open_ended[index] = method, most
            else:
                choices[index] = self._surest(sequence, method, most)
        self._live = [sequences[index] for index in open_ended]
        self._others_wait = others_wait
        if open_ended:
            if self._on_device and self._acceptance.doubt > DOUBTED:
                self._learn()  # on a device drafts begin large: what the first ones brought is not waited for
            base = len(sequences) + sum(choice.budget for choice in choices)
            cost = self._costs.of(len(sequences), _any_sampled(sequences))
            if self._knows_plain(cost, base + other_rows) and not self._stands(sequences, open_ended, choices):
                self._choose(_Question(sequences, open_ended, others_wait, cost, base, other_rows), choices)
                self._let_stand(sequences, open_ended, choices)
        plan.seconds = self._clock() - began
        return choices

    def _plan_ahead(self) -> None:
        """Where drafts begin behind a step under way, so does the plan for the step after it, once the last has served
        or many have ended. Nobody waits for it, and how deep drafts go was decided with the plan before anyway."""
        last = self._standing
        if last is None or not self._on_device or self._acceptance.doubt > DOUBTED:
            return
        if last.left and len(self._live) >= STILL_THERE * len(last.choices):
            return
        going: list[Sequence] = []
        open_ended: Open = {}
        for sequence in self._live:
            # Who is likely to end keeps what it had.
            room = max(sequence.room - round(self._pace.get(sequence.key, 1.0)), sequence.room // 2)
            if room > 1 and sequence.key in last.choices:
                open_ended[len(going)] = self._wish(sequence)[0], min(MAX_K, room - 1)
                going.append(sequence)
        if not going:
            return
        made, self._made = self._made, _Plan(ahead=True)
        choices = [_choice(NONE, 0)] * len(going)
        cost = self._costs.of(len(going), _any_sampled(going))
        self._choose(_Question(going, open_ended, self._others_wait, cost, len(going), 0, said=1), choices)
        self._let_stand(going, open_ended, choices)
        if self._standing is not None:
            self._standing.left += 1  # it has not served yet
            before = {one.key: last.choices[one.key] for one in self._live if one.key in last.choices}
            self._standing.choices = {**before, **self._standing.choices}
        self._made = made

    def rests(self, sequences: SequenceOf[Sequence]) -> bool:
        """While nobody drafts, all were asked once and no time is saved up to ask again; and for one step at each check
        of what plain ones take."""
        if not self._drafters:
            return True
        drafting = [sequence for sequence in sequences if self._wish(sequence)[0] != NONE]
        if not drafting:
            return True
        if self._made.drafts or any(self._wish(sequence)[1] is not None for sequence in drafting):
            return False
        if self._checking:
            self._checking = False
            return True
        waits = not self._drafting_now and self._asking.purse.seconds <= 0 and not self._shrank(len(sequences))
        return waits and self._heard.issuperset([sequence.key for sequence in drafting])

    def _wish(self, sequence: Sequence) -> tuple[str, int | None]:
        return wish(sequence, self._method, self._k)

    def _surest(self, sequence: Sequence, method: str, budget: int) -> Choice:
        """With k fixed only the method is left to choose: the one with the most to go by."""
        if method in self._drafters and method not in self._retired:
            return _choice(method, budget) if self._note_evidence(sequence, method) else _choice(NONE, 0)
        evidence = {name: self._note_evidence(sequence, name) for name in self._allowed(method)}
        best = max(evidence, key=evidence.__getitem__, default=NONE)
        return _choice(best, budget) if evidence.get(best) else _choice(NONE, 0)

    def _stands(
        self, sequences: SequenceOf[Sequence], open_ended: dict[int, tuple[str, int]], choices: list[Choice]
    ) -> bool:
        """Whether the last plan serves once more: nobody is new, and few have ended, which matters little where drafts
        have begun."""
        last = self._standing
        if last is None or not last.left:
            return False
        if not self._on_device and len(open_ended) < STILL_THERE * len(last.choices):
            return False
        found = {index: last.choices.get(sequences[index].key) for index in open_ended}
        if None in found.values():
            return False
        last.left -= 1
        self._made.evidence, self._made.promises, self._made.drafts = last.plan.evidence, last.plan.promises, True
        for index, choice in found.items():
            assert choice is not None
            lookup = choice.budget and self._shadows.casts(choice.method)
            if not lookup or self._note_evidence(sequences[index], choice.method):
                most = open_ended[index][1]
                choices[index] = choice if choice.budget <= most else _choice(choice.method, most)
        return True

    def _let_stand(
        self, sequences: SequenceOf[Sequence], open_ended: dict[int, tuple[str, int]], choices: list[Choice]
    ) -> None:
        """A plan mostly by methods that know as much in every step, twice as long each time it says the same."""
        last, self._standing = self._standing, None
        if sum(map(self._shadows.casts, self._drafting_now.values())) * LOOKUPS < len(self._drafting_now):
            made = {sequences[index].key: choices[index] for index in open_ended}
            least = 2 if len(made) >= MANY and self._acceptance.doubt < DOUBTED else 1
            steps = min(2 * last.steps, STANDS) if last is not None and last.like(made) else least
            if self._waiting:
                steps = 1
            elif self._budget.explores:
                steps = TRIAL if self._made.ahead else 1
            self._standing = _Standing(made, self._made, steps, left=steps - 1)

    def _choose(self, asked: _Question, choices: list[Choice]) -> None:
        """For those whose method or k is open."""
        sequences, open_ended = asked.sequences, asked.open_ended
        began, spent = self._clock(), self._asking.spent_s
        found = self._candidates(asked)
        if found:
            values = [1.0] * len(sequences) if asked.others_wait else self._values(sequences, asked.cost)
            terms = self._terms(asked, values, found)
            offers, prospect = self._best_offers(asked, found, values, terms)
            depths = self._budget.spread(prospect, terms) if prospect else [0] * len(offers)
            for offer, depth in zip(offers, depths, strict=True):
                self._made.promises[sequences[offer.sequence].key] = offer.survival
                if depth:
                    choices[offer.sequence] = _choice(offer.method, depth)
            self._probe(sequences, offers, choices, terms)
        drafting = ((sequences[index].key, choices[index]) for index in open_ended)
        self._drafting_now = {key: choice.method for key, choice in drafting if choice.budget}
        self._made.drafts = bool(self._drafting_now)
        if self._made.asked:
            self._asked_for = size_of(len(sequences))
        taken = self._clock() - began - (self._asking.spent_s - spent)
        if self._made.drafts:
            self._led_by[size_of(len(sequences))] = _most_common(self._drafting_now.values())
            exposed = 0.0 if asked.said else taken  # else it hides behind a pass
            self._overhead_s += OVERHEAD_RATE * (exposed - self._overhead_s)
        elif found:
            self._asking.purse.empty()
            self._asking.purse.pay(taken)
            self._hear(sequences, open_ended)  # some speak for all; the others in turn

    def _candidates(self, asked: _Question) -> dict[int, list[Candidate]]:
        """Methods that have something to say. Asked are newcomers, those that draft, and some of the others in turn."""
        sequences, open_ended = asked.sequences, asked.open_ended
        found: dict[int, list[Candidate]] = {}
        methods = self._allowed(AUTO)
        may_take = self._asking.purse.seconds / max(len(methods), 1)
        shrank = self._shrank(len(sequences))
        new = [at for at in open_ended if shrank or sequences[at].key not in self._heard]
        leads = self._leader(len(sequences)) != NONE
        early: set[int] = set()  # of a crowd: what they begin with is taken in while a pass is under way
        if len(new) > NEWCOMERS or leads:
            early = {at for at in new if asked.patient(sequences[at])}
            new = [at for at in new if at not in early]
        self._waiting = bool(leads and early)
        if may_take <= 0 and not self._drafting_now and not new:
            return found
        current = {at: self._drafting_now.get(sequences[at].key) for at in open_ended if at not in early}
        each_s = max(map(self._asking.each_s, methods), default=0.0) or NOTHING_S
        some = [] if leads else new[: max(NEWCOMERS, int(NEWCOMERS_SHARE * asked.cost.seconds(asked.base) / each_s))]
        for method in methods:
            casts = self._shadows.casts(method)
            may = [at for at in current if open_ended[at][0] in (AUTO, method)]
            due = {at for at in may if current[at] == method}
            if due and not casts:
                due.update(may)  # a pass of a model serves many at little more than one
            due.update({*may}.intersection(some if casts else new))
            rest = [at for at in may if at not in due] if may_take > 0 and len(due) < len(may) else []
            others = self._asking.in_turn(method, rest, may_take, together=not casts)
            if due or others:
                self._made.asked = True
                with self._asking.timed(method, len(due), len(others)):
                    for index in (*sorted(due), *others):
                        if evidence := self._note_evidence(sequences[index], method, asked.patient(sequences[index])):
                            found.setdefault(index, []).append((method, evidence))
        self._hear(sequences, new if leads else some)
        return found

    def _leader(self, num_sequences: int) -> str:
        """The model that drafts for most and begins ahead: leaving it costs more than lookups can bring to a few."""
        if not self._on_device or not self._led_by:
            return NONE
        size = size_of(num_sequences)
        method = self._led_by[min(self._led_by, key=lambda known: abs(known - size))]
        return NONE if self._shadows.casts(method) or method in self._retired else method

    def _shrank(self, num_sequences: int) -> bool:
        """What did not pay for many may pay for fewer."""
        return size_of(num_sequences) < self._asked_for

    def _hear(self, sequences: SequenceOf[Sequence], asked: Iterable[int]) -> None:
        """A drafter that has to read the prompt says nothing at first."""
        self._heard.update(sequences[at].key for at in asked if sequences[at].num_output >= PATIENT_TOKENS)

    def _terms(self, asked: _Question, values: SequenceOf[float], found: Mapping[int, list[Candidate]]) -> Terms:
        cost, base = asked.cost, asked.base
        plain, drafting = cost.seconds(base), {}
        for name in {method for candidates in found.values() for method, _ in candidates}:
            # Before it was timed, what casts no shadow is taken to run a model.
            guess = (CHEAP if self._shadows.casts(name) else DEAR) * plain
            drafting[name] = self._draft_times.lines(name, len(values), guess, self._asking.each_s(name))
        most = min(len(values) * DEEPEST, MAX_NODES)
        with_nodes = cost.seconds_with(base + asked.other_rows, most) + self._overhead_s
        if asked.other_rows:  # prompts are read once, whatever is drafted beside them: that does not count
            with_nodes -= cost.seconds_with(base + asked.other_rows - 1, 1) - cost.seconds_with(base - 1, 1)
        doubt, trial = self._acceptance.doubt, 1
        if self._leader(len(values)) in drafting:  # drafts that have begun cannot grow, and none has for newcomers
            trial = TRIAL if asked.said else 0
        return Terms(cost, base, len(values), sum(values), doubt, with_nodes, drafting, self._on_device, trial)

    def _best_offers(
        self, asked: _Question, found: Mapping[int, list[Candidate]], values: SequenceOf[float], terms: Terms
    ) -> tuple[list[Offer], Prospect | None]:
        """Where a model leads, all leave it or nobody does."""
        leader = self._leader(len(asked.sequences))
        if leader not in terms.drafting:
            offers = self._offers(asked, found, values, terms)
            return offers, prospect_of(offers, terms)
        led = {at: [one for one in each if one[0] == leader] or each for at, each in found.items()}
        offers = self._offers(asked, led, values, terms)
        prospect = prospect_of(offers, terms)
        free = {at: rest for at, each in found.items() if (rest := [one for one in each if one[0] != leader])}
        if len(free) == len(found):
            others = self._offers(asked, free, values, terms)
            other = prospect_of(others, terms)
            if other is not None and (prospect is None or LEAVING * other.rate > prospect.rate):
                return others, other
        return offers, prospect

    def _offers(
        self, asked: _Question, found: Mapping[int, list[Candidate]], values: SequenceOf[float], terms: Terms
    ) -> list[Offer]:
        """The best each sequence could have."""
        # What a node must be worth to pay for its row; half of it, since costs are estimates and tokens may weigh more.
        row = (terms.with_nodes / terms.plain_s - 1) / np.arange(1, len(terms.with_nodes) + 1)
        least = max(0.5 * float(row.min()) * terms.sequences, HOPELESS)
        together = min(len(self._drafting_now), terms.sequences) or len(found)
        trust = {method: self._acceptance.trust(method) for method in terms.drafting}
        main, spent = self._main(together, terms)
        known: dict[Any, tuple[float, list[float], Floats]] = {}
        offers = []
        for index, candidates in found.items():
            sequence, several = asked.sequences[index], len(candidates) > 1
            sampled = not sequence.params.greedy
            best = 0.0
            for method, evidence in candidates:
                bend = self._acceptance.bend(sequence.key, method)
                lag = self._drafters[method].lag(sequence) if several else 0
                lag = -(-lag // LAGS) * LAGS if lag > SMALL_LAG else 0
                alike = method, bucket(evidence), sampled, bend, lag, several
                if alike not in known:
                    alive = self._acceptance.survival(method, sampled, evidence, DEEPEST, least, bend)
                    its = np.zeros(DEEPEST)
                    its[: len(alive)] = alive
                    rate = (
                        self._rate(method, its * trust[method], lag, together, main, spent, terms)
                        if several
                        else float(bool(alive))
                    )
                    if main not in (NONE, method) and not self._shadows.casts(main):
                        rate *= LEAVING
                    known[alike] = rate, alive, its
                if known[alike][0] > best:
                    best, survival, worth = known[alike]
                    chosen = method
            if best:
                most = asked.open_ended[index][1]
                if most < DEEPEST:
                    worth = np.where(np.arange(DEEPEST) < most, worth, 0.0)
                offers.append(Offer(index, chosen, worth * (trust[chosen] * values[index]), survival))
        return offers

    def _rate(
        self, method: str, worth: Floats, lag: int, together: int, main: str, spent: float, terms: Terms
    ) -> float:
        """Tokens per second if all that are likely to draft did so by this method, as well as this sequence."""
        if not worth[0]:
            return 0.0
        line, most = terms.drafting[method], max(len(terms.with_nodes) // together, 1)
        reading = line.at(together, 1) * lag / READ_AT_ONCE / READ_FOR
        depth = np.arange(1, min(len(worth), most) + 1)
        tokens = terms.sequences + together * np.cumsum(worth[:most])
        seconds = terms.with_nodes[np.minimum(together * depth, len(terms.with_nodes)) - 1]
        drafting = np.maximum(line.at(together, depth), spent) if main == method else line.at(together, depth) + spent
        return float((tokens / (seconds + drafting + reading)).max())

    def _main(self, together: int, terms: Terms) -> tuple[str, float]:
        """The method that most draft by, and what that takes whether or not one more does."""
        by = list(self._drafting_now.values())
        main = _most_common(by)
        if main not in terms.drafting or 2 * by.count(main) <= together:
            return NONE, 0.0
        return main, float(terms.drafting[main].at(together, self._budget.limit))

    def _probe(
        self, sequences: SequenceOf[Sequence], offers: SequenceOf[Offer], choices: list[Choice], terms: Terms
    ) -> None:
        """A method that casts no shadow and has not drafted for long is tried once more, when there is time for it."""
        for method, index in {offer.method: offer.sequence for offer in offers}.items():
            if self._shadows.casts(method) or any(choice.method == method for choice in choices):
                self._since_tried[method] = 0
                continue
            self._since_tried[method] = self._since_tried.get(method, 0) + 1
            if self._since_tried[method] < PROBE_EVERY or choices[index].budget:
                continue
            seconds = float(terms.with_nodes[PROBE_BUDGET - 1]) + terms.drafting[method].at(1, PROBE_BUDGET)
            if self._budget.afford(seconds / terms.plain_s - 1):
                self._since_tried[method] = 0
                choices[index] = _choice(method, min(PROBE_BUDGET, sequences[index].room - 1))

    def _values(self, sequences: SequenceOf[Sequence], cost: CostModel) -> list[float]:
        """By sequence: what a token of it is worth to whoever waits for all answers of its job."""
        values, jobs = [1.0] * len(sequences), dict[str, list[int]]()
        for index, sequence in enumerate(sequences):
            jobs.setdefault(sequence.job, []).append(index)
        for members in jobs.values() if len(jobs) < len(sequences) else ():
            if len(members) > 1:
                row_s = max(cost.seconds(len(members)) - cost.seconds(1), 0.0) / (len(members) - 1)
                paces = [self._pace.get(sequences[index].key, 1.0) for index in members]
                rooms = [min(sequences[index].room, FAR) for index in members]
                worth = token_values(paces, rooms, pass_s=max(cost.seconds(1) - row_s, 0.0), row_s=row_s)
                for index, value in zip(members, worth, strict=True):
                    values[index] = 1 - BELIEF + BELIEF * value
        return values

    def _knows_plain(self, cost: CostModel, base: int) -> bool:
        """Whether to draft pays is judged against plain steps, so some are taken at first, and one now and then."""
        self._since_plain += 1
        seen = cost.plain_seen(base)
        # Where passes are recorded they take what they took before.
        first = PLAIN_EVERY if self._costs.prior.padded_to else PLAIN_FIRST
        self._plain_due = min(first * 3 ** max(seen - 1, 0), PLAIN_EVERY)
        self._checking = not seen or self._since_plain >= self._plain_due
        if self._checking:
            self._since_plain = 0
        return not self._checking

    def drafts_on(self) -> bool:
        return self._method == NONE or self._k is not None or self._since_plain + 1 < self._plain_due

    def _allowed(self, method: str) -> SequenceOf[str]:
        names = self._drafters if method == AUTO else [method]
        return [name for name in names if name not in self._retired]

    def _note_evidence(self, sequence: Sequence, method: str, patient: bool | None = None) -> int:
        """A drafter that fails to answer has nothing to say; the answer under way does not suffer."""
        evidence = 0
        if patient is None:
            patient = sequence.num_output < PATIENT_TOKENS
        try:
            drafter = self._drafters[method]
            if not patient or drafter.lag(sequence) <= SMALL_LAG:
                evidence = drafter.evidence(sequence)
        except Exception as problem:
            self._complain(method, problem)
        self._made.evidence[sequence.key, method] = evidence
        return evidence

    def _complain(self, method: str, problem: Exception) -> None:
        if (method, type(problem)) not in self._complained:  # said once: it may fail at every step
            log.warning("drafter %s failed to say what it knows: %r", method, problem)
            self._complained.add((method, type(problem)))

    # -- learning

    def observe(self, report: StepReport) -> None:
        self._learn()
        self._retired = report.retired
        judged = report.outputs if self._drafters else ()
        starts = [len(output.sequence.tokens) - len(output.tokens) for output in judged]
        self._lesson, self._made = (self._made, report, starts), _Plan()  # a step launched ahead has no plan

    def meanwhile(self) -> None:
        """There is time for it while a pass is under way."""
        self._learn()
        self._plan_ahead()

    def _learn(self) -> None:
        """From the last step."""
        lesson, self._lesson = self._lesson, None
        if lesson is None:
            return
        plan, report, starts = lesson
        self._learn_costs(plan, report)
        if not self._drafters:
            return
        self._settle_promises(plan, report.outputs)
        for output, start in zip(report.outputs, starts, strict=True):
            self._judge(plan, output, start)
        self._watch(report.outputs)

    def _learn_costs(self, plan: _Plan, report: StepReport) -> None:
        self._asking.purse.earn(report.step_s)
        self._shadow_purse.earn(report.step_s)
        self._runs_ahead |= report.ahead
        drafted: dict[str, int] = {}  # method -> sequences
        for output in report.outputs if report.rows > report.num_sequences else ():
            if output.drafted:
                drafted[output.method] = drafted.get(output.method, 0) + 1
        for method, (depth, seconds) in report.draft_s.items():
            passes = not self._shadows.casts(method)
            self._draft_times.observe(method, drafted.get(method, 1), depth, seconds, passes=passes)
        # A drafter that had to catch up is not timed, and its step says nothing of such steps.
        whole = len(report.outputs) == report.num_sequences and drafted.keys() <= report.draft_s.keys()
        taken = report.step_s - plan.seconds - sum(seconds for _, seconds in report.draft_s.values())
        if not (report.warm and whole and report.outputs and taken > 0):
            return
        cost = self._costs.of(len(report.outputs), _any_sampled(output.sequence for output in report.outputs))
        if plan.drafts and self._on_device and plan.seconds > SHOWN * report.step_s and cost.sure_of(report.rows):
            return  # how much of that hid behind a draft that had begun nobody knows
        if plan.drafts or report.ahead or not self._runs_ahead or not cost.plain_seen(report.rows):
            cost.observe(report.rows, taken, drafted=plan.drafts)
        elif plan.asked and cost.scale is not None:  # it could have been launched ahead, had nobody been asked
            self._asking.purse.pay(max(taken - cost.seconds(report.rows), 0.0))

    def _watch(self, outputs: SequenceOf[StepOutput]) -> None:
        """Cast shadows for some sequences, as far as there is time for it."""
        for _ in range(min(SHADOWS, len(outputs))):
            if self._shadow_purse.seconds > 0:
                began = self._clock()
                self._turn += 1
                self._cast_shadows(outputs[self._turn % len(outputs)])
                self._shadow_purse.pay(self._clock() - began)

    def _settle_promises(self, plan: _Plan, outputs: SequenceOf[StepOutput]) -> None:
        promised: dict[str, tuple[float, int]] = {}
        for output in outputs:
            if output.drafted and (survival := plan.promises.get(output.sequence.key)):
                before, accepted = promised.get(output.method, (0.0, 0))
                promised[output.method] = before + sum(survival[: output.drafted]), accepted + output.accepted
        self._acceptance.note_promises(promised)

    def _judge(self, plan: _Plan, output: StepOutput, start: int) -> None:
        """A real draft met its fate, and so did the shadows it makes superfluous."""
        sequence, sampled = output.sequence, not output.sequence.params.greedy
        key = sequence.key
        if output.drafted:
            evidence = plan.evidence.get((key, output.method), 1)
            self._acceptance.note(key, output.method, sampled, evidence, output.drafted, output.accepted)
            self._shadows.drop(sequence, output.method)
        for fate in self._shadows.meet(sequence, output.tokens, start):
            self._acceptance.note(key, fate.method, sampled, fate.evidence, fate.drafted, fate.matched)
        self._pace[key] = PACE_FADES * self._pace.get(key, 1.0) + (1 - PACE_FADES) * len(output.tokens)
        if output.finished or sequence.finished:
            self.forget(sequence)

    def _cast_shadows(self, output: StepOutput) -> None:
        sequence = output.sequence
        method, k = self._wish(sequence)
        if output.finished or sequence.finished or method == NONE or (method != AUTO and k is not None):
            return
        for name in self._allowed(method):
            if not self._shadows.follows(sequence, name) and not (output.drafted and output.method == name):
                try:
                    self._shadows.cast(self._drafters[name], sequence)
                except Exception as problem:
                    self._complain(name, problem)

    def plain_seconds(self, num_sequences: int, sampled: bool) -> float | None:
        cost = self._costs.of(num_sequences, sampled)
        return None if cost.scale is None else cost.seconds(num_sequences)

    def forget(self, sequence: Sequence) -> None:
        self._acceptance.forget(sequence.key)
        self._heard.discard(sequence.key)
        self._drafting_now.pop(sequence.key, None)
        self._pace.pop(sequence.key, None)
        self._shadows.forget(sequence)

    # -- between runs

    def state(self) -> dict[str, Any]:
        self._learn()
        costs = [
            {"sampled": sampled, "size": size, **model.as_dict()}
            for (sampled, size), model in self._costs.models.items()
        ]
        return {"costs": costs, "acceptance": self._acceptance.as_list(), "draft_times": self._draft_times.as_dict()}

    def load(self, state: Mapping[str, Any]) -> None:
        """Raises KeyError, TypeError or ValueError on a state of another form, and is then as before."""
        prior = self._costs.prior
        models = {(bool(m["sampled"]), int(m["size"])): CostModel.from_dict(m, prior) for m in state["costs"]}
        times = DraftTimes.from_dict(state["draft_times"])
        acceptance = Acceptance()
        acceptance.load(state["acceptance"])
        self._costs, self._draft_times, self._acceptance = _Costs(prior, models), times, acceptance
        self._lesson, self._standing, self._led_by = None, None, {}


def _most_common(methods: Iterable[str]) -> str:
    return max(Counter(methods).items(), key=lambda each: each[1], default=(NONE, 0))[0]


def _any_sampled(sequences: Iterable[Sequence]) -> bool:
    return any(not sequence.params.greedy for sequence in sequences)
