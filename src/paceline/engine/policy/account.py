"""Never slower: an account for each method, of the plain steps that its drafts may cost.

An account begins with CREDIT, grows by DRIP with every step, and gains or loses what drafted steps really saved. So a
method that never pays costs little, and one that pays is seldom stopped by a run of bad luck.
"""

from __future__ import annotations

CREDIT = 1.0  # plain steps; loss allowed before any gain: 2 costs short answers 2 to 5 %, 0.5 leaves methods untried
DRIP = 0.01  # plain steps a step; lasting cost of trying a method again: 0.02 costs short answers 2 %
CAP = 32.0  # plain steps; gains that may be lost again
STAKE = 20.0  # drafts; without any, one part in 20 of what a plan promises to save may be lost besides; with 20, half


class Account:
    def __init__(self) -> None:
        self._balance, self._step = CREDIT, 0  # plain steps, and the step at which they were counted

    def at(self, step: int) -> float:
        """Return the plain steps that the account holds at a step."""
        return self._balance + DRIP * (step - self._step)

    def add(self, saved: float, step: int) -> None:
        """Add the plain steps that a drafted step saved; below 0: lost."""
        self._balance, self._step = min(self.at(step) + saved, CAP), step
