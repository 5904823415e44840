"""Which method drafts for a sequence, and how far ahead."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from paceline.drafters import NONE
from paceline.sequence import Sequence


@dataclass(frozen=True)
class Choice:
    method: str = NONE
    budget: int = 0  # nodes


class Policy(Protocol):
    """May look at committed history and timings only, never at the draft at hand: that would bias the output."""

    def choose(self, sequence: Sequence) -> Choice: ...


@dataclass(frozen=True)
class FixedPolicy:
    """The same method and k for everyone; plain decoding by default."""

    method: str = NONE
    k: int = 0

    def choose(self, sequence: Sequence) -> Choice:
        return Choice(self.method, self.k)
