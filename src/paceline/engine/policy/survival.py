"""Survival: the probability that a draft is accepted down to each depth, by method and by the level of its support.

Tries and hits are counted by (method, sampled or greedy, level) and depth, over a first guess in which each accepted
token counts as one more of context. Only committed tokens are counted: a depth is tried when all depths above it were
accepted. A method whose chosen drafts bring less than expected has its survival lowered as a whole, since of many
estimates the highest are chosen.

Trees are counted by node: their drafters put the likeliest node first, so the share of drafts with the n-th node on the
accepted path is its gain, and the share of drafts that have an n-th node at all is its cost. All other drafts are
chains, one node a depth.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Sequence as SequenceOf
from typing import Any, NamedTuple

import numpy as np

from paceline.config import MAX_K, TRAINED_LEVEL
from paceline.engine.policy import DEEPEST
from paceline.engine.policy.costs import Floats

MEMORY = 256.0  # tries at a depth, after which old ones count half, so that a change of workload is noticed
GUESS_TRIALS = 16.0  # weight of the prior, in drafts, and of full trust, in promised tokens
POOL_TRIALS = 4.0  # weight of the prior, in drafts, for all depths together, where one depth speaks for the others
TREE_POOL = 8.0  # weight of the prior, in accepted nodes of trees: they come several at once or not at all
BANDS = (0, 1, 2, 4, 8, 16, 32, MAX_K)  # first nodes of the bands of a tree whose records are taken together
BEGINS, BAND_SIZES = np.array(BANDS[:-1]), np.diff(BANDS)
HIGHEST = 0.99  # highest acceptance rate that a record reports
EVEN = 3.0  # tokens of context at which a lookup is right every second time
SUREST = 0.9  # highest acceptance rate of a first guess
WINDOW = 64.0  # steps after which expected and accepted tokens have faded to a third
# First guess of a tree's n-th node: FIRST_NODE (1 + n / 2)**-FALL; 2.5 accepted tokens of 15 nodes and 3.2 of 60, as
# measured on trained drafters.
FIRST_NODE, FALL = 0.7, 1.35
BUCKETS = (1, 2, 3, 4, 6, 9, 16)  # levels at which a new record begins

COLUMNS = ("tried", "hit", "drafted")  # of a record
TRIED, HIT, DRAFTED = range(3)

NOTHING_TRIED = [[0.0] * DEEPEST] * 3

Key = tuple[str, bool, int]


@functools.cache
def bucket(level: int) -> int:
    """Return the lowest level that shares a record with this one."""
    return max((least for least in BUCKETS if level >= least), default=0)


@functools.cache
def first_guess(level: int) -> Floats:
    """Return, by depth, the guessed probability that a token is accepted behind tokens that were."""
    context = level + np.arange(DEEPEST)
    return np.minimum(context**2 / (context**2 + EVEN**2), SUREST)


@functools.cache
def first_guess_of_trees() -> Floats:
    """Return, by node, the guessed probability that it is on the accepted path."""
    return np.asarray(FIRST_NODE * (1 + np.arange(MAX_K) / 2) ** -FALL)


class SurvivalEstimate(NamedTuple):
    """The expectation of the next draft."""

    survival: Floats  # by depth, or by node of a tree
    shares: Floats | None  # by node of a tree: share of drafts that have it, where it may be drafted
    total: float  # expected tokens of a whole draft


def _estimate_tree(record: Floats | None) -> SurvivalEstimate:
    """Correct the guess by the record of all nodes, and then band by band. Single late nodes are accepted so seldom
    that the lowest of their rates would be chance, and no later node may have more."""
    guess = first_guess_of_trees()
    if record is None:
        return SurvivalEstimate(guess, np.ones(MAX_K), guess.sum().item())
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
    return SurvivalEstimate(survival, np.array(shares).repeat(BAND_SIZES), survival.sum().item())


def _estimate_chain(record: Floats | None, level: int) -> SurvivalEstimate:
    """Multiply the rates of all depths down to each one."""
    guess: list[float] = first_guess(level).tolist()
    tried, hit, _ = NOTHING_TRIED if record is None else record.tolist()
    if level >= TRAINED_LEVEL:  # depths are alike: those seldom reached are as good as the others
        expected = sum([tries * rate for tries, rate in zip(tried, guess, strict=True)])
        better = (sum(hit) + POOL_TRIALS) / (expected + POOL_TRIALS)
        guess = [min(rate * better, HIGHEST) for rate in guess]
    accepted, survival = 1.0, list[float]()
    for tries, hits, rate in zip(tried, hit, guess, strict=True):
        accepted *= (hits + GUESS_TRIALS * rate) / (tries + GUESS_TRIALS)
        survival.append(accepted)
    return SurvivalEstimate(np.array(survival), None, sum(survival))


def _count(column: Floats, numbers: SequenceOf[int]) -> None:
    """Add to each place the count of numbers above it."""
    counts: dict[int, int] = {}
    for number in numbers:
        counts[number] = counts.get(number, 0) + 1
    for number, count in counts.items():
        column[:number] += count


class SurvivalTable:
    def __init__(self) -> None:
        self._records: dict[Key, Floats] = {}  # (3, depths), of trees (3, nodes): TRIED, HIT, DRAFTED
        self._promises: dict[str, tuple[float, float]] = {}  # by method of chains: tokens expected and accepted, fading
        self._fresh: set[str] = set()  # methods tried since the last `fade`
        # Drafts noted since the last `end_step`: depth and accepted nodes; of trees the limit of nodes, the drafted and
        # the accepted ones.
        self._chains: defaultdict[Key, list[tuple[int, int]]] = defaultdict(list)
        self._trees: defaultdict[Key, list[tuple[int, int, SequenceOf[int]]]] = defaultdict(list)
        # Caches, until the records change:
        self._estimates: dict[Key, SurvivalEstimate] = {}
        self._tried: dict[str, bool] = {}

    def estimate(self, method: str, sampled: bool, level: int, *, tree: bool = False) -> SurvivalEstimate:
        """Return the expectation of a draft; one of a tree never lowers trust: all trees of a method share a record, so
        none was chosen for a high one."""
        of_record = self._by_record((method, sampled, bucket(level)), tree)
        promised, accepted = self._promises.get(method, (0.0, 0.0))
        if accepted >= promised:
            return of_record
        trust = (accepted + GUESS_TRIALS) / (promised + GUESS_TRIALS)
        return SurvivalEstimate(trust * of_record.survival, None, trust * of_record.total)

    def _by_record(self, key: Key, tree: bool) -> SurvivalEstimate:
        known = self._estimates.get(key)
        if known is None:
            record = self._records.get(key)
            known = self._estimates[key] = _estimate_tree(record) if tree else _estimate_chain(record, key[2])
        return known

    def survival(self, method: str, sampled: bool, level: int, *, tree: bool = False) -> Floats:
        """Return (DEEPEST,) the probability that the first 1, 2, ... tokens of a draft are all accepted; of a tree
        (MAX_K,) that each node is, non-increasing."""
        return self.estimate(method, sampled, level, tree=tree).survival

    def is_tried(self, method: str) -> bool:
        """The method's record weighs more than the first guess."""
        if method not in self._tried:
            tries = [float(record[TRIED, 0]) for (name, *_), record in self._records.items() if name == method]
            self._tried[method] = sum(tries) >= GUESS_TRIALS
        return self._tried[method]

    def note(self, method: str, sampled: bool, level: int, depth: int, accepted: int) -> None:
        """Note a chain of `depth` tokens, of which `accepted` were accepted."""
        self._chains[method, sampled, bucket(level)].append((min(depth, DEEPEST), accepted))

    def note_tree(self, method: str, sampled: bool, level: int, limit: int, nodes: int, path: SequenceOf[int]) -> None:
        """Note a tree of `nodes` nodes where `limit` might have been drafted; `path`: its accepted nodes."""
        self._trees[method, sampled, bucket(level)].append((min(max(limit, nodes), MAX_K), nodes, path))

    def end_step(self) -> None:
        """Learn from the drafts of a step, all of which were noted; older expectations fade."""
        for key, chains in self._chains.items():
            promised, kept = self._promises.get(key[0], (0.0, 0.0))
            expected = [0.0, *self._by_record(key, False).survival.cumsum().tolist()]  # by the steps before
            promised += sum([expected[depth] for depth, _ in chains])
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
            _count(record[TRIED], [limit for limit, _, _ in trees])
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
        self._estimates.pop(key, None)
        self._tried.pop(key[0], None)

    def fade(self) -> None:
        """Halve the records of methods that were not tried since the last call: they come to a second chance."""
        for key, record in self._records.items():
            if key[0] not in self._fresh:
                record /= 2
        for method in self._promises.keys() - self._fresh:
            promised, kept = self._promises[method]
            self._promises[method] = promised / 2, kept / 2
        self._fresh.clear()
        self._changed()

    def forget(self, method: str) -> None:
        """Drop the method's record, which no longer holds."""
        self._records = {key: record for key, record in self._records.items() if key[0] != method}
        self._promises.pop(method, None)
        self._changed()

    def _changed(self) -> None:
        self._estimates.clear()
        self._tried.clear()

    def state(self) -> list[dict[str, Any]]:
        return [
            {"method": method, "sampled": sampled, "evidence": level} | dict(zip(COLUMNS, record.tolist(), strict=True))
            for (method, sampled, level), record in self._records.items()
        ]

    @classmethod
    def of_state(cls, state: list[dict[str, Any]]) -> SurvivalTable:
        """Return the table that `state` described; raise ValueError where it has another form."""
        table = cls()
        for entry in state:
            record = np.array([entry[name] for name in COLUMNS], np.float64)
            fits = record.ndim == 2 and record.shape[1] in (DEEPEST, MAX_K) and int(entry["evidence"]) in BUCKETS
            if not fits or not (np.isfinite(record) & (record >= 0) & (record <= record[TRIED])).all():
                raise ValueError("an acceptance of another form")
            table._records[str(entry["method"]), bool(entry["sampled"]), int(entry["evidence"])] = record
        return table
