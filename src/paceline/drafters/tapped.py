"""What every drafter that reads the target's hidden states shares: absorbing taps into its own K/V, late or at once.

A subclass writes `absorb`: compute its K/V for the pairs (tap of t, token t + 1) into slots t + 1. This class keeps
the pairs in order, each exactly once, across prefill chunks, prefix hits, preemptions and steps in which the drafter
was not asked.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

import torch
from torch import Tensor

from paceline.drafters.base import LEARNED, Commit
from paceline.sequence import Sequence


class TapRing:
    """Taps that wait to be absorbed: contiguous positions, the newest `capacity` of them."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.first = 0  # position of the oldest tap kept
        self._parts: list[Tensor] = []
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def end(self) -> int:
        return self.first + self._count

    def push(self, first: int, taps: Tensor) -> None:
        """Add the taps of positions first, first + 1, ...; a gap to what is there makes the older ones useless."""
        if first != self.end:
            self.clear(first)
        self._parts.append(taps)
        self._count += len(taps)
        while self._count > self.capacity:
            surplus = min(self._count - self.capacity, len(self._parts[0]))
            if surplus == len(self._parts[0]):
                self._parts.pop(0)
            else:
                self._parts[0] = self._parts[0][surplus:]
            self.first += surplus
            self._count -= surplus

    def take(self) -> tuple[int, Tensor | None]:
        """All that waits, as (position of the first, (n, T, H)), and empty the ring."""
        first, parts = self.first, self._parts
        self.clear(self.end)
        return first, torch.cat(parts) if parts else None

    def clear(self, at: int) -> None:
        self.first, self._parts, self._count = at, [], 0


@dataclass
class TapState:
    """Valid slots [start, end) of one sequence, and the taps that come next. Slot 0 has no pair and counts as valid."""

    start: int
    end: int
    ring: TapRing = field(default_factory=lambda: TapRing(0))


class TappedDrafter:
    """`lazy` drafters leave taps in the ring until `catch_up` (from `propose`); others absorb at every commit."""

    def __init__(self, *, ring_capacity: int = 256, lazy: bool = False) -> None:
        self.ring_capacity, self.lazy = ring_capacity, lazy
        self._states: dict[str, TapState] = {}

    def absorb(self, sequence: Sequence, first: int, taps: Tensor) -> None:
        raise NotImplementedError

    def admit(self, sequence: Sequence, start: int, end: int) -> None:
        self._states[sequence.key] = TapState(start, max(end, 1), TapRing(self.ring_capacity))

    def commit(self, commits: SequenceOf[Commit]) -> None:
        for commit in commits:
            assert commit.taps is not None
            self._states[commit.sequence.key].ring.push(commit.first, commit.taps)
            if not self.lazy:
                self.catch_up(commit.sequence)

    def catch_up(self, sequence: Sequence) -> None:
        state = self._states[sequence.key]
        first, taps = state.ring.take()
        if taps is None:
            return
        if first + 1 > state.end:  # the ring lost what lies between: start with the context there is
            state.start = first + 1
        self.absorb(sequence, first, taps)
        state.end = first + 1 + len(taps)

    def absorbed(self, sequence: Sequence) -> tuple[int, int]:
        state = self._states[sequence.key]
        return state.start, state.end

    def evidence(self, sequence: Sequence) -> int:
        return LEARNED

    def lag(self, sequence: Sequence) -> int:
        return len(self._states[sequence.key].ring)

    def close(self) -> None:
        pass

    def release(self, sequence: Sequence) -> None:
        self._states.pop(sequence.key, None)
