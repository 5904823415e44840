"""An alarm for a fall of a method's acceptance: the share of drafts whose first token is accepted.

One CUSUM per method (Page 1954; Lorden 1971): the log likelihood ratio of "the rate fell to DROP times what it was"
against "it is what it was", summed and kept at or above 0; an alarm above THRESHOLD. For independent drafts a false
alarm comes on average no sooner than after exp(THRESHOLD) drafts, and a fall to DROP is found after about
THRESHOLD / KL(fallen, before) drafts. After an alarm the rate is learnt again, so the watch recovers by itself.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

LEARN = 500  # drafts from which the rate is learnt
DROP = 0.7  # share of the rate that counts as fallen
THRESHOLD = math.log(100_000)  # at most one false alarm in 100,000 drafts on average
MIN_RATE = 0.02  # acceptance below which no fall is looked for


@dataclass
class Watch:
    """The acceptance of one method."""

    drafts: int = 0
    hits: int = 0
    score: float = 0.0
    rate: float | None = None  # None: not learnt yet

    def add(self, drafts: int, hits: int) -> bool:
        """Count drafts of one answer; return True for an alarm."""
        if self.rate is None:
            self.drafts, self.hits = self.drafts + drafts, self.hits + hits
            if self.drafts >= LEARN:
                self.rate = min(max(self.hits / self.drafts, 1 / LEARN), 1 - 1 / LEARN)
            return False
        if self.rate < MIN_RATE:
            return False
        fallen = DROP * self.rate
        gain = hits * math.log(fallen / self.rate) + (drafts - hits) * math.log((1 - fallen) / (1 - self.rate))
        self.score = max(0.0, self.score + gain)
        return self.score > THRESHOLD


class DriftMonitor:
    def __init__(self) -> None:
        self._watches: dict[str, Watch] = {}

    def add(self, method: str, drafts: int, hits: int) -> float | None:
        """Count drafts of one answer; on an alarm return the rate before the fall, else None."""
        watch = self._watches.setdefault(method, Watch())
        if not watch.add(drafts, hits):
            return None
        self._watches[method] = Watch()
        return watch.rate
