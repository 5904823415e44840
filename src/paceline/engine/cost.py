"""What a step costs by the number of its rows, learnt while serving.

A model is a shape (cost by rows, relative) times a scale (how fast the machine is right now). Every step moves the
scale quickly and the shape slowly, so a machine that slows down for a minute does not make one number of rows look
dear and another cheap. Times are of whole steps: draft, pass, verification and bookkeeping.
"""

from __future__ import annotations

import bisect
from typing import Any

# Of a memory-bound CPU pass, as measured on two cores; only where nothing was measured yet.
PRIOR = {1: 1.0, 2: 1.04, 4: 1.09, 8: 1.25, 12: 1.35, 16: 1.65, 24: 1.95, 32: 2.3, 64: 4.0, 128: 7.5, 512: 28.0}
GRID = sorted({*PRIOR, 3, 5, 6, 10, 20, 40, 48, 80, 96, 192, 256, 384})
SCALE_RATE, SHAPE_RATE = 0.1, 0.02
OUTLIER = 3.0  # a step this many times off says more about the machine than about the rows


class CostModel:
    def __init__(self) -> None:
        self.scale: float | None = None  # seconds of a step of one row
        self._shape = {rows: _interpolate(PRIOR, sorted(PRIOR), rows) for rows in GRID}
        self._seen = dict.fromkeys(GRID, 0)

    def seconds(self, rows: int) -> float:
        """1.0 for one row while nothing is known: then only ratios mean anything."""
        return (self.scale or 1.0) * _interpolate(self._shape, GRID, rows)

    def observe(self, rows: int, seconds: float) -> None:
        if self.scale is None:
            self.scale = seconds / _interpolate(self._shape, GRID, rows)
        ratio = seconds / self.seconds(rows)
        ratio = min(max(ratio, 1 / OUTLIER), OUTLIER)
        low, high, share = _neighbours(GRID, rows)
        fresh = 1 / (1 + min(self._seen[low], self._seen[high]))
        for at, weight in ((low, 1 - share), (high, share)):
            self._shape[at] *= ratio ** (weight * max(SHAPE_RATE, fresh))
            self._seen[at] += 1
        self.scale *= ratio ** (SCALE_RATE * (1 - fresh))

    def as_dict(self) -> dict[str, Any]:
        return {"scale": self.scale, "shape": list(self._shape.values()), "seen": list(self._seen.values())}

    @classmethod
    def from_dict(cls, stored: dict[str, Any]) -> CostModel:
        model = cls()
        shape, seen = [float(x) for x in stored["shape"]], [int(x) for x in stored["seen"]]
        if len(shape) != len(GRID) or len(seen) != len(GRID) or min(shape) <= 0:
            raise ValueError("a cost model of another shape")
        model.scale = None if stored["scale"] is None else float(stored["scale"])
        model._shape, model._seen = dict(zip(GRID, shape, strict=True)), dict(zip(GRID, seen, strict=True))
        return model


def _neighbours(grid: list[int], rows: int) -> tuple[int, int, float]:
    """The grid points around `rows` and how far it lies towards the upper one."""
    at = bisect.bisect_left(grid, rows)
    if at < len(grid) and grid[at] == rows:
        return rows, rows, 0.0
    if at >= len(grid):
        return grid[-1], grid[-1], 0.0
    low, high = grid[at - 1], grid[at]
    return low, high, (rows - low) / (high - low)


def _interpolate(values: dict[int, float], grid: list[int], rows: int) -> float:
    if rows > grid[-1]:
        return values[grid[-1]] * rows / grid[-1]
    low, high, share = _neighbours(grid, rows)
    return values[low] * (1 - share) + values[high] * share
