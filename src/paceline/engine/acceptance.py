"""How likely a drafted token is to be accepted, by method, by the evidence behind the draft, and by position in it.

Counts are kept per (method, sampled or greedy, evidence), where evidence is how much of the context the draft's source
shares (a function of committed tokens). They decay, so a change of workload is noticed; a sequence's own record bends
them for that sequence. Everything here looks back at committed tokens only.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Any

from paceline.drafters.base import LEARNED

POSITIONS = 16  # deeper ones count as the last
MEMORY = 400.0  # trials after which old ones fade
# Trials that the first guess counts for, by bucket: more for short matches, a dozen of which may fail in a row.
PRIOR_TRIALS = (12.0,) * 4 + (4.0,) * 4
SCALE_TRIALS = 4.0  # the same of how drafts held all in all
ALIKE_TRIALS = 16.0  # that a model's record at all positions counts for at each
HOPELESS = 0.01
BENDS = 32
OWN_FADES, OWN_WEIGHT = 0.95, 8.0  # how far a sequence's own record may lower the common one
TRUST_FADES, TRUST_WEIGHT = 0.99, 3.0  # likewise for what was promised against what came of it
BAD_LUCK = 0.5  # standard deviations: more of it costs batches on slow cores, less costs a single answer
DOUBT_TOKENS = 20.0
EVIDENCE_STEPS = (1, 2, 3, 4, 6, 9, 16)  # where one bucket of evidence ends and the next begins
FIRST_GUESS = (0.0, 0.17, 0.24, 0.49, 0.65, 0.75, 0.85, 0.9)  # by bucket; short matches mean little
MISSES, FEWER = 0.45, 0.85  # once such a one has held: how often the next token does not, and how much less often each

Key = tuple[str, bool, int]


@functools.cache
def bucket(evidence: int) -> int:
    return sum(evidence >= step for step in EVIDENCE_STEPS)


@functools.cache
def prior(evidence_bucket: int) -> tuple[float, ...]:
    """By position, before anything was seen: more evidence is better, and a draft that held so far tends to hold.

    Of short matches that is as it was for answers to the workloads `bench` ships and to training prompts.
    """
    first = FIRST_GUESS[evidence_bucket]
    if first < 1 - MISSES:
        return (first, *[1 - MISSES * FEWER**at for at in range(1, POSITIONS)])
    return (min(first, 0.9), *[min(first + 0.15, 0.9)] * (POSITIONS - 1))


class Record:
    """How often drafts got as far as each position, and past it."""

    def __init__(
        self, tried: SequenceOf[float] = (0.0,) * POSITIONS, hit: SequenceOf[float] = (0.0,) * POSITIONS
    ) -> None:
        self.tried, self.hit = list(tried), list(hit)

    def note(self, drafted: int, accepted: int) -> None:
        tried, hit = self.tried, self.hit
        for at in range(min(drafted, accepted + 1, POSITIONS)):
            tried[at] += 1
            if at < accepted:
                hit[at] += 1
            if tried[at] > MEMORY:
                tried[at] /= 2
                hit[at] /= 2

    def scaled(self, guess: tuple[float, ...]) -> tuple[float, ...]:
        """The guess, higher or lower at every position by how drafts held all in all."""
        expected = sum(map(operator.mul, self.tried, guess))
        scale = (sum(self.hit) + SCALE_TRIALS) / (expected + SCALE_TRIALS)
        return tuple([one * scale for one in guess])


_UNSEEN = Record()


@dataclass
class _Own:
    """One sequence's hits and what was expected of it, fading."""

    hits: float = 0.0
    expected: float = 0.0
    variance: float = 0.0  # of the hits, if they are as expected
    bend: float = 1.0  # what follows from it


class Acceptance:
    def __init__(self) -> None:
        self._records: dict[Key, Record] = {}
        self._own: dict[tuple[str, str], _Own] = {}
        self._promises: dict[str, _Own] = {}  # by method, over all drafts that were chosen

    def bend(self, sequence_key: str, method: str) -> float:
        """How much less than common a method is worth for a sequence, by its own record; in steps: many agree."""
        own = self._own.get((sequence_key, method))
        return 1.0 if own is None else own.bend

    def survival(
        self, method: str, sampled: bool, evidence: int, depth: int, least: float = HOPELESS, bend: float = 1.0
    ) -> list[float]:
        """Probability that the first 1, 2, ..., depth drafted tokens are all accepted, down to `least`."""
        at = bucket(evidence)
        record = self._records.get((method, sampled, at)) or _UNSEEN
        guess, trials = prior(at), PRIOR_TRIALS[at]
        if at >= bucket(LEARNED):  # positions are alike: those seldom reached are as good
            guess, trials = record.scaled(guess), ALIKE_TRIALS
        alive, kept = 1.0, []
        for tried, hit, one in zip(record.tried[:depth], record.hit, guess, strict=False):
            rate = (hit + trials * one) / (tried + trials) * bend
            alive *= rate if rate < 0.99 else 0.99
            if alive < least:
                break
            kept.append(alive)
        return kept

    def note(self, sequence_key: str, method: str, sampled: bool, evidence: int, drafted: int, accepted: int) -> None:
        """A draft of `drafted` tokens met its fate; a shadow draft that was never verified counts as well."""
        if not drafted:
            return
        key = (method, sampled, bucket(evidence))
        record = self._records.get(key) or self._records.setdefault(key, Record())
        guess, trials = FIRST_GUESS[key[2]], PRIOR_TRIALS[key[2]]
        expected = (record.hit[0] + trials * guess) / (record.tried[0] + trials)
        record.note(drafted, accepted)
        mine = sequence_key, method
        own = self._own.get(mine) or self._own.setdefault(mine, _Own())
        own.hits = OWN_FADES * own.hits + (accepted > 0)
        own.expected = OWN_FADES * own.expected + expected
        own.variance = OWN_FADES**2 * own.variance + expected * (1 - expected)
        slack = math.sqrt(own.variance)  # bad luck is no record
        bend = min((own.hits + slack + OWN_WEIGHT) / (own.expected + OWN_WEIGHT), 1.0)
        own.bend = round(bend * BENDS) / BENDS

    def trust(self, method: str, *, shadowed: bool = False) -> float:
        """What chosen drafts brought over what they promised: of many estimates the highest are chosen, so they tend to
        promise too much. Where shadows fill the records too, these know of bad luck already: not counted twice."""
        kept = self._promises.get(method, _Own())
        slack = BAD_LUCK * math.sqrt(kept.expected) if shadowed else 0.0
        return min((kept.hits + slack + TRUST_WEIGHT) / (kept.expected + TRUST_WEIGHT), 1.0)

    @property
    def doubt(self) -> float:
        """How little is known of that: 1 before any promise was put to the test."""
        return DOUBT_TOKENS / (DOUBT_TOKENS + sum(kept.expected for kept in self._promises.values()))

    def note_promises(self, promised: Mapping[str, tuple[float, int]]) -> None:
        """Of one step, by method: promised and accepted. Old ones fade with every step, so that a method given up for
        bad luck gets another chance."""
        for method in {*self._promises, *promised}:
            kept, (expected, hits) = self._promises.setdefault(method, _Own()), promised.get(method, (0.0, 0))
            kept.hits = TRUST_FADES * kept.hits + hits
            kept.expected = TRUST_FADES * kept.expected + expected

    def forget(self, sequence_key: str) -> None:
        for key in [key for key in self._own if key[0] == sequence_key]:
            del self._own[key]

    def as_list(self) -> list[dict[str, Any]]:
        return [
            {"method": method, "sampled": sampled, "bucket": at, "tried": [*kept.tried], "hit": [*kept.hit]}
            for (method, sampled, at), kept in self._records.items()
        ]

    def load(self, stored: list[dict[str, Any]]) -> None:
        for entry in stored:
            tried, hit = [float(x) for x in entry["tried"]], [float(x) for x in entry["hit"]]
            if not all(0 <= one <= most < math.inf for one, most in zip(hit, tried, strict=False)):
                raise ValueError("an acceptance of another form")
            if len(tried) == len(hit) == POSITIONS:
                self._records[str(entry["method"]), bool(entry["sampled"]), int(entry["bucket"])] = Record(tried, hit)
