"""Seconds of a step by its rows and of a draft by its depth: two small tables, learnt while serving.

A step takes speed x (1 + row_slope x (prior(rows) - 1)) x factor[plain or drafted][rows]. The *speed* is that of the
machine right now and follows every step. The *row slope* is the cost of rows against the prior, one number for all
counts, so that a machine unlike the prior is known after a few steps of any size (a Kalman filter of one state). The
*factors* take the rest, slowly, and share it with neighbouring counts of rows. A draft takes a + b x depth, by method
and by the number of its sequences in powers of two.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.engine.policy.priors import CPU, PassPrior

# Counts of rows with a factor of their own, where passes are not padded.
GRID = (1, 2, 3, 4, 5, 6, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 64, 80, 96, 128, 192, 256, 384, 512)
MOST_ROWS = 4096  # rows; a larger step is timed as one of this size
MAX_NODES = 1024  # nodes; most of one step, beyond which time is taken as linear in rows
SPEED_RATE = 0.2  # share of an unexpected time that the speed takes: other work slows a machine down for seconds
FACTOR_RATE = 0.05  # share that a factor takes once it was seen often: shapes do not change while a machine runs
OUTLIER = 1.5  # ratio; a time further off counts as this far off (a capture, a collection of garbage)
SLOPE_DOUBT = 0.5  # variance of the log of the row slope before any step was timed: a factor of two either way
SLOPE_DRIFT = 2e-4  # variance added by each step: knowledge of the row slope ages
NOISE = 0.03  # variance of the log of one step's time that the filter takes for chance
NEIGHBOUR = 0.5  # weight of an adjacent row count; squared for the one after it
KNOWN = 0.1  # summed weight from which the time of a plain step counts as known: three row counts away at most
OTHER_KIND = 0.01  # weight of plain steps in the factor of drafted ones: it decides only while those are unseen
REMEMBERED = 4.0  # steps; most that a stored factor counts for: this run's machine may be another
SETTLING = 3  # steps; first steps of a run with stored tables; they only rescale the tables
MOST_CHANGE = 32.0  # ratio; most by which these first steps rescale the tables
DRAFT_OUTLIER = 3.0  # ratio; OUTLIER of drafts: first guesses of them are further off
FIRST_DRAFTS = 2  # timings of a model that are left out at each size: they allocate and compile
NOTHING_S = 1e-7  # seconds; least time of a draft, so that its time has a ratio
DRAFTS_FADE = 0.9  # share of its weight that a timed draft keeps with the next one
# Steps of one row that a token ahead takes, by a model and by a lookup, until one is timed.
PASS_GUESS, LOOKUP_GUESS = 0.1, 0.01
RIDGE = 0.1  # squared depths; spread below which a draft's time is taken as proportional to its depth
FEWER = 0.8  # ratio of draft seconds for half as many sequences, until measured

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


def size_of(count: int) -> int:
    """Return the class of a batch: 1, 2, 3-4, 5-8, ..."""
    return max(count - 1, 0).bit_length()


@functools.cache
def _shape(prior: PassPrior) -> tuple[Floats, Ints, int]:
    """Return, by rows, the prior's time against one row and the place in the grid; and the size of the grid."""
    grid, rows = np.array(prior.padded_to or GRID), np.minimum(np.arange(MOST_ROWS + MAX_NODES + 1), MOST_ROWS)
    above = np.minimum(np.searchsorted(grid, rows), len(grid) - 1)
    below = np.maximum(above - 1, 0)
    point = above if prior.padded_to else np.where(rows - grid[below] < grid[above] - rows, below, above)
    padded = np.maximum(grid[above], rows) if prior.padded_to else np.maximum(rows, 1)
    known, times = np.array(prior.times).T
    share = np.interp(padded, known, times) * np.maximum(padded / known[-1], 1.0)
    return share / share[1], point, len(grid)


class StepTimes:
    """Seconds of steps that differ in their rows alone."""

    def __init__(self, prior: PassPrior = CPU) -> None:
        self._share, self._point, points = _shape(prior)
        self.speed: float | None = None  # seconds of a plain step of one row
        self._log_slope, self._doubt = 0.0, SLOPE_DOUBT  # log of the row slope, and its variance
        self._factor = np.zeros((2, points))  # logs, of plain and of drafted steps, by place in the grid
        self._sums = np.zeros((4, points))  # (factor x count) of plain and of drafted steps, and these counts
        self._seen = self._sums[2:]
        self._near = NEIGHBOUR ** np.abs(np.arange(points)[:, None] - np.arange(points))
        self._known: dict[int, tuple[float, float, float]] = {}  # `_at` by place, until a step is observed
        self._settled = SETTLING  # steps of this run, at most SETTLING

    def _at(self, rows: int) -> tuple[float, float, float]:
        """Return the logs of the factors of plain and drafted steps with `rows` rows, and the weight of plain ones
        seen. Neighbouring counts share their factors: a count never seen is as far off the prior as they are."""
        point = self._point.item(rows)
        known = self._known.get(point)
        if known is None:
            plain, drafted, seen, drafted_seen = (self._sums @ self._near[point]).tolist()
            drafted, drafted_seen = drafted + OTHER_KIND * plain, drafted_seen + OTHER_KIND * seen
            known = self._known[point] = plain / max(seen, 1e-12), drafted / max(drafted_seen, 1e-12), seen
        return known

    def seconds(self, rows: int) -> float:
        """Return the seconds of a plain step."""
        rows = min(rows, MOST_ROWS)
        shape = 1 + math.exp(self._log_slope) * (self._share.item(rows) - 1)
        return (self.speed or 1.0) * shape * math.exp(self._at(rows)[0])

    def seconds_with(self, base: int, nodes: int) -> Floats:
        """Return the seconds of steps with 1, 2, ..., nodes drafted nodes beside `base` rows, non-decreasing."""
        slope, speed = math.exp(self._log_slope), self.speed or 1.0
        first, end = min(base, MOST_ROWS) + 1, min(base, MOST_ROWS) + 1 + nodes
        seconds = self._share[first:end] * (speed * slope)
        seconds += speed * (1 - slope)
        plain, drafted, seen, drafted_seen = self._sums @ self._near
        smooth = (drafted + OTHER_KIND * plain) / np.maximum(drafted_seen + OTHER_KIND * seen, 1e-12)  # as in `_at`
        seconds *= np.exp(smooth)[self._point[first:end]]
        return np.maximum.accumulate(seconds, out=seconds)

    def plain_known(self, rows: int) -> bool:
        return self._at(min(rows, MOST_ROWS))[2] >= KNOWN

    def observe(self, rows: int, seconds: float, *, drafted: bool) -> float:
        """Learn from a step; return the log of its seconds over the expected ones."""
        rows, kind = min(rows, MOST_ROWS), int(drafted)
        grows = math.exp(self._log_slope) * (self._share.item(rows) - 1)
        if self.speed is None:
            self.speed = seconds / (1 + grows)
        point, smooth = self._point.item(rows), self._at(rows)[kind]
        expected = self.speed * (1 + grows) * math.exp(smooth)
        surprise = off = math.log(min(max(seconds / expected, 1 / OUTLIER), OUTLIER))
        # The filter gives the row slope its share of the surprise, by the share of the time that it decides.
        weight = grows / (1 + grows)
        gain = weight * self._doubt / (weight * weight * self._doubt + NOISE)
        self._log_slope += gain * off
        self._doubt += SLOPE_DRIFT - gain * weight * self._doubt
        off *= 1 - gain * weight
        seen = min(self._seen.item(kind, point) + 1, 1 / FACTOR_RATE)
        factor = (smooth if seen == 1 else self._factor.item(kind, point)) + off / seen
        self._factor[kind, point], self._sums[kind, point], self._seen[kind, point] = factor, seen * factor, seen
        self._known.clear()
        self.speed *= math.exp(SPEED_RATE * off * (1 - 1 / seen))
        return surprise

    def rescale_to_run(self, rows: int, seconds: float, *, drafted: bool) -> float | None:
        """Return the ratio by which the tables have to be rescaled, in one of the first steps of a run with stored
        tables; None after these steps."""
        if self._settled == SETTLING or self.speed is None:
            return None
        rows = min(rows, MOST_ROWS)
        shape = 1 + math.exp(self._log_slope) * (self._share.item(rows) - 1)
        off = seconds / (self.speed * shape * math.exp(self._at(rows)[drafted]))
        return float(min(max(off, 1 / MOST_CHANGE), MOST_CHANGE) ** (1 / (1 + self._settled)))

    def multiply(self, ratio: float) -> None:
        """Rescale the table in one of the first steps of a run: the machine is this much slower than it was."""
        self._settled = min(self._settled + 1, SETTLING)
        if self.speed is not None:
            self.speed *= ratio

    def fade(self) -> None:
        """Halve the factors and weights of drafted steps: none was taken for long, so they are due for a trial."""
        self._factor[1] /= 2
        self._sums[1] /= 2
        self._known.clear()

    def state(self) -> dict[str, Any]:
        factor, seen = self._factor.tolist(), self._seen.tolist()
        return {"scale": self.speed, "steep": self._log_slope, "doubt": self._doubt, "factor": factor, "seen": seen}

    @classmethod
    def of_state(cls, state: Mapping[str, Any], prior: PassPrior) -> StepTimes:
        """Return the table that `state` described; raise ValueError where it has another form."""
        table = cls(prior)
        factor, seen = np.array(state["factor"], np.float64), np.array(state["seen"], np.float64)
        numbers = [float(state["steep"]), float(state["doubt"]), *factor.ravel().tolist(), *seen.ravel().tolist()]
        speed = 1.0 if state["scale"] is None else float(state["scale"])
        fits = factor.shape == seen.shape == table._factor.shape and (seen >= 0).all()
        if not fits or not 0 < speed < 1e6 or not all(abs(one) < 1e6 for one in numbers) or numbers[1] <= 0:
            raise ValueError("step times of another form")
        table.speed, table._settled = None if state["scale"] is None else speed, 0
        table._log_slope, table._doubt, table._factor = numbers[0], numbers[1], factor
        table._seen[:] = np.minimum(seen, REMEMBERED)
        table._sums[:2] = table._seen * factor
        return table


def _fit(sums: tuple[float, ...]) -> tuple[float, float]:
    """Return a and b, neither below 0, by least squares from the sums of 1, d, d d, s, s d."""
    one, d, dd, s, sd = sums
    mean, spread = d / one, dd / one - (d / one) ** 2
    b = max((sd / one - s / one * mean + RIDGE * s / d) / (spread + RIDGE), 0.0)
    a = s / one - b * mean
    return (a, b) if a > 0 else (0.0, s / d)


class DraftTimes:
    """Seconds of a draft by its depth, by method and size of the batch."""

    def __init__(self) -> None:
        self._sums: dict[str, dict[int, tuple[float, ...]]] = {}  # by method and size, over timed drafts
        self._skipped: dict[tuple[str, int], int] = {}
        self._lines: dict[tuple[str, int], tuple[float, float]] = {}  # by method and size, until a draft is timed

    def line(self, method: str, sequences: int, guess: float) -> tuple[float, float]:
        """Return a and b of a draft for `sequences` rows; `guess`: seconds of a token ahead before any was timed."""
        known = self._sums.get(method)
        if not known:
            return 0.0, guess
        size = size_of(sequences)
        if (method, size) not in self._lines:
            near = min(known, key=lambda one: (abs(one - size), one))
            a, b = _fit(known[near])
            less = FEWER ** max(near - size, 0)
            self._lines[method, size] = a * less, b * less
        return self._lines[method, size]

    def observe(self, method: str, sequences: int, depth: int, seconds: float, *, skip: int = 0) -> None:
        """Learn from a draft; the first `skip` timings of each size are left out."""
        size, seconds = size_of(sequences), max(seconds, NOTHING_S)
        if self._skipped.get((method, size), 0) < skip:
            self._skipped[method, size] = self._skipped.get((method, size), 0) + 1
            return
        sums = self._sums.setdefault(method, {})
        if size in sums:
            a, b = _fit(sums[size])
            seconds = min(max(seconds, (a + b * depth) / DRAFT_OUTLIER), (a + b * depth) * DRAFT_OUTLIER)
        new = (1, depth, depth * depth, seconds, seconds * depth)
        old = sums.get(size, (0.0,) * 5)
        sums[size] = tuple([DRAFTS_FADE * before + now for before, now in zip(old, new, strict=True)])
        self._lines.clear()

    def multiply(self, ratio: float) -> None:
        """Rescale all times: the machine is this much slower than it was."""
        for sizes in self._sums.values():
            for size, (one, d, dd, s, sd) in sizes.items():
                bounded = max(ratio, one * NOTHING_S / s)
                sizes[size] = one, d, dd, s * bounded, sd * bounded
        self._lines.clear()

    def fade(self) -> None:
        """Halve all times: no step drafted for long, so drafts are due to be timed again."""
        self.multiply(0.5)

    def state(self) -> list[list[Any]]:
        return [[method, size, *sums] for method, sizes in self._sums.items() for size, sums in sizes.items()]

    @classmethod
    def of_state(cls, state: SequenceOf[SequenceOf[Any]]) -> DraftTimes:
        """Return the table that `state` described; raise ValueError where it has another form."""
        table = cls()
        for method, size, *sums in state:
            if len(sums) != 5 or not all(0 < float(one) < 1e9 for one in sums):
                raise ValueError("draft times of another form")
            table._sums.setdefault(str(method), {})[int(size)] = tuple(map(float, sums))
            table._skipped[str(method), int(size)] = FIRST_DRAFTS
        return table
