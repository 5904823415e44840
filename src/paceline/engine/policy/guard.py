"""Never slower: when a method pauses because its drafts lost time, and when a plan that found no draft is repeated.

`Guard` compares drafted steps with plain ones, whatever was expected of them: a running sum of plain steps lost, by the
size of the batch. The sum does not fall below a credit, so a run of luck long ago does not count. A sum above the limit
pauses the method; each pause is twice as long as the one before, until drafting has won the limit back. Each method has
a guard of its own: a model that is too slow here does not stop lookups.

`Backoff` spaces out plans that find no draft worth its cost.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from paceline.core.sequence import Sequence
from paceline.engine.policy.costs import size_of

LOSS, LEAST_LOSS = 6.0, 2.0  # plain steps lost before a method pauses; over sqrt(sequences), at least 2
CREDIT = 2.0  # limits; most that wins may outweigh later losses: single steps win or lose more than a plain step
PAUSE, LONGEST_PAUSE = 64, 1024  # steps; first and longest pause of a method; the first is at least twice the sequences
LOOK_ROWS, LONGEST_BACKOFF = 4, 64  # plain steps after a plan without a draft: rows / LOOK_ROWS, doubled up to 64
FEW, FEW_BACKOFF = 8, 8  # sequences, and longest backoff for them on a CPU, where a plan takes some 3 % of a step
NEW_SHARE = 2  # on a GPU (sequences - FEW) / NEW_SHARE of a batch must be new to end a backoff


@dataclass
class _Account:
    pause: int  # steps; length of the next pause
    lost: float = 0.0  # plain steps
    won: float = 0.0  # plain steps since the last pause
    left: int = 0  # steps of the pause under way


class Guard:
    def __init__(self) -> None:
        self._accounts: dict[int, _Account] = {}

    def note(self, num_sequences: int, saved: float) -> None:
        """Add a drafted step that saved `saved` plain steps."""
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
        """Return the plain steps lost in batches of this size; below 0: won."""
        account = self._accounts.get(size_of(num_sequences))
        return 0.0 if account is None else account.lost

    def is_paused(self, num_sequences: int) -> bool:
        account = self._accounts.get(size_of(num_sequences))
        return account is not None and account.left > 0

    def tick(self, num_sequences: int) -> None:
        """Count a step of a batch of this size."""
        account = self._accounts.get(size_of(num_sequences))
        if account is not None and account.left:
            account.left -= 1


class Backoff:
    """The plain steps after a plan that found no draft worth its cost."""

    def __init__(self, on_device: bool) -> None:
        self._on_device = on_device
        self._length, self._left = 1, 0  # steps: of the next pause, and left of this one
        self.seen: set[str] = set()  # sequences that were in some plan
        self._size = 0  # `size_of` the batch planned last
        self._best_in_vain: dict[str, int] = {}  # by method: the highest level that was not worth a draft

    def is_active(self, sequences: SequenceOf[Sequence]) -> bool:
        """Return whether the batch is at least as large as the last one planned, and few of its sequences are new.

        On a device one new sequence among many does not end the pause: with many there is one in every few steps, and
        a step that is planned is not launched ahead.
        """
        if self._left <= 0 or size_of(len(sequences)) < self._size:
            return False
        least_new = max((len(sequences) - FEW) // NEW_SHARE, 1) if self._on_device else 1
        return len({one.key for one in sequences} - self.seen) < least_new

    def may_look(self, num_sequences: int) -> bool:
        """Return whether lookups are asked for a level that ends the pause: cheap on a CPU, for few sequences."""
        return num_sequences <= FEW and not self._on_device

    def is_ended_by(self, method: str, level: int) -> bool:
        return level > self._best_in_vain.get(method, 0)

    def tick(self) -> None:
        """Count a plain step of the pause."""
        self._left -= 1

    def saw(self, keys: Iterable[str], num_sequences: int) -> None:
        """Note the batch of a plan."""
        self.seen.update(keys)
        self._size = size_of(num_sequences)

    def end(self) -> None:
        """End the pause, and halve the next one: a plan drafts."""
        self._length, self._left, self._best_in_vain = self._length // 2, 0, {}

    def begin(self, num_sequences: int, levels: Mapping[str, int]) -> None:
        """Pause after a plan without a draft; `levels`: the highest of each method's offers."""
        self._left = max(self._length, num_sequences // LOOK_ROWS, 1)
        few = num_sequences <= FEW and not self._on_device
        self._length = min(2 * self._left, FEW_BACKOFF if few else max(LONGEST_BACKOFF, 2 * num_sequences))
        for method, level in levels.items():
            self._best_in_vain[method] = max(level, self._best_in_vain.get(method, 0))

    def reset(self) -> None:
        self._length, self._left = 1, 0

    def forget(self, sequence: Sequence) -> None:
        self.seen.discard(sequence.key)
