"""Survival: the probability that a draft is accepted down to each node, by method and by the level of its support.

Chains are counted by depth: a depth is tried when all depths above it were accepted. The first guess takes each
accepted token for one more of context. Trees are counted by node, the likeliest first: the share of drafts with the
n-th node on the accepted path is its gain, the share of drafts that have an n-th node at all is its cost. A method
whose chosen drafts bring less than expected has its survival lowered as a whole, since of many estimates the highest
are chosen.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence as SequenceOf
from typing import Any, NamedTuple

import numpy as np

from paceline.config import MAX_K, TRAINED_LEVEL
from paceline.engine.policy import DEEPEST
from paceline.engine.policy.allocate import Floats
from paceline.engine.policy.priors import BANDS, BUCKETS, TREE_GUESS

MEMORY = 128.0  # tries of a node, after which old ones count half, so that a change of workload is noticed
GUESS = 16.0  # drafts, or accepted tokens; weight of the first guess, and of full trust in promised tokens
EVEN = 3.0  # tokens of context at which a lookup is right every second time
SUREST = 0.9  # highest acceptance rate of a first guess

ONES = np.ones(MAX_K)
TRIED, HIT, DRAFTED = range(3)  # rows of a record
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


class Estimate(NamedTuple):
    """The expectation of the next draft."""

    survival: Floats  # by depth, or by node of a tree
    shares: Floats  # by node: of drafts that have it, where it may be drafted; below 1 in trees
    drafts: float  # that the expectation comes from


def _estimate_tree(record: Floats) -> Estimate:
    """Correct the guess by the record of all nodes, and then band by band: single late nodes are accepted seldom, so
    the lowest of their rates would be chance."""
    tried, hit, drafted = np.add.reduceat(record, BANDS[:-1], axis=1)
    expected = np.add.reduceat(record[TRIED] * TREE_GUESS, BANDS[:-1])
    better = (hit.sum() + GUESS) / (expected.sum() + GUESS)
    factors = better * (hit + GUESS) / (better * expected + GUESS)
    share = np.minimum.accumulate((drafted + GUESS) / (tried + GUESS))
    sizes = np.diff(BANDS)
    survival = np.minimum.accumulate(np.minimum(TREE_GUESS * factors.repeat(sizes), 1.0))
    return Estimate(survival, share.repeat(sizes), record.item(TRIED, 0))


def _estimate_chain(record: Floats, level: int) -> Estimate:
    """Multiply the rates of all depths down to each one."""
    guess, (tried, hit) = first_guess(level), record[:DRAFTED, :DEEPEST]
    if level >= TRAINED_LEVEL:  # depths are alike: those seldom reached are as good as the others
        guess = np.minimum(guess * (hit.sum() + GUESS) / (tried @ guess + GUESS), 1.0)
    return Estimate(((hit + GUESS * guess) / (tried + GUESS)).cumprod(), ONES, record.item(TRIED, 0))


class SurvivalTable:
    def __init__(self) -> None:
        self._records: dict[Key, Floats] = {}  # (3, MAX_K)
        self._promises: dict[str, tuple[float, float]] = {}  # by method of chains: tokens expected and accepted, fading
        self._fresh: set[str] = set()  # methods tried since the last `fade`
        self._estimates: dict[Key, Estimate] = {}  # until the record changes
        self._changed: set[Key] = set()  # records noted in since the last `estimate`

    def estimate(self, method: str, sampled: bool, level: int, *, tree: bool = False) -> Estimate:
        for key in self._changed:
            self._estimates.pop(key, None)
        self._changed.clear()
        by_record = self._by_record((method, sampled, bucket(level)), tree)
        promised, accepted = self._promises.get(method, (0.0, 0.0))
        if accepted >= promised:
            return by_record
        return by_record._replace(survival=by_record.survival * ((accepted + GUESS) / (promised + GUESS)))

    def _by_record(self, key: Key, tree: bool) -> Estimate:
        known = self._estimates.get(key)
        if known is None:
            record = self._records.get(key, np.zeros((3, MAX_K)))
            known = self._estimates[key] = _estimate_tree(record) if tree else _estimate_chain(record, key[2])
        return known

    def note_chain(self, method: str, sampled: bool, level: int, depth: int, accepted: int) -> None:
        """Note a chain of `depth` tokens, of which `accepted` were accepted."""
        key, depth = (method, sampled, bucket(level)), min(depth, DEEPEST)
        promised, kept = self._promises.get(method, (0.0, 0.0))
        promised += float(self._by_record(key, False).survival[:depth].sum())
        self._promises[method] = promised * (1 - 1 / MEMORY), (kept + accepted) * (1 - 1 / MEMORY)
        tried = min(depth, accepted + 1)
        self._note(key, tried, tried, slice(min(accepted, depth)))

    def note_tree(self, method: str, sampled: bool, level: int, limit: int, nodes: int, path: SequenceOf[int]) -> None:
        """Note a tree of `nodes` nodes where `limit` might have been drafted; `path`: its accepted nodes."""
        self._note((method, sampled, bucket(level)), max(limit, nodes), nodes, list(path))

    def _note(self, key: Key, tried: int, drafted: int, hit: Any) -> None:
        record = self._records.setdefault(key, np.zeros((3, MAX_K)))
        record[TRIED, :tried] += 1
        record[HIT, hit] += 1
        record[DRAFTED, :drafted] += 1
        if record.item(0) > MEMORY:
            record[:, record[TRIED] > MEMORY] /= 2
        self._fresh.add(key[0])
        self._changed.add(key)

    def fade(self) -> None:
        """Halve the records of methods that were not tried since the last call: they come to a second chance."""
        for key, record in self._records.items():
            if key[0] not in self._fresh:
                record /= 2
        for method in self._promises.keys() - self._fresh:
            promised, kept = self._promises[method]
            self._promises[method] = promised / 2, kept / 2
        self._fresh.clear()
        self._estimates.clear()

    def forget(self, method: str) -> None:
        """Drop the method's record, which no longer holds."""
        self._records = {key: record for key, record in self._records.items() if key[0] != method}
        self._promises.pop(method, None)
        self._estimates.clear()

    def state(self) -> list[list[Any]]:
        return [[*key, *record.tolist()] for key, record in self._records.items()]

    @classmethod
    def of_state(cls, state: SequenceOf[SequenceOf[Any]]) -> SurvivalTable:
        """Return the table that `state` described; raise ValueError where it has another form."""
        table = cls()
        for method, sampled, level, *columns in state:
            record = np.array(columns, np.float64)
            fits = record.shape == (3, MAX_K) and level in BUCKETS and record.max() < 1e6
            if not fits or not ((record >= 0) & (record <= record[TRIED])).all():
                raise ValueError("an acceptance of another form")
            table._records[str(method), bool(sampled), int(level)] = record
        return table
