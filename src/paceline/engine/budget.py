"""How many nodes each sequence may draft: the number that gives the most tokens per second.

A drafted node is worth the probability that it is accepted and costs what one more row costs, and what drafting it
takes. Nodes of all sequences are taken in order of worth while that raises the step's rate; none at all is always a
candidate and wins ties.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from paceline.engine.cost import CostModel, Floats, Lines

# What a plan must promise over plain decoding. More in a batch where drafts are found here and there: of many estimates
# those that promise too much are chosen. A model's drafts are all alike, and dear where they bring nothing.
MARGIN, MARGIN_EACH, MARGIN_MOST = 0.01, 0.013, 0.1
MODEL_MARGIN = 0.04
COLD_EACH, COLD_MOST = 0.005, 0.1  # on top of that while nothing is known of what promises are worth
EXPLORE_SHARE = 0.005  # of the time: what putting guessed costs to the test may cost
LITTLE = 0.04  # of a step that a trial of fewer nodes may lose
EXPLORE_WITHIN, EXPLORE_MOST = 0.2, 4.0  # no more than that of one step; steps that may be saved up for it
TRIAL_OFF = 0.5  # of a step: more than that says something about the machine
TRIALS = 4  # plans by models that are followed although what they promise is doubted
DEEPEST, MAX_NODES = 16, 1024  # how far ahead a plan looks, and how many nodes one step may take
ENDS = np.arange(1, DEEPEST + 1)[:, None]  # where drafts that cost passes may end
FIRST = 1e6  # more than any node is worth
AMID = 0.4  # of a draft is for nothing: an answer ends amid its last one
TRIED = 256  # numbers of nodes
FEW = 8  # sequences: planning for no more of them takes less without arrays
DEAR = 0.01  # of a plain step: a token ahead that costs more is worth a limit


Ints = npt.NDArray[np.int64]


class Offer(NamedTuple):
    """A draft that a sequence could have."""

    sequence: int
    method: str
    survival: list[float]  # how likely it is to get how far
    weight: float = 1.0  # a node is worth that share of it
    most: int = DEEPEST  # nodes


class Terms(NamedTuple):
    """What a plan is made under."""

    cost: CostModel
    base: int  # rows of the pass without the drafts in question
    plain_s: float  # seconds of such a step
    sequences: int
    value: float  # of a token for each of them
    doubt: float  # in what is promised: from 1 at first to 0
    with_nodes: list[float] | Floats  # seconds of the step by nodes, from 1
    drafting: Mapping[str, Lines]  # by method: seconds of drafting, by size of the number of sequences
    in_step: bool = False  # drafts that cost passes begin ahead, for those only that have one now
    room: float = math.inf  # tokens that a sequence may still say, on average
    trial: int = 1  # steps that a number of nodes of unknown cost would be tried for; 0: not now


class Prospect(NamedTuple):
    """What offers promise: their nodes in order of worth, and the rate with the first 1, 2, ... of them.

    Of a few offers these are plain lists: on caches that a pass has emptied, small operations on arrays cost dearly.
    """

    offers: int
    of: list[int] | Ints  # the offer that each node belongs to
    rates: list[float] | Floats
    limit: int  # the depth where drafts end that cost passes; 0: none does

    @property
    def rate(self) -> float:
        return float(self.rates[_argmax(self.rates)])

    def depths(self, number: int) -> list[int]:
        """Nodes for each offer, of the first so many."""
        if isinstance(self.of, list):
            return [self.of[:number].count(offer) for offer in range(self.offers)]
        depths: list[int] = np.bincount(self.of[:number], minlength=self.offers).tolist()
        return depths


def prospect_of(offers: SequenceOf[Offer], terms: Terms) -> Prospect | None:
    """None: not a node is worth anything.

    A token further ahead may cost its drafter a pass, however few want it: then it must end at some depth.
    """
    if not offers:
        return None
    if len(offers) == 1:
        return _alone(offers[0], terms)
    methods = {name: at for at, name in enumerate({offer.method: None for offer in offers})}
    lines = [terms.drafting[name] for name in methods]
    costs_passes = [line.slope > DEAR * terms.plain_s for line in lines]
    if isinstance(terms.with_nodes, list) and not any(costs_passes):
        return _of_few(offers, terms)
    worth = _worth(offers).ravel()
    by = np.array([methods[offer.method] for offer in offers])
    dear, first = np.array(costs_passes), worth
    if terms.in_step:  # whoever falls out of step has the whole draft made for it alone
        first = worth.copy()
        first[::DEEPEST][dear[by] & (worth[::DEEPEST] > 0)] += FIRST
    order = np.argsort(-first, kind="stable")[: np.count_nonzero(worth)]
    if not len(order):
        return None
    by = by[order // DEEPEST]
    depth = order % DEEPEST + 1
    limit = 0
    if dear.any():
        limit = _best_limit(depth, worth[order], by, lines, terms)
        some = depth <= limit
        order, by, depth = order[some], by[some], depth[some]
    order, by, depth = order[:MAX_NODES], by[:MAX_NODES], depth[:MAX_NODES]
    drafting = sum(line.seconds(by == method, depth) for method, line in enumerate(lines))
    with_nodes = np.asarray(terms.with_nodes[: len(order)])
    rates = (terms.value + np.cumsum(worth[order])) / (with_nodes + drafting)
    return Prospect(len(offers), order // DEEPEST, rates, limit)


def _worth(offers: SequenceOf[Offer]) -> Floats:
    """(offers, DEEPEST) of their nodes, 0 where there are none. Many share what is known of their survival."""
    alike = {id(offer.survival): offer.survival for offer in offers}
    table = np.zeros((len(alike), DEEPEST))
    for row, survival in zip(table, alike.values(), strict=True):
        row[: len(survival)] = survival
    place = {one: at for at, one in enumerate(alike)}
    worth: Floats = table[[place[id(offer.survival)] for offer in offers]]
    worth *= np.array([offer.weight for offer in offers])[:, None]
    most = np.array([offer.most for offer in offers])
    if most.min() < DEEPEST:
        worth[ENDS[:, 0] > most[:, None]] = 0.0
    return worth


def _alone(offer: Offer, terms: Terms) -> Prospect | None:
    """The same of one offer, whose nodes are in order, in a tenth of the time."""
    line, value, weight, with_nodes = terms.drafting[offer.method], terms.value, offer.weight, terms.with_nodes
    a, b, each_s = line.a[0], line.b[0], line.each_s
    limit, gain, rates = 0, 0.0, []
    for depth, alive in enumerate(offer.survival[: offer.most], 1):
        gain += alive * weight
        rates.append((value + gain) / (float(with_nodes[depth - 1]) + (a + b * depth + each_s)))
    if not rates:
        return None
    if line.slope > DEAR * terms.plain_s:
        best = [top * _to_the_end(depth, terms) for depth, top in enumerate(itertools.accumulate(rates, max), 1)]
        limit = _argmax(best) + 1
        del rates[limit:]
    return Prospect(1, [0] * len(rates), rates, limit)


def _of_few(offers: SequenceOf[Offer], terms: Terms) -> Prospect | None:
    """The same of a few that cost no passes, in a third of it."""
    nodes = [
        (-alive * offer.weight, at, depth)
        for at, offer in enumerate(offers)
        for depth, alive in enumerate(offer.survival[: offer.most], 1)
        if alive * offer.weight > 0
    ]
    if not nodes:
        return None
    nodes.sort()
    gain, drafting_s, rates = terms.value, 0.0, []
    drafts = {offer.method: (0, 0, 0.0) for offer in offers}  # sequences, tokens ahead, and the seconds that takes
    for (worth, at, depth), seconds in zip(nodes, terms.with_nodes, strict=False):
        method = offers[at].method
        rows, deepest, before = drafts[method]
        if depth == 1 or depth > deepest:
            rows, deepest = rows + (depth == 1), max(deepest, depth)
            taken = terms.drafting[method].at(rows, deepest)
            drafts[method] = rows, deepest, taken
            drafting_s += taken - before
        gain -= worth
        rates.append(gain / (float(seconds) + drafting_s))
    return Prospect(len(offers), [at for _, at, _ in nodes], rates, limit=0)


def _argmax(values: list[float] | Floats) -> int:
    return values.index(max(values)) if isinstance(values, list) else int(values.argmax())


def _to_the_end(depth: Any, terms: Terms) -> Any:
    """The share of what drafts of this depth (or of each of these) promise that is left where answers end amid one."""
    return 1 - AMID * depth / terms.room


def _best_limit(depth: Ints, worth: Floats, by: Ints, lines: SequenceOf[Lines], terms: Terms) -> int:
    """The depth to end at, of nodes in order of worth; of many nodes some of the numbers are tried."""
    taken = depth <= ENDS  # (limits, nodes)
    number, gain = np.cumsum(taken, axis=1), np.cumsum(np.where(taken, worth, 0.0), axis=1)
    drafting = sum((line.seconds(by == method, depth, ENDS) for method, line in enumerate(lines)), np.zeros(1))
    each = -(-len(depth) // TRIED)
    with_nodes = np.asarray(terms.with_nodes)
    some, most = slice((len(depth) - 1) % each, None, each), len(with_nodes)
    number = number[:, some]
    rates = (terms.value + gain[:, some]) / (with_nodes[np.minimum(number, most) - 1] + drafting[:, some])
    rates[number > most] = 0.0
    best = rates.max(axis=1) * _to_the_end(ENDS[:, 0], terms)
    return int(best.argmax()) + 1


class Budget:
    def __init__(self) -> None:
        self._allowance = 0.0  # steps that may be lost to learning what they cost
        self._trials = 0
        self.explores = False  # the last plan is for what it teaches
        self._limit = 1  # where drafts that cost passes ended last
        self.expected_gain: float | None = None  # what drafting promised over plain decoding

    @property
    def limit(self) -> int:
        """The depth where drafts that cost passes ended last."""
        return self._limit

    def spread(self, prospect: Prospect, terms: Terms) -> list[int]:
        """Nodes for each of its offers."""
        self._limit = prospect.limit or self._limit
        return prospect.depths(self._best_number(prospect.rates, terms, prospect.limit > 0))

    def afford(self, steps: float) -> bool:
        """Whether something that costs so many plain steps may be tried."""
        if steps > self._allowance:
            return False
        self._allowance -= max(steps, 0.0)
        return True

    def settle(self, terms: Terms, nodes: int, taken_s: float) -> None:
        """A trial took more than was expected, or less: the next may be as much later or sooner."""
        if 0 < nodes <= len(terms.with_nodes):
            overrun = (taken_s - float(terms.with_nodes[nodes - 1])) / terms.plain_s
            self._allowance -= min(max(overrun, -TRIAL_OFF), TRIAL_OFF)

    def _best_number(self, rates: list[float] | Floats, terms: Terms, dear: bool) -> int:
        """How many nodes, in their order, give the most tokens per second; now and then a number of unknown cost."""
        self.explores = False
        plain = terms.value / terms.plain_s
        best = _argmax(rates)
        self.expected_gain = float(rates[best]) / plain
        self._allowance = min(self._allowance + EXPLORE_SHARE, EXPLORE_MOST)
        others = terms.sequences - 1
        margin = MODEL_MARGIN if dear else min(MARGIN + MARGIN_EACH * others, MARGIN_MOST)
        if self.expected_gain <= 1 + margin:
            return self._fewer(rates, terms)
        doubted = self.expected_gain <= 1 + margin + min(COLD_EACH * others, COLD_MOST) * terms.doubt
        if doubted and not (dear and self._trials < TRIALS):
            return self._fewer(rates, terms)
        self._trials += doubted
        if terms.trial and (unseen := _best_unseen(rates, best, terms)):
            regret = 1 - float(rates[unseen] / rates[best])
            if regret <= EXPLORE_WITHIN and self.afford(terms.trial * regret):
                self.explores = True
                return unseen + 1
        return best + 1

    def _fewer(self, rates: list[float] | Floats, terms: Terms) -> int:
        """Where drafts do not seem to pay: fewer nodes than were ever tried, if that loses next to nothing."""
        rates = rates[: terms.cost.fewer_than_tried(terms.base)]
        if not len(rates):
            return 0
        best = _argmax(rates)
        regret = 1 - float(rates[best]) * terms.plain_s / terms.value
        return best + 1 if regret <= LITTLE and self.afford(max(regret, EXPLORE_SHARE)) else 0


def _best_unseen(rates: list[float] | Floats, best: int, terms: Terms) -> int:
    """Of more nodes than are best, the number to promise most whose cost is a guess; 0: there is none."""
    if isinstance(rates, list):
        some = [at for at in range(best + 1, len(rates)) if not terms.cost.sure_of(terms.base + 1 + at)]
        return max(some, key=rates.__getitem__, default=0)
    unsure = terms.cost.unsure_with(terms.base, len(rates))
    unsure[: best + 1] = False
    return int(np.where(unsure, rates, 0.0).argmax())
