"""How likely a drafted token is to be accepted, by method, by the evidence behind the draft, and by position in it.

Counts are kept per (method, sampled or greedy, evidence), where evidence is how much of the context the draft's source
shares (a function of committed tokens). They decay, so a change of workload is noticed; a sequence's own record bends
them for that sequence. Everything here looks back at committed tokens only.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

POSITIONS = 16  # deeper ones count as the last
MEMORY = 400.0  # trials after which old ones fade
PRIOR_TRIALS = 4.0
HOPELESS = 0.01
OWN_FADES, OWN_WEIGHT = 0.95, 8.0  # how far a sequence's own record may lower the common one
TRUST_FADES, TRUST_WEIGHT = 0.99, 3.0  # likewise for what was promised against what came of it
EVIDENCE_STEPS = (1, 2, 3, 4, 6, 9, 16)  # where one bucket of evidence ends and the next begins
FIRST_GUESS = (0.0, 0.12, 0.25, 0.4, 0.65, 0.75, 0.85, 0.9)  # by bucket; short matches mean little

Key = tuple[str, bool, int]


def bucket(evidence: int) -> int:
    return sum(evidence >= step for step in EVIDENCE_STEPS)


def prior(evidence_bucket: int, position: int) -> float:
    """A guess before anything was seen: more evidence is better, and a draft that held so far tends to hold."""
    first = FIRST_GUESS[evidence_bucket]
    return min(first if position == 0 else first + 0.15, 0.9)


@dataclass
class Record:
    tried: list[float] = field(default_factory=lambda: [0.0] * POSITIONS)
    hit: list[float] = field(default_factory=lambda: [0.0] * POSITIONS)

    def note(self, drafted: int, accepted: int) -> None:
        for position in range(min(drafted, accepted + 1)):
            at = min(position, POSITIONS - 1)
            self.tried[at] += 1
            self.hit[at] += position < accepted
            if self.tried[at] > MEMORY:
                self.tried[at] /= 2
                self.hit[at] /= 2

    def rate(self, position: int, guess: float) -> float:
        at = min(position, POSITIONS - 1)
        return (self.hit[at] + PRIOR_TRIALS * guess) / (self.tried[at] + PRIOR_TRIALS)


@dataclass
class _Own:
    """One sequence's hits and what was expected of it, fading."""

    hits: float = 0.0
    expected: float = 0.0


class Acceptance:
    def __init__(self) -> None:
        self._records: dict[Key, Record] = {}
        self._own: dict[tuple[str, str], _Own] = {}
        self._promises = _Own()  # over all drafts that were chosen

    def survival(
        self, sequence_key: str, method: str, sampled: bool, evidence: int, depth: int, least: float = HOPELESS
    ) -> list[float]:
        """Probability that the first 1, 2, ..., depth drafted tokens are all accepted, down to `least`."""
        at = bucket(evidence)
        record = self._records.get((method, sampled, at))
        own = self._own.get((sequence_key, method))
        bend = 1.0 if own is None else min((own.hits + OWN_WEIGHT) / (own.expected + OWN_WEIGHT), 1.0)
        alive, result = 1.0, []
        for position in range(depth):
            guess = prior(at, position)
            rate = guess if record is None else record.rate(position, guess)
            alive *= min(rate * bend, 0.99)
            if alive < least:
                break
            result.append(alive)
        return result

    def note(self, sequence_key: str, method: str, sampled: bool, evidence: int, drafted: int, accepted: int) -> None:
        """A draft of `drafted` tokens met its fate; a shadow draft that was never verified counts as well."""
        if not drafted:
            return
        key = (method, sampled, bucket(evidence))
        record = self._records.setdefault(key, Record())
        expected = record.rate(0, prior(key[2], 0))
        record.note(drafted, accepted)
        own = self._own.setdefault((sequence_key, method), _Own())
        own.hits = OWN_FADES * own.hits + (accepted > 0)
        own.expected = OWN_FADES * own.expected + expected

    @property
    def trust(self) -> float:
        """What chosen drafts brought over what they promised: of many estimates the highest are chosen, so they tend to
        promise too much."""
        kept = self._promises
        return min((kept.hits + TRUST_WEIGHT) / (kept.expected + TRUST_WEIGHT), 1.0)

    def note_promises(self, promised: float, accepted: int) -> None:
        """Of one step; old ones fade with every step, so that a method given up for bad luck gets another chance."""
        self._promises.hits = TRUST_FADES * self._promises.hits + accepted
        self._promises.expected = TRUST_FADES * self._promises.expected + promised

    def forget(self, sequence_key: str) -> None:
        for key in [key for key in self._own if key[0] == sequence_key]:
            del self._own[key]

    def as_list(self) -> list[dict[str, Any]]:
        return [
            {"method": method, "sampled": sampled, "bucket": at, "tried": record.tried, "hit": record.hit}
            for (method, sampled, at), record in self._records.items()
        ]

    def load(self, stored: list[dict[str, Any]]) -> None:
        for entry in stored:
            tried, hit = [float(x) for x in entry["tried"]], [float(x) for x in entry["hit"]]
            if len(tried) == len(hit) == POSITIONS:
                self._records[str(entry["method"]), bool(entry["sampled"]), int(entry["bucket"])] = Record(tried, hit)
