"""What a step costs by the number of its rows, learnt while serving.

A model is a shape (cost by rows, relative) times a scale (how fast the machine is right now). Every step moves the
scale quickly and the shape slowly, so a machine that slows down for a minute does not make one number of rows look
dear and another cheap. Times are of whole steps: draft, pass, verification and bookkeeping.
"""

from __future__ import annotations

import bisect
import functools
from typing import Any

# Of a memory-bound CPU pass, as measured on two cores; only where nothing was measured yet.
PRIOR = {1: 1.0, 2: 1.04, 4: 1.09, 8: 1.25, 12: 1.35, 16: 1.65, 24: 1.95, 32: 2.3, 64: 4.0, 128: 7.5, 512: 28.0}
GRID = sorted({*PRIOR, 3, 5, 6, 10, 14, 20, 28, 40, 48, 80, 96, 192, 256, 384})
SCALE_RATE, SHAPE_RATE = 0.1, 0.02
OUTLIER = 3.0  # a step this many times off says more about the machine than about the rows


class CostModel:
    def __init__(self) -> None:
        self.scale: float | None = None  # seconds of a step of one row
        self._factor: dict[int, float] = {}  # grid point seen -> how far the prior is off there
        self._seen: dict[int, int] = {}
        self._points: list[int] = []  # those grid points, in order

    def seconds(self, rows: int) -> float:
        """1.0 for one row while nothing is known: then only ratios mean anything."""
        return (self.scale or 1.0) * prior(rows) * self._factor_at(rows)

    def times_seen(self, rows: int) -> int:
        return self._seen.get(_nearest(rows), 0)

    def observe(self, rows: int, seconds: float) -> None:
        at = _nearest(rows)
        if self.scale is None:
            self.scale = seconds / prior(rows)
        if at not in self._factor:
            self._add(at, seconds / (self.scale * prior(rows)), times=1)
            return
        ratio = min(max(seconds / self.seconds(rows), 1 / OUTLIER), OUTLIER)
        fresh = 1 / (1 + self._seen[at])
        self._factor[at] *= ratio ** max(SHAPE_RATE, fresh)
        self._seen[at] += 1
        self.scale *= ratio ** (SCALE_RATE * (1 - fresh))

    def _factor_at(self, rows: int) -> float:
        """Between the points seen; beyond them the prior keeps its form."""
        points = self._points
        if not points:
            return 1.0
        above = bisect.bisect_left(points, rows)
        if above == 0 or above == len(points):
            return self._factor[points[min(above, len(points) - 1)]]
        return _between(rows, points[above - 1], points[above], self._factor)

    def _add(self, at: int, factor: float, times: int) -> None:
        self._factor[at], self._seen[at] = factor, times
        bisect.insort(self._points, at)

    def as_dict(self) -> dict[str, Any]:
        return {"scale": self.scale, "rows": self._points, "factor": [self._factor[at] for at in self._points]}

    @classmethod
    def from_dict(cls, stored: dict[str, Any]) -> CostModel:
        """What an earlier run measured counts as seen a few times: this run's machine may be another."""
        model = cls()
        model.scale = None if stored["scale"] is None else float(stored["scale"])
        for at, factor in zip(stored["rows"], stored["factor"], strict=True):
            if at not in GRID or not 0 < float(factor) < 1e6:
                raise ValueError("a cost model of another form")
            model._add(int(at), float(factor), times=5)
        return model


@functools.cache
def prior(rows: int) -> float:
    points = sorted(PRIOR)
    if rows >= points[-1]:
        return PRIOR[points[-1]] * rows / points[-1]
    above = bisect.bisect_left(points, rows)
    return PRIOR[points[0]] if above == 0 else _between(rows, points[above - 1], points[above], PRIOR)


def _nearest(rows: int) -> int:
    above = min(bisect.bisect_left(GRID, rows), len(GRID) - 1)
    below = max(above - 1, 0)
    return GRID[below] if rows - GRID[below] < GRID[above] - rows else GRID[above]


def _between(rows: int, low: int, high: int, values: dict[int, float]) -> float:
    share = (rows - low) / (high - low)
    return values[low] * (1 - share) + values[high] * share
