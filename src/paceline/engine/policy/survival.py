"""Survival: how likely a draft is to be accepted down to each depth, by method and by the evidence for it.

Tries and hits are counted per (method, sampled or greedy, evidence) and depth, over a first guess in which every token
that held counts as one more of context. All of it looks back at committed tokens: a depth is tried when everything
above it held. What chosen drafts brought over what they promised lowers a method's survival as a whole, since of many
estimates the highest are chosen.

Of trees the record is by node: their drafters put the likeliest first, so how often the n-th node is on the accepted
path is what a tree gains by it, and how often it is drafted at all is what it costs: a drafter may leave out nodes that
it finds unlikely. Others are chains, one node per depth.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Sequence as SequenceOf
from typing import Any, NamedTuple

import numpy as np

from paceline.config import MAX_K
from paceline.drafters.base import TRAINED_LEVEL
from paceline.engine.policy.costs import Floats
from paceline.engine.policy.interface import DEEPEST

MEMORY = 256.0  # tries at a depth after which old ones count half, so that a change of workload is noticed
GUESS_TRIALS = 16.0  # tries that the first guess counts for, and promised tokens that trust in a lookup does
POOL_TRIALS = 4.0  # tries that it counts for at all depths together, where one speaks for the others
TREE_POOL = 8.0  # accepted nodes that it counts for of trees: they come several at once or not at all
BANDS = (0, 1, 2, 4, 8, 16, 32, MAX_K)  # nodes of a tree whose records are taken together
BEGINS, BAND_SIZES = np.array(BANDS[:-1]), np.diff(BANDS)
HIGHEST = 0.99  # that a rate may be: nothing is sure
EVEN = 3.0  # tokens of context at which a lookup is right every second time
SUREST = 0.9  # that a first guess may be
WINDOW = 64.0  # steps after which promises have faded to a third
# Of the n-th node of a tree, before any was seen: FIRST_NODE (1 + n / 2)**-FALL. It is about what trained drafters that
# were looked at have: 2.5 accepted tokens of 15 nodes, and 3.2 of 60.
FIRST_NODE, FALL = 0.7, 1.35
BUCKETS = (1, 2, 3, 4, 6, 9, 16)  # evidence from which one record ends and the next begins

COLUMNS = ("tried", "hit", "drafted")  # of a record
TRIED, HIT, DRAFTED = range(3)

NOTHING_TRIED = [[0.0] * DEEPEST] * 3

Key = tuple[str, bool, int]


@functools.cache
def bucket(level: int) -> int:
    """The least evidence of those that share its record."""
    return max((least for least in BUCKETS if level >= least), default=0)


@functools.cache
def first_guess(level: int) -> Floats:
    """By depth, before anything was seen: that a token holds behind a draft that held so far."""
    context = level + np.arange(DEEPEST)
    return np.minimum(context**2 / (context**2 + EVEN**2), SUREST)


@functools.cache
def first_guess_of_trees() -> Floats:
    """By node, before anything was seen: that it is on the accepted path."""
    return np.asarray(FIRST_NODE * (1 + np.arange(MAX_K) / 2) ** -FALL)


class Outlook(NamedTuple):
    """What the next draft promises."""

    survival: Floats  # of depths, or of a tree's nodes
    shares: Floats | None  # of drafts in which a node of a tree is there, if so many are asked for
    promised: float  # tokens, of a whole draft


def _of_trees(record: Floats | None) -> Outlook:
    """The guess as a whole by what the record says of all nodes, and then band by band. Single late nodes are accepted
    so seldom that the lowest of their rates would be chance, and no later node may have more."""
    guess = first_guess_of_trees()
    if record is None:
        return Outlook(guess, np.ones(MAX_K), guess.sum().item())
    tried, hit, drafted = np.add.reduceat(record, BEGINS, axis=1).tolist()
    expected = np.add.reduceat(record[TRIED] * guess, BEGINS).tolist()
    better, share = (sum(hit) + TREE_POOL) / (sum(expected) + TREE_POOL), 1.0
    factors, shares = list[float](), list[float]()
    for band_tried, band_hit, band_drafted, band_expected in zip(tried, hit, drafted, expected, strict=True):
        factors.append(better * (band_hit + TREE_POOL) / (better * band_expected + TREE_POOL))
        share = min(share, (band_drafted + TREE_POOL * share) / (band_tried + TREE_POOL))
        shares.append(share)
    rates = np.minimum(guess * np.array(factors).repeat(BAND_SIZES), HIGHEST)
    survival = np.minimum.accumulate(rates)
    return Outlook(survival, np.array(shares).repeat(BAND_SIZES), survival.sum().item())


def _of_chains(record: Floats | None, level: int) -> Outlook:
    """By depth, that a token holds behind those that did."""
    guess: list[float] = first_guess(level).tolist()
    tried, hit, _ = NOTHING_TRIED if record is None else record.tolist()
    if level >= TRAINED_LEVEL:  # depths are alike: those seldom reached are as good as the others
        expected = sum([tries * rate for tries, rate in zip(tried, guess, strict=True)])
        better = (sum(hit) + POOL_TRIALS) / (expected + POOL_TRIALS)
        guess = [min(rate * better, HIGHEST) for rate in guess]
    held, survival = 1.0, list[float]()
    for tries, hits, rate in zip(tried, hit, guess, strict=True):
        held *= (hits + GUESS_TRIALS * rate) / (tries + GUESS_TRIALS)
        survival.append(held)
    return Outlook(np.array(survival), None, sum(survival))


def _count(column: Floats, numbers: SequenceOf[int]) -> None:
    """Add to each place how many of the numbers go that far."""
    counts: dict[int, int] = {}
    for number in numbers:
        counts[number] = counts.get(number, 0) + 1
    for number, count in counts.items():
        column[:number] += count


class Acceptance:
    def __init__(self) -> None:
        self._records: dict[Key, Floats] = {}  # (3, depths), of trees (3, nodes): TRIED, HIT, DRAFTED
        self._promises: dict[str, tuple[float, float]] = {}  # by method of chains: tokens promised and kept, fading
        self._fresh: set[str] = set()  # methods tried since the last `fade`
        # Drafts of the step that is being noted: depth and accepted nodes; of trees nodes asked for, drafted, accepted.
        self._chains: defaultdict[Key, list[tuple[int, int]]] = defaultdict(list)
        self._trees: defaultdict[Key, list[tuple[int, int, SequenceOf[int]]]] = defaultdict(list)
        # Until the records change:
        self._outlooks: dict[Key, Outlook] = {}
        self._tried: dict[str, bool] = {}

    def outlook(self, method: str, sampled: bool, level: int, *, tree: bool = False) -> Outlook:
        found = self._by_record((method, sampled, bucket(level)), tree)
        promised, kept = self._promises.get(method, (0.0, 0.0))
        if kept >= promised:  # so it is of trees: all have one record, none of many was chosen for being high
            return found
        trust = (kept + GUESS_TRIALS) / (promised + GUESS_TRIALS)
        return Outlook(trust * found.survival, None, trust * found.promised)

    def _by_record(self, key: Key, tree: bool) -> Outlook:
        found = self._outlooks.get(key)
        if found is None:
            record = self._records.get(key)
            found = self._outlooks[key] = _of_trees(record) if tree else _of_chains(record, key[2])
        return found

    def survival(self, method: str, sampled: bool, level: int, *, tree: bool = False) -> Floats:
        """(DEEPEST,) that the first 1, 2, ... tokens of a draft are all accepted; (MAX_K,) that each node of a tree is,
        which no node has more of than the one before."""
        return self.outlook(method, sampled, level, tree=tree).survival

    def is_tried(self, method: str) -> bool:
        """Its record weighs more than the first guess."""
        if method not in self._tried:
            tries = [float(record[TRIED, 0]) for (name, *_), record in self._records.items() if name == method]
            self._tried[method] = sum(tries) >= GUESS_TRIALS
        return self._tried[method]

    def note(self, method: str, sampled: bool, level: int, depth: int, accepted: int) -> None:
        """A draft `depth` deep was accepted so far."""
        self._chains[method, sampled, bucket(level)].append((min(depth, DEEPEST), accepted))

    def note_tree(self, method: str, sampled: bool, level: int, asked: int, nodes: int, path: SequenceOf[int]) -> None:
        """A tree of so many nodes was judged where `asked` might have been drafted; `path`: its accepted nodes."""
        self._trees[method, sampled, bucket(level)].append((min(max(asked, nodes), MAX_K), nodes, path))

    def end_step(self) -> None:
        """All drafts of a step were noted: learn from them. Older promises count less."""
        for key, chains in self._chains.items():
            promised, kept = self._promises.get(key[0], (0.0, 0.0))
            told = [0.0, *self._by_record(key, False).survival.cumsum().tolist()]  # by the steps before
            promised += sum([told[depth] for depth, _ in chains])
            self._promises[key[0]] = promised, kept + sum([accepted for _, accepted in chains])
            record = self._record(key, DEEPEST)
            _count(record[TRIED], [min(depth, accepted + 1) for depth, accepted in chains])
            _count(record[HIT], [accepted for _, accepted in chains])
            record[DRAFTED] = record[TRIED]
            self._noted(key, record)
        for method in {key[0] for key in self._chains}:
            promised, kept = self._promises[method]
            self._promises[method] = promised * (1 - 1 / WINDOW), kept * (1 - 1 / WINDOW)
        for key, trees in self._trees.items():
            record = self._record(key, MAX_K)
            _count(record[TRIED], [asked for asked, _, _ in trees])
            _count(record[DRAFTED], [nodes for _, nodes, _ in trees])
            for *_, path in trees:
                for node in path:
                    record[HIT, node] += 1
            self._noted(key, record)
        self._chains.clear()
        self._trees.clear()

    def _record(self, key: Key, width: int) -> Floats:
        if key not in self._records:
            self._records[key] = np.zeros((3, width))
        return self._records[key]

    def _noted(self, key: Key, record: Floats) -> None:
        if np.maximum.reduce(record[TRIED]) > MEMORY:
            record[:, record[TRIED] > MEMORY] /= 2
        self._fresh.add(key[0])
        self._outlooks.pop(key, None)
        self._tried.pop(key[0], None)

    def fade(self) -> None:
        """Called now and then: methods that were not tried since the last time are on their way to a second chance."""
        for key, record in self._records.items():
            if key[0] not in self._fresh:
                record /= 2
        for method in self._promises.keys() - self._fresh:
            promised, kept = self._promises[method]
            self._promises[method] = promised / 2, kept / 2
        self._fresh.clear()
        self._changed()

    def forget(self, method: str) -> None:
        """Its record no longer holds: it is met anew."""
        self._records = {key: record for key, record in self._records.items() if key[0] != method}
        self._promises.pop(method, None)
        self._changed()

    def _changed(self) -> None:
        self._outlooks.clear()
        self._tried.clear()

    def state(self) -> list[dict[str, Any]]:
        return [
            {
                "method": method,
                "sampled": sampled,
                "evidence": level,
                **dict(zip(COLUMNS, record.tolist(), strict=True)),
            }
            for (method, sampled, level), record in self._records.items()
        ]

    @classmethod
    def of_state(cls, state: list[dict[str, Any]]) -> Acceptance:
        made = cls()
        for entry in state:
            record = np.array([entry[name] for name in COLUMNS], np.float64)
            fits = record.ndim == 2 and record.shape[1] in (DEEPEST, MAX_K) and int(entry["evidence"]) in BUCKETS
            if not fits or not (np.isfinite(record) & (record >= 0) & (record <= record[TRIED])).all():
                raise ValueError("an acceptance of another form")
            made._records[str(entry["method"]), bool(entry["sampled"]), int(entry["evidence"])] = record
        return made
