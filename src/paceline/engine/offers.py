"""What sequences could have drafted: by which method, and what each node of it would be worth.

Where a model leads (`lead`), all leave it or nobody does; elsewhere each sequence has the method that promises it most.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from paceline.drafters import NONE
from paceline.engine.acceptance import HOPELESS, bucket
from paceline.engine.asking import Asking
from paceline.engine.budget import DEEPEST, FEW, MAX_NODES, Budget, Offer, Prospect, Terms, prospect_of
from paceline.engine.cost import Floats
from paceline.engine.experience import Experience
from paceline.engine.lead import Lead
from paceline.engine.methods import SMALL_LAG, Methods
from paceline.engine.plans import Question
from paceline.engine.value import token_values, values_of_few

BELIEF = 0.65  # in what a token is worth to a job, against a token being a token: of many, who is last is a guess
LED_BELIEF = 0.3  # the same where a model leads, whose drafts are as long for all: a few must not make them long
LEAST_ROOM = 32.0  # where less is left, drafts are cut to it anyway
FAR = 256  # an answer's end is not foreseen further than that
CHEAP, DEAR = 0.01, 0.1  # of a plain step: what a token drafted ahead is taken to cost before that was timed
READ_AT_ONCE = 16  # tokens a drafter with a lag reads in about the time it drafts one
READ_FOR, LAGS = 16, 64  # steps that what was read is taken to serve; lags are told apart so far
LEAVING = 0.95  # of what another method promises where a model drafts for most: its draft may have begun, and it must
# read what others said when it is back
TRIAL = 3  # steps that a plan for what it teaches serves, where the drafts of the first have begun before it
KEPT = 4  # more steps that what offers of a few are weighed by serves, once it is not doubted: it changes slowly

Candidate = tuple[str, int]  # method, evidence


class Job(NamedTuple):
    """Several sequences that are waited for together, and what a pass takes and each of their rows."""

    members: list[int]
    pass_s: float
    row_s: float


@dataclass
class Outlook:
    """What offers are weighed by."""

    asked: Question  # what it was made for
    terms: Terms  # for the step at hand
    least: float  # that a node must be worth
    together: int  # sequences that are likely to draft
    trust: dict[str, float]  # by method
    main: str  # the method that most draft by
    spent: float  # what that takes, whether or not one more does
    jobs: list[Job]
    left: int  # steps that it may still serve
    values: list[float] = field(default_factory=list)  # of a token, by sequence, in the step at hand
    known: dict[Any, tuple[float, list[float]]] = field(default_factory=dict)  # rate and survival, of what is alike

    def serves(self, asked: Question) -> bool:
        """Once more: nobody came or went, and the pass is as it was."""
        its = self.asked
        return bool(
            self.left
            and asked.cost is its.cost
            and asked.sequences == its.sequences
            and asked.base == its.base
            and asked.other_rows == its.other_rows
            and asked.others_wait == its.others_wait
        )


class Offers:
    def __init__(self, methods: Methods, known: Experience, lead: Lead, asking: Asking, budget: Budget) -> None:
        self._methods, self._known, self._lead, self._asking, self._budget = methods, known, lead, asking, budget
        self.overhead_s = 0.0  # what deciding takes where somebody drafts, questions aside

    def outlook(self, asked: Question, found: Mapping[int, list[Candidate]]) -> Outlook:
        """For those found, or where there are few, for as many as may be found in the steps to come."""
        few = self._known.few(len(asked.sequences))
        methods = {method for candidates in found.values() for method, _ in candidates}
        if few:
            methods.update(self._methods.wanted([wish for wish, _ in asked.open_ended.values()]))
        terms = self._terms(asked, methods)
        # What a node must be worth to pay for its row; half of it, since costs are estimates and tokens may weigh more.
        least = max(0.5 * _row(terms) * terms.sequences, HOPELESS)
        together = min(len(self._lead.now), terms.sequences) or len(found)
        casts = self._known.shadows.casts
        trust = {method: self._known.acceptance.trust(method, shadowed=casts(method)) for method in terms.drafting}
        main, spent = self._main(together, terms)
        left = round(KEPT * (1 - terms.doubt)) if few else 0
        return Outlook(asked, terms, least, together, trust, main, spent, self._jobs(asked), left)

    def _jobs(self, asked: Question) -> list[Job]:
        sequences, cost, jobs = asked.sequences, asked.cost, dict[str, list[int]]()
        if len(sequences) == 1 or asked.others_wait:
            return []
        for index, sequence in enumerate(sequences):
            jobs.setdefault(sequence.job, []).append(index)
        found = []
        for members in jobs.values() if len(jobs) < len(sequences) else ():
            if len(members) > 1:
                row_s = max(cost.seconds(len(members)) - cost.seconds(1), 0.0) / (len(members) - 1)
                found.append(Job(members, max(cost.seconds(1) - row_s, 0.0), row_s))
        return found

    def values(self, asked: Question, jobs: SequenceOf[Job]) -> list[float]:
        """By sequence: what a token of it is worth to whoever waits for all answers of its job."""
        sequences, values = asked.sequences, [1.0] * len(asked.sequences)
        led = self._lead.leader(len(sequences)) != NONE
        few = self._known.few(len(sequences)) and not led
        value_of, belief = (values_of_few, 1.0) if few else (token_values, LED_BELIEF if led else BELIEF)
        for members, pass_s, row_s in jobs:
            paces = [self._known.pace.get(sequences[index].key, 1.0) for index in members]
            rooms = [min(sequences[index].room, FAR) for index in members]
            for index, value in zip(members, value_of(paces, rooms, pass_s, row_s), strict=True):
                values[index] = 1 - belief + belief * value
        return values

    def _terms(self, asked: Question, methods: Iterable[str]) -> Terms:
        cost, base, sequences = asked.cost, asked.base, len(asked.sequences)
        plain, drafting = cost.seconds(base), {}
        for name in methods:
            # Before it was timed, what casts no shadow is taken to run a model.
            guess = (CHEAP if self._known.shadows.casts(name) else DEAR) * plain
            drafting[name] = self._known.draft_times.lines(name, sequences, guess, self._asking.each_s(name))
        rows, beside = base + asked.other_rows, self.overhead_s
        if asked.other_rows:  # prompts are read once, whatever is drafted beside them: that does not count
            beside -= cost.seconds_with_few(rows - 1, 1)[0] - cost.seconds_with_few(base - 1, 1)[0]
        with_nodes: list[float] | Floats
        if sequences <= FEW:
            with_nodes = [seconds + beside for seconds in cost.seconds_with_few(rows, sequences * DEEPEST)]
        else:
            with_nodes = cost.seconds_with(rows, min(sequences * DEEPEST, MAX_NODES)) + beside
        doubt, trial = self._known.acceptance.doubt, 1
        if self._lead.leader(sequences) in drafting:  # drafts that have begun cannot grow, and none has for newcomers
            trial = TRIAL if asked.said else 0
        room = max(sum(sequence.room for sequence in asked.sequences) / sequences, LEAST_ROOM)
        in_step = self._known.on_device
        return Terms(cost, base, plain, sequences, float(sequences), doubt, with_nodes, drafting, in_step, room, trial)

    def best(
        self, asked: Question, found: Mapping[int, list[Candidate]], outlook: Outlook
    ) -> tuple[list[Offer], Prospect | None]:
        """Where a model leads, all leave it or nobody does."""
        leader, terms = self._lead.leader(len(asked.sequences)), outlook.terms
        if leader not in terms.drafting:
            offers = self._offers(asked, found, outlook)
            return offers, prospect_of(offers, terms)
        led = {at: [one for one in each if one[0] == leader] or each for at, each in found.items()}
        offers = self._offers(asked, led, outlook)
        prospect = prospect_of(offers, terms)
        free = {at: rest for at, each in found.items() if (rest := [one for one in each if one[0] != leader])}
        if len(free) == len(found):
            others = self._offers(asked, free, outlook)
            other = prospect_of(others, terms)
            if other is not None and (prospect is None or LEAVING * other.rate > prospect.rate):
                return others, other
        return offers, prospect

    def _offers(self, asked: Question, found: Mapping[int, list[Candidate]], outlook: Outlook) -> list[Offer]:
        """The best each sequence could have."""
        known, bend_of, offers = outlook.known, self._known.acceptance.bend, []
        for index, candidates in found.items():
            sequence, several = asked.sequences[index], len(candidates) > 1
            sampled = not sequence.params.greedy
            best = 0.0
            for method, evidence in candidates:
                bend = bend_of(sequence.key, method)
                lag = self._methods.lag(sequence, method) if several else 0
                lag = -(-lag // LAGS) * LAGS if lag > SMALL_LAG else 0
                alike = method, bucket(evidence), sampled, bend, lag, several
                if alike not in known:
                    known[alike] = self._weighed(method, evidence, sampled, bend, lag, several, outlook)
                rate, survival = known[alike]
                if rate > best:
                    best, chosen, alive = rate, method, survival
            if best:
                weight = outlook.trust[chosen] * outlook.values[index]
                offers.append(Offer(index, chosen, alive, weight, asked.open_ended[index][1]))
        return offers

    def _weighed(
        self, method: str, evidence: int, sampled: bool, bend: float, lag: int, several: bool, outlook: Outlook
    ) -> tuple[float, list[float]]:
        """A rate to compare methods by, and how likely its drafts are to get how far."""
        alive = self._known.acceptance.survival(method, sampled, evidence, DEEPEST, outlook.least, bend)
        rate = self._rate(method, alive, lag, outlook) if several else float(bool(alive))
        if outlook.main not in (NONE, method) and not self._known.shadows.casts(outlook.main):
            rate *= LEAVING
        return rate, alive

    @staticmethod
    def _rate(method: str, alive: list[float], lag: int, outlook: Outlook) -> float:
        """Tokens per second if all that are likely to draft did so by this method, as well as this sequence."""
        terms, together, trust = outlook.terms, outlook.together, outlook.trust[method]
        line, with_nodes, sequences = terms.drafting[method], terms.with_nodes, terms.sequences
        nodes = len(with_nodes)
        first, each = line.at(together, 0), line.at(together, 1) - line.at(together, 0)
        least, besides = (outlook.spent, 0.0) if outlook.main == method else (0.0, outlook.spent)
        besides += (first + each) * lag / READ_AT_ONCE / READ_FOR
        best = gain = 0.0
        for depth, one in enumerate(alive[: max(nodes // together, 1)], 1):
            gain += one * trust
            drafting = first + each * depth
            seconds = float(with_nodes[min(together * depth, nodes) - 1]) + (drafting if drafting > least else least)
            rate = (sequences + together * gain) / (seconds + besides)
            best = rate if rate > best else best
        return best

    def _main(self, together: int, terms: Terms) -> tuple[str, float]:
        """The method that most draft by, and what that takes whether or not one more does."""
        main, number = self._lead.main
        if main not in terms.drafting or 2 * number <= together:
            return NONE, 0.0
        return main, terms.drafting[main].at(together, self._budget.limit)


def _row(terms: Terms) -> float:
    """Of a plain step: what each of the nodes adds where they add least."""
    if isinstance(terms.with_nodes, list):
        plain_s = terms.plain_s
        return min([(seconds / plain_s - 1) / nodes for nodes, seconds in enumerate(terms.with_nodes, 1)])
    return float(((terms.with_nodes / terms.plain_s - 1) / np.arange(1, len(terms.with_nodes) + 1)).min())
