"""Never slower: what drafted steps really brought is compared with plain ones, whatever was expected of them.

A running sum of plain steps lost, by the size of the batch; it does not fall below a credit, so a run of luck long ago
does not count. Once it says that drafting loses, drafting stops and is tried again after a pause, which doubles each
time and is forgiven once drafting has won as much back. A method has a guard of its own: a model that is too slow here
does not stop lookups.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from paceline.engine.policy.costs import size_of

LOSS, LEAST_LOSS = 6.0, 2.0  # plain steps that must be lost: how sure it must be. Over the root of the number of
# sequences, whose luck evens out, but never less than so many
# Times as much may be lost again of what was won before: single steps win or lose more than a plain step, so a method
# that pays would else be stopped every few hundred steps.
CREDIT = 2.0
PAUSE, LONGEST_PAUSE = 64, 1024  # steps; the first of a large batch is twice its sequences: a trial of it is dear


@dataclass
class _Account:
    pause: int  # the next one
    lost: float = 0.0  # plain steps
    won: float = 0.0  # since the last pause
    left: int = 0  # of the one under way


class Guard:
    def __init__(self) -> None:
        self._accounts: dict[int, _Account] = {}

    def note(self, num_sequences: int, saved: float) -> None:
        """A drafted step saved so many plain steps."""
        first = min(max(PAUSE, 2 * num_sequences), LONGEST_PAUSE)
        account = self._accounts.setdefault(size_of(num_sequences), _Account(pause=first))
        if account.left:  # the step was planned before the pause that is under way
            return
        limit = max(LOSS / math.sqrt(num_sequences), LEAST_LOSS)
        account.lost = max(account.lost - saved, -CREDIT * limit)
        account.won += saved
        if account.won > limit:
            account.pause = first
        if account.lost > limit:
            account.left, account.lost, account.won = account.pause, 0.0, 0.0
            account.pause = min(2 * account.pause, LONGEST_PAUSE)

    def lost(self, num_sequences: int) -> float:
        """The running sum for such a batch; below 0: won."""
        account = self._accounts.get(size_of(num_sequences))
        return 0.0 if account is None else account.lost

    def pauses(self, num_sequences: int) -> bool:
        """The next step of such a batch is to be plain; counts it."""
        account = self._accounts.get(size_of(num_sequences))
        if account is None or not account.left:
            return False
        account.left -= 1
        return True
