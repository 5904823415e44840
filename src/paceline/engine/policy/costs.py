"""Seconds of a step by its rows, and of a draft by its passes and the tokens read before it; learnt while serving.

A step takes speed x (1 + row_slope x (prior(rows) - 1)) x factor[plain or drafted][rows]. The *speed* is that of the
machine right now and follows every step. The *row slope* is the cost of rows against the prior, one number for all
counts, so that a machine unlike the prior is known after a few steps of any size (a Kalman filter of one state). The
*factors* take the rest, slowly, and share it with neighbouring counts of rows.

A pass of a drafter takes price x step seconds(its rows) x a factor. The price is known before the first draft: bytes
that the drafter reads over bytes that the target reads.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from typing import Any

import numpy as np

from paceline.engine.batch import DraftWork
from paceline.engine.policy.priors import CPU, GRID, PassPrior

MOST_ROWS = 4096  # rows; larger steps are timed as ones of this size
SPEED_RATE = 0.2  # share of an unexpected time that the speed takes: other work slows a machine down for seconds
FACTOR_RATE = 0.05  # share that a factor takes once it was seen often: shapes do not change while a machine runs
OUTLIER = 2.0  # ratio; a time further off counts as this far off (a capture, a collection of garbage)
SLOPE_DOUBT = 0.5  # variance of the log of the row slope before any step was timed: a factor of two either way
NOISE = 0.03  # variance of the log of one step's time that the filter takes for chance
NEIGHBOUR = 0.5  # weight of an adjacent row count; squared for the one after it
PRICE, LOOKUP = 0.1, 0.005  # of a plain pass: a pass of a drafter whose bytes are unknown; the work of a lookup
MOST_OFF = 8.0  # log of a ratio; most that a factor of a draft's time may be off, stored or learnt
RECENT = 0.1  # weight of the newest draft's time, answer's length and step's tokens


def size_of(count: int) -> int:
    """Return the class of a batch: 1, 2, 3-4, 5-8, ..."""
    return max(count - 1, 0).bit_length()


def _surprise(seconds: float, expected: float) -> float:
    """Return the log of measured over expected seconds, which one outlier does not move far."""
    return math.log(min(max(seconds / max(expected, 1e-9), 1 / OUTLIER), OUTLIER))


@functools.cache
def _shape(prior: PassPrior) -> tuple[list[float], list[int], list[int]]:
    """Return, by rows, the prior's time against one row, the place in the grid, and the rows of the padded pass."""
    grid, rows = np.array(prior.padded_to or GRID), np.minimum(np.arange(2 * MOST_ROWS + 2), MOST_ROWS)
    above = np.minimum(np.searchsorted(grid, rows), len(grid) - 1)
    below = np.maximum(above - 1, 0)
    point = above if prior.padded_to else np.where(rows - grid[below] < grid[above] - rows, below, above)
    padded = np.maximum(grid[above], rows) if prior.padded_to else np.maximum(rows, 1)
    known, times = np.array(prior.times).T
    share = np.interp(padded, known, times) * np.maximum(padded / known[-1], 1.0)
    return (share / share[1]).tolist(), point.tolist(), padded.tolist()


@functools.cache
def _near(points: int) -> list[list[float]]:
    """Return the weights of the points of the grid for each other."""
    return [[NEIGHBOUR ** abs(one - other) for other in range(points)] for one in range(points)]


class Factors:
    """Ratios of measured to expected times by place in the grid, which neighbouring places share."""

    def __init__(self, points: int) -> None:
        self.sums, self.seen = [0.0] * points, [0.0] * points  # of logs, and steps that gave them
        self._near_sums, self._near_seen = list(self.sums), list(self.seen)

    def log_at(self, point: int, otherwise: float = 0.0) -> float:
        """Return the log of a factor; `otherwise`: where no step came near. One step far away counts fully if there is
        none nearer."""
        few, seen = NEIGHBOUR ** len(self.seen), self._near_seen[point]
        return self._near_sums[point] / (seen + few) if seen > few else otherwise

    def learn(self, point: int, off: float, smooth: float) -> float:
        """Correct a factor, which was taken to be `smooth`, and return the part of `off` that is left."""
        before = self.seen[point]
        seen = min(before + 1, 1 / FACTOR_RATE)
        factor = (self.sums[point] / before if before else smooth) + off / seen
        self._change(point, seen * factor, seen)
        return off * (1 - 1 / seen)

    def _change(self, point: int, sums: float, seen: float) -> None:
        near = _near(len(self.seen))[point]
        more, more_seen = sums - self.sums[point], seen - self.seen[point]
        self.sums[point], self.seen[point] = sums, seen
        self._near_sums = [one + weight * more for one, weight in zip(self._near_sums, near, strict=True)]
        self._near_seen = [one + weight * more_seen for one, weight in zip(self._near_seen, near, strict=True)]

    def scale(self, sums: float, seen: float) -> None:
        self.sums, self._near_sums = [one * sums for one in self.sums], [one * sums for one in self._near_sums]
        self.seen, self._near_seen = [one * seen for one in self.seen], [one * seen for one in self._near_seen]

    def load(self, sums: SequenceOf[float], seen: SequenceOf[float]) -> None:
        """Take over the factors of an earlier run, each as one step."""
        for point, (one, steps) in enumerate(zip(sums, seen, strict=True)):
            if steps:
                once = max(float(steps), 1.0)
                self._change(point, float(one) / once, float(steps) / once)


class StepTimes:
    """Seconds of steps that differ in their rows alone."""

    def __init__(self, prior: PassPrior = CPU) -> None:
        self._prior, (self._share, self._point, self._padded) = prior, _shape(prior)
        self.speed: float | None = None  # seconds of a plain step of one row
        self._log_slope, self._doubt = 0.0, SLOPE_DOUBT  # log of the row slope, and its variance
        self._slope = 1.0
        points = self._point[-1] + 1
        self._factors = Factors(points), Factors(points)  # of plain and of drafted steps
        self._first_row_s = dict[int, float](), dict[int, float]()  # speed x factor, until they change

    def _log_factor(self, point: int, drafted: bool) -> float:
        """Return the log of a factor. Drafted steps hardly seen are as far off as plain ones."""
        plain = self._factors[False].log_at(point)
        return self._factors[True].log_at(point, plain) if drafted else plain

    def seconds(self, rows: int, *, drafted: bool = False) -> float:
        """Return the seconds of a step."""
        rows = min(rows, MOST_ROWS)
        point = self._point[rows]
        first = self._first_row_s[drafted].get(point)
        if first is None:
            first = (self.speed or 1.0) * math.exp(self._log_factor(point, drafted))
            self._first_row_s[drafted][point] = first
        return first * (1 + self._slope * (self._share[rows] - 1))

    def padded(self, rows: int) -> int:
        """Return the rows of the pass that computes some rows."""
        return max(self._padded[min(rows, MOST_ROWS)], rows)

    def observe(self, rows: int, seconds: float, *, drafted: bool) -> None:
        """Learn from a step."""
        rows = min(rows, MOST_ROWS)
        grows, point = self._slope * (self._share[rows] - 1), self._point[rows]
        smooth = self._log_factor(point, drafted)
        if self.speed is None:
            self.speed = seconds / (1 + grows) / math.exp(smooth)
        off = _surprise(seconds, self.speed * (1 + grows) * math.exp(smooth))
        # The filter gives the row slope its share of the surprise, by the share of the time that it decides.
        weight = grows / (1 + grows)
        gain = weight * self._doubt / (weight * weight * self._doubt + NOISE)
        self._log_slope += gain * off
        self._doubt = max(self._doubt * (1 - gain * weight), FACTOR_RATE * NOISE)  # a machine may change
        left = self._factors[drafted].learn(point, off * (1 - gain * weight), smooth)
        self.speed *= math.exp(SPEED_RATE * left)
        self._changed()

    def _changed(self) -> None:
        self._slope = math.exp(self._log_slope)
        for known in self._first_row_s:
            known.clear()

    def fade(self) -> None:
        """Halve the factors and weights of drafted steps: none was taken for long, so they are due for a trial."""
        self._factors[True].scale(1 / 4, 1 / 2)
        self._changed()

    def state(self) -> dict[str, Any]:
        sums, seen = [one.sums for one in self._factors], [one.seen for one in self._factors]
        return {"slope": self._log_slope, "doubt": self._doubt, "sums": sums, "seen": seen}

    def of_state(self, state: Mapping[str, Any]) -> StepTimes:
        """Return the table that `state` described but for the speed, which this run's first plain step gives; raise
        ValueError where it has another form."""
        table = StepTimes(self._prior)
        sums, seen = np.array(state["sums"], np.float64), np.array(state["seen"], np.float64)
        slope, doubt = float(state["slope"]), float(state["doubt"])
        fits = sums.shape == seen.shape == (2, len(self._factors[0].seen)) and abs(slope) < 10 and 0 < doubt < 10
        if not fits or not (np.abs(sums) < 1e3).all() or not ((seen >= 0) & (seen < 1e3)).all():
            raise ValueError("step times of another form")
        for factors, *columns in zip(table._factors, sums, seen, strict=True):
            factors.load(*columns)
        table._log_slope, table._doubt = slope, doubt
        table._changed()
        return table


READING = -1  # in place of a class of batches, for the factor of reading


class DraftCost:
    """Seconds of a method's drafts: those of the target's passes x price x a factor, by the class of the batch."""

    def __init__(self, price: float) -> None:
        self._is_guess = not price  # bytes are right within a half, a guess may be far off
        self.price, self.is_fresh = price or PRICE, False  # fresh: it drafted since the last `fade`
        self.factors: dict[int, tuple[float, float]] = {}  # by class, and of READING: log, and the drafts that gave it

    def _factor(self, size: int) -> float:
        """Return the log of the factor; without a draft of the class that of the nearest class, smaller ones first."""
        if size not in self.factors:
            near = [(abs(one - size), one) for one in self.factors if one != READING]
            size = min(near, default=(0, size))[1]
        return self.factors.get(size, (0.0, 0.0))[0]

    def parts(self, times: StepTimes, rows: int, unread: int) -> tuple[float, float]:
        """Return the seconds of a pass of these rows, and what reading `unread` tokens takes more than that."""
        pass_s = self.price * times.seconds(rows) * math.exp(self._factor(size_of(rows)))
        if unread <= 2 * rows:
            return pass_s, 0.0
        return pass_s, max(self.price * times.seconds(unread) * math.exp(self._factor(READING)) - pass_s, 0.0)

    def observe(self, times: StepTimes, rows: int, work: DraftWork) -> None:
        """Learn from a draft: its surprise belongs to reading or to passes, whichever takes longer."""
        pass_s, read_s = self.parts(times, rows, work.unread)
        drafting_s = pass_s * work.passes
        if read_s > drafting_s:
            key, expected, taken = READING, read_s, work.seconds - drafting_s
        else:
            key, expected, taken = size_of(rows), drafting_s + read_s, work.seconds
        seen = self.factors.get(key, (0.0, 0.0))[1] + 1
        most = MOST_OFF if self._is_guess and seen <= 2 else math.log(OUTLIER)  # first drafts may allocate
        off = min(max(math.log(max(taken, 1e-9) / max(expected, 1e-9)), -most), most)
        factor = self._factor(key) + off * max(1 / seen, RECENT)
        self.factors[key] = min(max(factor, -MOST_OFF), MOST_OFF), seen
        self.is_fresh = True

    def fade(self) -> None:
        """Halve the factors of a method that did not draft: it comes to be tried again."""
        if not self.is_fresh:
            self.factors = {key: (factor / 2, seen) for key, (factor, seen) in self.factors.items()}
        self.is_fresh = False
