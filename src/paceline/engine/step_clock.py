"""The time of steps: when one began, its seconds, and the share of them that belongs to each answer."""

from __future__ import annotations

import time

from paceline.core.sequence import Sequence, Status
from paceline.engine.batch import Batch, DraftWork, StepResult, StepTiming
from paceline.engine.drafter_set import DrafterSet
from paceline.engine.in_flight import InFlightStep

AWAY_SHARE = 0.1  # share of a step's time between two calls of `step`, above which the device's time is unknown


class StepClock:
    def __init__(self) -> None:
        self._started = 0.0
        self.step_s = 0.0  # seconds of the step that was read last
        self._read_at = self._returned_at = 0.0  # when the last step was read, and when it returned
        # Sums over steps that only decoded: their seconds, and the seconds they would have taken without drafts.
        self._spent_s = self._plain_s = 0.0

    def start(self) -> None:
        """Begin a step that the host launches now."""
        self._started = time.perf_counter()

    def start_behind(self, flight: InFlightStep) -> None:
        """Begin a step that was launched by the one before: the device started when that one had been read."""
        is_over = flight.verdict_copy is not None and flight.verdict_copy.is_over
        if is_over and self._started - self._returned_at > AWAY_SHARE * (self._started - self._read_at):
            flight.time_is_typical = False  # the caller was away, so the end of the pass is unknown
        else:
            self._started = self._read_at

    def read(self, flight: InFlightStep, drafters: DrafterSet) -> StepTiming:
        """Return the timing of a step that was just read; early drafts began at most when the step before was read."""
        read_before, self._read_at = self._read_at, time.perf_counter()
        work: dict[str, DraftWork] = {}
        if flight.batch.num_drafted:
            work, before_s = drafters.draft_work()
            self._started = max(self._started - before_s, min(read_before, self._started))
        rows = flight.layout.tokens.shape[0]
        self.step_s = self._read_at - self._started
        return StepTiming(len(flight.batch), rows, self.step_s, work, flight.time_is_typical, flight.ahead)

    def share(self, batch: Batch, result: StepResult, step_s: float, plain_s: float | None) -> None:
        """Add a step that only decoded to the sums. A sequence is in every step from its admission to its end, so its
        share is a difference of the sums; its drafted tokens are added here."""
        if plain_s and batch.only_decodes:
            self._spent_s += step_s
            self._plain_s += plain_s
            for at in result.drafts:
                result.sequences[at].stats.plain_s += plain_s * (len(result.tokens[at]) - 1)

    def finish(self) -> None:
        self._returned_at = time.perf_counter()

    def joined(self, sequence: Sequence) -> None:
        sequence.stats.spent_s -= self._spent_s
        sequence.stats.plain_s -= self._plain_s

    def left(self, sequence: Sequence) -> None:
        if sequence.status is Status.RUNNING:
            sequence.stats.spent_s += self._spent_s
            sequence.stats.plain_s += self._plain_s
