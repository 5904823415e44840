"""Drafts never made: what a method on the host would have said, compared with what was committed.

So its acceptance is known without paying for it. A method whose `guess` is empty casts no shadow.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from paceline.drafters import Drafter
from paceline.sequence import Sequence

DEPTH = 8


@dataclass
class _Shadow:
    evidence: int
    guess: list[int]
    at: int  # position of what it guesses next
    matched: int = 0

    def goes_on(self, committed: SequenceOf[int], start: int) -> bool:
        if start != self.at:
            return start < self.at  # committed before it was cast, and learnt of only now
        self.at += len(committed)
        for token in committed:
            if self.matched == len(self.guess) or self.guess[self.matched] != token:
                return False
            self.matched += 1
        return self.matched < len(self.guess)


@dataclass(frozen=True)
class Fate:
    """A shadow draft that met what was committed."""

    method: str
    evidence: int
    drafted: int
    matched: int


class Shadows:
    def __init__(self) -> None:
        self._under_way: dict[str, dict[str, _Shadow]] = {}  # sequence -> method
        self._casts: set[str] = set()

    def casts(self, method: str) -> bool:
        """Whether this method was ever seen to cast one."""
        return method in self._casts

    def follows(self, sequence: Sequence, method: str) -> bool:
        return method in self._under_way.get(sequence.key, ())

    def cast(self, drafter: Drafter, sequence: Sequence) -> None:
        guess, evidence = drafter.guess(sequence, DEPTH), drafter.evidence(sequence)
        if guess:
            self._casts.add(drafter.name)
            self._under_way.setdefault(sequence.key, {})[drafter.name] = _Shadow(evidence, guess, len(sequence.tokens))

    def meet(self, sequence: Sequence, committed: SequenceOf[int], start: int) -> Iterator[Fate]:
        """Those of the sequence's shadows that end with what was committed from position `start` on."""
        mine = self._under_way.get(sequence.key, {})
        for method, shadow in list(mine.items()):
            if not shadow.goes_on(committed, start):
                del mine[method]
                yield Fate(method, shadow.evidence, len(shadow.guess), shadow.matched)

    def drop(self, sequence: Sequence, method: str) -> None:
        self._under_way.get(sequence.key, {}).pop(method, None)

    def forget(self, sequence: Sequence) -> None:
        self._under_way.pop(sequence.key, None)
