"""Whom to ask what it knows: asking takes time too, most of all in a large batch where nobody drafts.

Sequences that draft are asked in every step, by the method that drafts for them, and then all by models; a few on a CPU
are all asked. For all other questions a small share of the steps' time is saved up, and they are asked in turn.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as SequenceOf

SHARE, FEW_SHARE = 0.005, 0.01  # of the steps' time, and where there are few sequences: they are soon asked
AT_ONCE = 0.3  # of one step's time: what may be saved up
FIRST_GUESS_S = 10e-6
FADES = 0.9


class Purse:
    """Time saved up for something that need not be done in every step. It may be overdrawn once, and pays back."""

    def __init__(self) -> None:
        self._seconds = math.inf  # full at first

    def earn(self, step_s: float, share: float) -> None:
        self._seconds = min(self._seconds + share * step_s, AT_ONCE * step_s)

    def pay(self, seconds: float) -> None:
        self._seconds -= seconds

    def empty(self) -> None:
        """It was all for nothing: what was saved up does not buy more of it."""
        self._seconds = min(self._seconds, 0.0)

    @property
    def seconds(self) -> float:
        return self._seconds


class Asking:
    def __init__(self) -> None:
        self.purse = Purse()
        self.spent_s = 0.0
        self._each_s: dict[str, float] = {}  # by method
        self._next: dict[str, int] = {}

    def each_s(self, method: str) -> float:
        """What one question takes."""
        return self._each_s.get(method, FIRST_GUESS_S)

    def in_turn(self, method: str, others: SequenceOf[int], may_take: float, *, together: bool) -> SequenceOf[int]:
        """Which of those that need not be asked to ask now. `together`: it pays for many at once only."""
        if may_take <= 0 or not others:
            return ()
        if together or may_take >= len(others) * self.each_s(method):
            return others
        count = max(int(may_take / self.each_s(method)), 1)
        first = self._next.get(method, 0) % len(others)
        self._next[method] = first + count
        return [*others, *others][first : first + count]

    def note(self, method: str, taken: float, due: int, others: int) -> None:
        """What it took to ask some that must be, and others in turn."""
        each = taken / (due + others)
        self.spent_s += taken
        self._each_s[method] = FADES * self._each_s.get(method, each) + (1 - FADES) * each
        self.purse.pay(each * others)
