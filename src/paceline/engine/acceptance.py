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
import math
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
HIGHEST = 0.99  # that a rate may be: nothing is sure
EVEN = 3.0  # tokens of context at which a lookup is right every second time
SUREST = 0.9  # that a first guess may be
WINDOW = 64.0  # steps after which promises have faded to a third
# Of the n-th node of a tree, before any was seen: FIRST_NODE (1 + n / 2)**-FALL. It is about what trained drafters that
# were looked at have: 2.5 accepted tokens of 15 nodes, and 3.2 of 60.
FIRST_NODE, FALL = 0.7, 1.35
BUCKETS = (1, 2, 3, 4, 6, 9, 16)  # evidence from which one record ends and the next begins

Key = tuple[str, bool, int]


@functools.cache
def bucket(evidence: int) -> int:
    """The least evidence of those that share its record."""
    return max((least for least in BUCKETS if evidence >= least), default=0)


@functools.cache
def first_guess(evidence: int) -> tuple[float, ...]:
    """By depth, before anything was seen: that a token holds behind a draft that held so far."""
    context = [evidence + depth for depth in range(DEEPEST)]
    return tuple(min(one * one / (one * one + EVEN * EVEN), SUREST) for one in context)


@functools.cache
def first_guess_of_trees() -> tuple[float, ...]:
    """By node, before anything was seen: that it is on the accepted path."""
    return tuple(FIRST_NODE * (1 + node / 2) ** -FALL for node in range(MAX_K))


def _rates_of_trees(tried: SequenceOf[float], hit: SequenceOf[float], guess: SequenceOf[float]) -> list[float]:
    """The guess as a whole by what the record says of all nodes, and then band by band. Single late nodes are accepted
    so seldom that the lowest of their rates would be chance, and no later node may have more."""
    expected = [t * g for t, g in zip(tried, guess, strict=True)]
    better = (sum(hit) + TREE_POOL) / (sum(expected) + TREE_POOL)
    rates: list[float] = []
    for begin, end in itertools.pairwise(BANDS):
        seen = better * sum(expected[begin:end])
        band = (sum(hit[begin:end]) + TREE_POOL) / (seen + TREE_POOL)
        rates += [min(one * better * band, HIGHEST) for one in guess[begin:end]]
    return rates


class Acceptance:
    def __init__(self) -> None:
        self._records: dict[Key, tuple[list[float], list[float]]] = {}  # tried, hit; by depth, of trees by node
        self._kept: dict[Key, list[float]] = {}  # of trees: tries in which the node was drafted
        self._promises: dict[str, tuple[float, float]] = {}  # by method: tokens promised and kept, fading
        self._fresh: set[str] = set()  # methods tried since the last `fade`
        self._by_key: dict[Key, Floats] = {}  # survival by the records, until they change

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
        key, share, shares = (method, sampled, bucket(evidence)), 1.0, list[float]()
        if key not in self._kept:
            return np.ones(MAX_K)
        tried, kept = self._records[key][0], self._kept[key]
        for begin, end in itertools.pairwise(BANDS):
            seen = (sum(kept[begin:end]) + TREE_POOL * share) / (sum(tried[begin:end]) + TREE_POOL)
            share = min(share, seen)
            shares += [share] * (end - begin)
        return np.array(shares)

    def _by_record(self, key: Key, tree: bool) -> Floats:
        if key not in self._by_key:
            rates = np.array(self._rates(key, first_guess_of_trees() if tree else first_guess(key[2])))
            self._by_key[key] = np.minimum.accumulate(rates) if tree else np.cumprod(rates)
        return self._by_key[key]

    def _rates(self, key: Key, guess: tuple[float, ...]) -> SequenceOf[float]:
        """That a token holds behind those that did, by depth; of a tree's nodes, that they hold."""
        if key not in self._records:
            return guess
        tried, hit = self._records[key]
        if len(guess) == MAX_K:
            return _rates_of_trees(tried, hit, guess)
        if key[2] >= LEARNED:  # depths are alike: those seldom reached are as good as the others
            expected = sum(t * g for t, g in zip(tried, guess, strict=True))
            better = (sum(hit) + POOL_TRIALS) / (expected + POOL_TRIALS)
            guess = tuple(min(g * better, HIGHEST) for g in guess)
        return [(h + GUESS_TRIALS * g) / (t + GUESS_TRIALS) for t, h, g in zip(tried, hit, guess, strict=True)]

    def is_tried(self, method: str) -> bool:
        """Its record weighs more than the first guess."""
        return sum(tried[0] for (name, *_), (tried, _) in self._records.items() if name == method) >= GUESS_TRIALS

    def note(self, method: str, sampled: bool, evidence: int, depth: int, accepted: int) -> None:
        """A draft `depth` deep was accepted so far; what it promised is by the records of the steps before."""
        key = method, sampled, bucket(evidence)
        self._note(key, depth, range(min(depth, accepted + 1, DEEPEST)), range(accepted), DEEPEST)

    def note_tree(
        self, method: str, sampled: bool, evidence: int, asked: int, nodes: int, path: SequenceOf[int]
    ) -> None:
        """A tree of so many nodes was judged where `asked` might have been drafted; `path`: its accepted nodes."""
        key, asked = (method, sampled, bucket(evidence)), min(max(asked, nodes), MAX_K)
        kept = self._kept.setdefault(key, [0.0] * MAX_K)
        for at in range(nodes):
            kept[at] += 1
        self._note(key, asked, range(asked), path, MAX_K)

    def _note(self, key: Key, size: int, tries: SequenceOf[int], hits: SequenceOf[int], width: int) -> None:
        promised, kept = self._promises.get(key[0], (0.0, 0.0))
        told = float(self._by_record(key, width == MAX_K)[:size].sum())
        self._promises[key[0]] = promised + told, kept + len(hits)
        tried, hit = self._records.setdefault(key, ([0.0] * width, [0.0] * width))
        for at in tries:
            tried[at] += 1
            hit[at] += at in hits
            if tried[at] > MEMORY:
                tried[at] /= 2
                hit[at] /= 2
                if key in self._kept:
                    self._kept[key][at] /= 2
        self._fresh.add(key[0])

    def end_step(self, methods: AbstractSet[str]) -> None:
        """A step with drafts by these was noted: older promises count less."""
        self._by_key.clear()
        for method in methods & self._promises.keys():
            promised, kept = self._promises[method]
            self._promises[method] = promised * (1 - 1 / WINDOW), kept * (1 - 1 / WINDOW)

    def fade(self) -> None:
        """Called now and then: methods that were not tried since the last time are on their way to a second chance."""
        for key in [key for key in self._records if key[0] not in self._fresh]:
            tried, hit = self._records[key]
            self._records[key] = [one / 2 for one in tried], [one / 2 for one in hit]
            if key in self._kept:
                self._kept[key] = [one / 2 for one in self._kept[key]]
        for method in self._promises.keys() - self._fresh:
            promised, kept = self._promises[method]
            self._promises[method] = promised / 2, kept / 2
        self._fresh.clear()
        self._by_key.clear()

    def forget(self, method: str) -> None:
        """Its record no longer holds: it is met anew."""
        self._records = {key: record for key, record in self._records.items() if key[0] != method}
        self._kept = {key: kept for key, kept in self._kept.items() if key[0] != method}
        self._promises.pop(method, None)
        self._by_key.clear()

    def state(self) -> list[dict[str, Any]]:
        return [
            {"method": key[0], "sampled": key[1], "evidence": key[2], "tried": [*tried], "hit": [*hit]}
            | ({"kept": [*self._kept[key]]} if key in self._kept else {})
            for key, (tried, hit) in self._records.items()
        ]

    @classmethod
    def of_state(cls, state: list[dict[str, Any]]) -> Acceptance:
        made = cls()
        for entry in state:
            tried, hit = [float(one) for one in entry["tried"]], [float(one) for one in entry["hit"]]
            kept = [float(one) for one in entry.get("kept", tried)]
            fits = len(tried) == len(hit) == len(kept) in (DEEPEST, MAX_K) and int(entry["evidence"]) in BUCKETS
            counts = [*zip(hit, tried, strict=True), *zip(kept, tried, strict=True)] if fits else []
            if not fits or not all(0 <= one <= most < math.inf for one, most in counts):
                raise ValueError("an acceptance of another form")
            key = str(entry["method"]), bool(entry["sampled"]), int(entry["evidence"])
            made._records[key] = tried, hit
            if "kept" in entry:
                made._kept[key] = kept
        return made
