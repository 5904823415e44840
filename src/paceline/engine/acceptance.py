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
import itertools
from collections.abc import Sequence as SequenceOf
from collections.abc import Set as AbstractSet
from typing import Any

import numpy as np

from paceline.config import MAX_K
from paceline.drafters.base import LEARNED
from paceline.engine.cost import Floats
from paceline.engine.policy import DEEPEST

MEMORY = 256.0  # tries at a depth after which old ones count half, so that a change of workload is noticed
GUESS_TRIALS = 16.0  # tries that the first guess counts for, and promised tokens that trust in a lookup does
POOL_TRIALS = 4.0  # tries that it counts for at all depths together, where one speaks for the others
TREE_POOL = 8.0  # accepted nodes that it counts for of trees: they come several at once or not at all
BANDS = (0, 1, 2, 4, 8, 16, 32, MAX_K)  # nodes of a tree whose records are taken together
BAND_SIZES = tuple(end - begin for begin, end in itertools.pairwise(BANDS))
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

Key = tuple[str, bool, int]


@functools.cache
def bucket(evidence: int) -> int:
    """The least evidence of those that share its record."""
    return max((least for least in BUCKETS if evidence >= least), default=0)


@functools.cache
def first_guess(evidence: int) -> Floats:
    """By depth, before anything was seen: that a token holds behind a draft that held so far."""
    context = evidence + np.arange(DEEPEST)
    return np.minimum(context**2 / (context**2 + EVEN**2), SUREST)


@functools.cache
def first_guess_of_trees() -> Floats:
    """By node, before anything was seen: that it is on the accepted path."""
    return np.asarray(FIRST_NODE * (1 + np.arange(MAX_K) / 2) ** -FALL)


def _rates_of_trees(record: Floats, guess: Floats) -> Floats:
    """The guess as a whole by what the record says of all nodes, and then band by band. Single late nodes are accepted
    so seldom that the lowest of their rates would be chance, and no later node may have more."""
    hit, expected = record[HIT], record[TRIED] * guess
    better = (hit.sum() + TREE_POOL) / (expected.sum() + TREE_POOL)
    band = (_by_band(hit) + TREE_POOL) / (better * _by_band(expected) + TREE_POOL)
    rates: Floats = np.minimum(guess * better * band.repeat(BAND_SIZES), HIGHEST)
    return rates


def _shares_of(record: Floats | None) -> Floats:
    if record is None:
        return np.ones(MAX_K)
    share, shares = 1.0, list[float]()
    for tried, drafted in zip(_by_band(record[TRIED]).tolist(), _by_band(record[DRAFTED]).tolist(), strict=True):
        share = min(share, (drafted + TREE_POOL * share) / (tried + TREE_POOL))
        shares.append(share)
    return np.repeat(shares, BAND_SIZES)


def _by_band(nodes: Floats) -> Floats:
    return np.add.reduceat(nodes, BANDS[:-1])


class Acceptance:
    def __init__(self) -> None:
        self._records: dict[Key, Floats] = {}  # (3, depths), of trees (3, nodes): TRIED, HIT, DRAFTED
        self._promises: dict[str, tuple[float, float]] = {}  # by method: tokens promised and kept, fading
        self._fresh: set[str] = set()  # methods tried since the last `fade`
        # Survival by the records, and shares, until the records of their method change.
        self._by_key: dict[Key, Floats] = {}
        self._shares: dict[Key, Floats] = {}

    def survival(self, method: str, sampled: bool, evidence: int, *, tree: bool = False) -> Floats:
        """(DEEPEST,) that the first 1, 2, ... tokens of a draft are all accepted; (MAX_K,) that each node of a tree is,
        which no node has more of than the one before."""
        by_record = self._by_record((method, sampled, bucket(evidence)), tree)
        if tree:  # one record for all of its drafts: none of many estimates was chosen for being high
            return by_record
        promised, kept = self._promises.get(method, (0.0, 0.0))
        trust = min((kept + GUESS_TRIALS) / (promised + GUESS_TRIALS), 1.0)
        return trust * by_record

    def shares(self, method: str, sampled: bool, evidence: int) -> Floats:
        """(MAX_K,) of drafts that are trees: the share in which each node is drafted, if so many are asked for."""
        key = method, sampled, bucket(evidence)
        if key not in self._shares:
            self._shares[key] = _shares_of(self._records.get(key))
        return self._shares[key]

    def _by_record(self, key: Key, tree: bool) -> Floats:
        if key not in self._by_key:
            rates = self._rates(key, first_guess_of_trees() if tree else first_guess(key[2]))
            self._by_key[key] = np.asarray(np.minimum.accumulate(rates) if tree else np.cumprod(rates), np.float64)
        return self._by_key[key]

    def _rates(self, key: Key, guess: Floats) -> Floats:
        """That a token holds behind those that did, by depth; of a tree's nodes, that they hold."""
        record = self._records.get(key)
        if record is None:
            return guess
        if len(guess) == MAX_K:
            return _rates_of_trees(record, guess)
        tried, hit = record[TRIED], record[HIT]
        if key[2] >= LEARNED:  # depths are alike: those seldom reached are as good as the others
            better = (hit.sum() + POOL_TRIALS) / ((tried * guess).sum() + POOL_TRIALS)
            guess = np.minimum(guess * better, HIGHEST)
        rates: Floats = (hit + GUESS_TRIALS * guess) / (tried + GUESS_TRIALS)
        return rates

    def is_tried(self, method: str) -> bool:
        """Its record weighs more than the first guess."""
        tries = [float(record[TRIED, 0]) for (name, *_), record in self._records.items() if name == method]
        return sum(tries) >= GUESS_TRIALS

    def note(self, method: str, sampled: bool, evidence: int, depth: int, accepted: int) -> None:
        """A draft `depth` deep was accepted so far; what it promised is by the records of the steps before."""
        tried = min(depth, accepted + 1, DEEPEST)
        self._note((method, sampled, bucket(evidence)), depth, tried, tried, range(accepted), DEEPEST)

    def note_tree(
        self, method: str, sampled: bool, evidence: int, asked: int, nodes: int, path: SequenceOf[int]
    ) -> None:
        """A tree of so many nodes was judged where `asked` might have been drafted; `path`: its accepted nodes."""
        asked = min(max(asked, nodes), MAX_K)
        self._note((method, sampled, bucket(evidence)), asked, asked, nodes, path, MAX_K)

    def _note(self, key: Key, size: int, tried: int, drafted: int, hits: SequenceOf[int], width: int) -> None:
        """A draft of which `size` depths or nodes were promised and the first `tried` were put to the test."""
        promised, kept = self._promises.get(key[0], (0.0, 0.0))
        told = float(self._by_record(key, width == MAX_K)[:size].sum())
        self._promises[key[0]] = promised + told, kept + len(hits)
        record = self._records.setdefault(key, np.zeros((3, width)))
        record[TRIED, :tried] += 1
        record[DRAFTED, :drafted] += 1
        for at in hits:
            if at < tried:
                record[HIT, at] += 1
        if record[TRIED].max() > MEMORY:
            record[:, record[TRIED] > MEMORY] /= 2
        self._fresh.add(key[0])

    def end_step(self, methods: AbstractSet[str]) -> None:
        """A step with drafts by these was noted: older promises count less."""
        self._changed(methods)
        for method in methods & self._promises.keys():
            promised, kept = self._promises[method]
            self._promises[method] = promised * (1 - 1 / WINDOW), kept * (1 - 1 / WINDOW)

    def fade(self) -> None:
        """Called now and then: methods that were not tried since the last time are on their way to a second chance."""
        for key, record in self._records.items():
            if key[0] not in self._fresh:
                record /= 2
        for method in self._promises.keys() - self._fresh:
            promised, kept = self._promises[method]
            self._promises[method] = promised / 2, kept / 2
        self._fresh.clear()
        self._changed({key[0] for key in self._records})

    def forget(self, method: str) -> None:
        """Its record no longer holds: it is met anew."""
        self._records = {key: record for key, record in self._records.items() if key[0] != method}
        self._promises.pop(method, None)
        self._changed({method})

    def _changed(self, methods: AbstractSet[str]) -> None:
        for made in (self._by_key, self._shares):
            for key in [key for key in made if key[0] in methods]:
                del made[key]

    def state(self) -> list[dict[str, Any]]:
        return [
            {
                "method": method,
                "sampled": sampled,
                "evidence": evidence,
                **dict(zip(COLUMNS, record.tolist(), strict=True)),
            }
            for (method, sampled, evidence), record in self._records.items()
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
