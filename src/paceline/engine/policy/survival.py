"""Survival: the probability that a draft is accepted down to each node, by method and by the level of its support.

Chains are counted by depth: a depth is tried when all depths above it were accepted. The first guess takes each
accepted token for one more of context. Trees are counted by bands of nodes, the likeliest first: the share of drafts
with a node on the accepted path is its gain, the share of drafts that have the node at all is its cost. A method
whose chosen drafts bring less than expected has its survival lowered as a whole, since of many estimates the highest
are chosen.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence as SequenceOf
from itertools import accumulate, pairwise
from operator import mul
from typing import Any, NamedTuple

from paceline.config import MAX_K, TRAINED_LEVEL
from paceline.engine.policy import DEEPEST
from paceline.engine.policy.priors import BANDS, BUCKETS, TREE_GUESS

MEMORY = 128.0  # tries of a node, after which old ones count half, so that a change of workload is noticed
GUESS = 16.0  # drafts, or accepted tokens; weight of the first guess, and of full trust in promised tokens
EVEN = 3.0  # tokens of context at which a lookup is right every second time
SUREST = 0.9  # highest acceptance rate of a first guess

ONES = [1.0] * MAX_K
SIZES = [last - first for first, last in pairwise(BANDS)]
Key = tuple[str, bool, int]


@functools.cache
def bucket(level: int) -> int:
    """Return the lowest level that shares a record with this one."""
    return max((least for least in BUCKETS if level >= least), default=0)


@functools.cache
def first_guess(level: int) -> list[float]:
    """Return, by depth, the guessed probability that a token is accepted behind tokens that were."""
    return [min(context**2 / (context**2 + EVEN**2), SUREST) for context in range(level, level + DEEPEST)]


class Estimate(NamedTuple):
    """The expectation of the next draft."""

    survival: list[float]  # by depth, or by node of a tree; non-increasing
    shares: list[float]  # by node: of drafts that have it, where it may be drafted; below 1 in trees
    drafts: float  # that the expectation comes from


class ChainRecord:
    """Columns by depth: drafts that reached it, and drafts whose token there was accepted."""

    def __init__(self, level: int) -> None:
        self._level = level
        self.columns = [[0.0] * DEEPEST for _ in range(2)]

    def note(self, limit: int, nodes: int, path: SequenceOf[int]) -> None:
        tried, hit = self.columns
        for depth in range(min(nodes, len(path) + 1)):
            tried[depth] += 1
            hit[depth] += depth < len(path)
            if tried[depth] > MEMORY:
                tried[depth], hit[depth] = tried[depth] / 2, hit[depth] / 2

    def estimate(self) -> Estimate:
        """Multiply the rates of all depths down to each one."""
        guess, (tried, hit) = first_guess(self._level), self.columns
        if self._level >= TRAINED_LEVEL:  # depths are alike: those seldom reached are as good as the others
            better = (sum(hit) + GUESS) / (sum(map(mul, tried, guess)) + GUESS)
            guess = [min(one * better, 1.0) for one in guess]
        rates = [(right + GUESS * one) / (all_ + GUESS) for all_, right, one in zip(tried, hit, guess, strict=True)]
        return Estimate(list(accumulate(rates, mul)), ONES, tried[0])


class TreeRecord:
    """Columns by band of nodes: might have been drafted, acceptance guessed of these, accepted, drafted."""

    def __init__(self) -> None:
        self.columns = [[0.0] * len(SIZES) for _ in range(4)]

    def note(self, limit: int, nodes: int, path: SequenceOf[int]) -> None:
        tried, expected, hit, drafted = self.columns
        limit = max(limit, nodes)
        for band, (first, size) in enumerate(zip(BANDS, SIZES, strict=False)):
            if first >= limit:
                break
            last = min(first + size, limit)
            tried[band] += last - first
            expected[band] += sum(TREE_GUESS[first:last])
            hit[band] += sum([first <= node < last for node in path])
            drafted[band] += max(min(last, nodes) - first, 0)
            if tried[band] > MEMORY * size:
                for column in self.columns:
                    column[band] /= 2

    def estimate(self) -> Estimate:
        """Correct the guess by the record of all nodes, and then band by band: single late nodes are accepted seldom,
        so the lowest of their rates would be chance."""
        tried, expected, hit, drafted = self.columns
        better = (sum(hit) + GUESS) / (sum(expected) + GUESS)
        survival, shares, least, share = list[float](), list[float](), 1.0, 1.0
        for band, (first, size) in enumerate(zip(BANDS, SIZES, strict=False)):
            factor = better * (hit[band] + GUESS) / (better * expected[band] + GUESS)
            share = min(share, (drafted[band] + GUESS) / (tried[band] + GUESS))
            for guess in TREE_GUESS[first : first + size]:
                least = min(least, guess * factor)
                survival.append(least)
            shares += [share] * size
        return Estimate(survival, shares, tried[0])


Record = ChainRecord | TreeRecord


class SurvivalTable:
    def __init__(self) -> None:
        self._records: dict[Key, Record] = {}
        self._promises: dict[str, tuple[float, float]] = {}  # by method of chains: tokens expected and accepted, fading
        self._fresh: set[str] = set()  # methods tried since the last `fade`
        self._estimates: dict[Key, Estimate] = {}  # until the record changes

    def estimate(self, method: str, sampled: bool, level: int, *, tree: bool = False) -> Estimate:
        by_record = self._by_record((method, sampled, bucket(level)), tree)
        promised, accepted = self._promises.get(method, (0.0, 0.0))
        if accepted >= promised:
            return by_record
        trust = (accepted + GUESS) / (promised + GUESS)
        return by_record._replace(survival=[trust * one for one in by_record.survival])

    def _by_record(self, key: Key, tree: bool) -> Estimate:
        known = self._estimates.get(key)
        if known is None:
            known = self._estimates[key] = (self._records.get(key) or _empty(key[2], tree)).estimate()
        return known

    def note_chain(self, method: str, sampled: bool, level: int, depth: int, accepted: int) -> None:
        """Note a chain of `depth` tokens, of which `accepted` were accepted."""
        key, depth = (method, sampled, bucket(level)), min(depth, DEEPEST)
        promised, kept = self._promises.get(method, (0.0, 0.0))
        promised += sum(self._by_record(key, False).survival[:depth])
        self._promises[method] = promised * (1 - 1 / MEMORY), (kept + accepted) * (1 - 1 / MEMORY)
        self._note(key, depth, depth, range(accepted), tree=False)

    def note_tree(self, method: str, sampled: bool, level: int, limit: int, nodes: int, path: SequenceOf[int]) -> None:
        """Note a tree of `nodes` nodes where `limit` might have been drafted; `path`: its accepted nodes."""
        self._note((method, sampled, bucket(level)), limit, nodes, path, tree=True)

    def _note(self, key: Key, limit: int, nodes: int, path: SequenceOf[int], *, tree: bool) -> None:
        if key not in self._records:
            self._records[key] = _empty(key[2], tree)
        self._records[key].note(limit, nodes, path)
        self._fresh.add(key[0])
        self._estimates.pop(key, None)

    def fade(self) -> None:
        """Halve the records of methods that were not tried since the last call: they come to a second chance."""
        for key, record in self._records.items():
            if key[0] not in self._fresh:
                record.columns[:] = [[one / 2 for one in column] for column in record.columns]
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
        return [[*key, *record.columns] for key, record in self._records.items()]

    @classmethod
    def of_state(cls, state: SequenceOf[SequenceOf[Any]]) -> SurvivalTable:
        """Return the table that `state` described; raise ValueError where it has another form."""
        table = cls()
        for method, sampled, level, *columns in state:
            record = _empty(int(level), tree=len(columns) > 2)
            columns = [[float(one) for one in column] for column in columns]
            tried = columns[0]
            fits = [len(column) for column in columns] == [len(column) for column in record.columns]
            if (
                not fits
                or level not in BUCKETS
                or not all(
                    0 <= one <= most < 1e6 for column in columns for one, most in zip(column, tried, strict=True)
                )
            ):
                raise ValueError("an acceptance of another form")
            record.columns = columns
            table._records[str(method), bool(sampled), int(level)] = record
        return table


def _empty(level: int, tree: bool) -> Record:
    return TreeRecord() if tree else ChainRecord(level)
