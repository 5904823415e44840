"""What a step costs by the number of its rows, and a draft by its rows and depth, learnt while serving.

A model is a shape (cost by rows, relative) times a scale (how fast the machine is right now). Every step moves the
scale quickly and the shape slowly, so a machine that slows down for a minute does not make one number of rows look
dear and another cheap. Steps with drafts have a shape of their own: they do more than pass more rows. One slow step
(a capture, a collection of garbage) teaches nothing: the middle one of the last three counts.
"""

from __future__ import annotations

import bisect
import functools
import math
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from paceline.models.pass_prior import CPU, PassPrior

FINE = (1, 2, 3, 4, 5, 6, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 64, 80, 96, 128, 192, 256, 384, 512)
SHAPE_RATE = 0.02
# How fast the scale moves, and how often a guess counts as seen: a step that is slow because the machine has become so
# must not make its number of rows look dear.
STEADY, DRIFTING = (0.1, 0.0), (0.2, 0.5)
OUTLIER = 3.0  # a step this many times off says more about the machine than about the rows
RECENT = 3
SURE, SETTLED = 1.1, 9  # a cost that is as far off still is a guess, unless it was seen so often
TRIED = 0.8  # of so many rows as were tried: that is another number of rows
NEAR = 1.6  # times as many rows, or as few: the prior's form is trusted between them
NEAR_TIME = 1.3  # where passes are padded, also between rows that take about as long by the prior
MOST_ROWS = 4096  # beyond, a step costs what it costs there
GUESSED = 3
REMEMBERED = 5  # times that a cost of an earlier run counts as seen: this run's machine may be another
FIRST_DRAFTS = 2  # of a method with so many rows: they compile, capture and allocate
DRAFTS_FADE = 0.9
FOR_FEWER = 0.8  # what a draft for half as many sequences is taken to cost before one was timed
NOTHING_S = 1e-7
SOME_GROWS, ALL_GROWS = 0.5, 0.95  # share of a draft's time that grows with its depth, before that was seen
A_PRIORI = 0.1  # how much spread of depths (squared) weighs as much as the guess

Floats = npt.NDArray[np.float64]


class _Curve:
    """How far the prior is off, at the numbers of rows seen."""

    def __init__(self, points: list[int] | None = None, factors: list[float] | None = None) -> None:
        self.points = points or []  # in order
        self.factors = factors or []
        self.seen: dict[int, int] = {}
        self._recent: dict[int, list[float]] = {}

    def at(self, rows: float) -> float:
        """Between the points seen; beyond them the prior keeps its form."""
        points, above = self.points, bisect.bisect_left(self.points, rows)
        if above == 0 or above == len(points):
            return self.factors[min(above, len(points) - 1)] if points else 1.0
        share = (rows - points[above - 1]) / (points[above] - points[above - 1])
        return self.factors[above - 1] * (1 - share) + self.factors[above] * share

    def along(self, rows: SequenceOf[float]) -> list[float]:
        """The same at several, of which each is followed by none smaller, sooner."""
        points, factors = self.points, self.factors
        if not points:
            return [1.0] * len(rows)
        found: list[float] = []
        above, last = 0, len(points)
        for row in rows:
            while above < last and points[above] < row:
                above += 1
            if above == last:  # the prior keeps its form beyond
                return found + [factors[-1]] * (len(rows) - len(found))
            if points[above] == row or not above:
                found.append(factors[above])
                continue
            share = (row - points[above - 1]) / (points[above] - points[above - 1])
            found.append(factors[above - 1] * (1 - share) + factors[above] * share)
        return found

    def add(self, point: int, factor: float, times: int) -> None:
        place = bisect.bisect_left(self.points, point)
        self.points.insert(place, point)
        self.factors.insert(place, factor)
        self.seen[point] = times

    def observe(self, point: int, factor: float, guess: float, weight: float) -> float:
        """Take in one measurement; returns how far off, by the middle of the last few, the estimate was.

        At a point never seen that is `guess`, which counts as if seen `weight` times.
        """
        recent = self._recent.setdefault(point, [])
        recent.append(factor)
        del recent[:-RECENT]
        factor = sorted(recent)[(len(recent) - 1) // 2]
        if point not in self.seen:
            self.add(point, guess, times=0)
        place = bisect.bisect_left(self.points, point)
        ratio = min(max(factor / self.factors[place], 1 / OUTLIER), OUTLIER)
        fresh = 1 / (1 + self.seen[point] + weight)
        at_once = not weight and self.seen[point] < RECENT
        self.factors[place] *= ratio ** (1.0 if at_once else max(SHAPE_RATE, fresh))
        self.seen[point] += 1
        return float(ratio ** (1 - fresh))

    def as_dict(self) -> dict[str, Any]:
        return {"rows": self.points, "factor": self.factors}

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any], grid: SequenceOf[int], seen: int) -> _Curve:
        curve = cls()
        for point, factor in zip(stored["rows"], stored["factor"], strict=True):
            if point not in grid or not 0 < float(factor) < 1e6:
                raise ValueError("a cost model of another form")
            curve.add(int(point), float(factor), seen)
        return curve


class _Tables(NamedTuple):
    """What follows from a prior, by rows."""

    padded: list[float]  # the rows it is padded to
    share: list[float]  # the time by the prior
    point: list[int]  # where in the grid
    grid: list[int]
    arrays: tuple[Floats, Floats, npt.NDArray[np.int64]]  # the first three, for many rows at once


@functools.cache
def _tables(prior: PassPrior) -> _Tables:
    grid = np.array(prior.padded_to or FINE)
    rows = np.arange(MOST_ROWS + 1)
    above = np.minimum(np.searchsorted(grid, rows), len(grid) - 1)
    below = np.maximum(above - 1, 0)
    point = above if prior.padded_to else np.where(rows - grid[below] < grid[above] - rows, below, above)
    padded = np.maximum(grid[above], rows) if prior.padded_to else rows
    known, times = np.array(prior.times).T
    share = np.interp(padded, known, times) * np.maximum(padded / known[-1], 1.0)
    arrays: tuple[Floats, Floats, npt.NDArray[np.int64]] = padded.astype(np.float64), share, point
    return _Tables(arrays[0].tolist(), share.tolist(), point.tolist(), grid.tolist(), arrays)


class CostModel:
    def __init__(self, prior: PassPrior = CPU) -> None:
        self.prior = prior
        self.scale: float | None = None  # seconds of a step of one row
        self._plain, self._drafted = _Curve(), _Curve()
        self._padded, self._share, self._point, self._grid, self._arrays = _tables(prior)
        self._unsure = [True] * len(self._grid)  # by point of the grid: with drafts seen seldom, or still moving

    def seconds(self, rows: int) -> float:
        """Of a plain step. 1.0 for one row while nothing is known: then only ratios mean anything."""
        rows = min(rows, MOST_ROWS)
        return (self.scale or 1.0) * self._share[rows] * self._plain.at(self._padded[rows])

    def seconds_with(self, base: int, nodes: int) -> Floats:
        """Of a step with 1, 2, ..., nodes drafted nodes on top of `base` rows."""
        rows, (padded, share, _) = _with(base, nodes), self._arrays
        curve = self._with_drafts()
        factor = np.interp(padded[rows], curve.points, curve.factors) if curve.points else 1.0
        seconds: Floats = (self.scale or 1.0) * share[rows] * factor
        return seconds

    def seconds_with_few(self, base: int, nodes: int) -> list[float]:
        """The same, sooner."""
        last, scale = base + nodes, self.scale or 1.0
        if last > MOST_ROWS:
            return list(map(float, self.seconds_with(base, nodes)))
        factors = self._with_drafts().along(self._padded[base + 1 : last + 1])
        return [scale * share * one for share, one in zip(self._share[base + 1 : last + 1], factors, strict=True)]

    def unsure_with(self, base: int, nodes: int) -> npt.NDArray[np.bool_]:
        """Whether the cost of such a step is little more than a guess."""
        unsure: npt.NDArray[np.bool_] = np.array(self._unsure)[self._arrays[2][_with(base, nodes)]]
        return unsure

    def sure_of(self, rows: int) -> bool:
        """Whether the cost of a step of so many rows with drafts is more than a guess."""
        return not self._unsure[self._point[min(rows, MOST_ROWS)]]

    def fewer_than_tried(self, base: int) -> int:
        """Nodes on top of `base` rows that are fewer than any step with drafts had; 0 before there was one."""
        tried = self._drafted.points
        return max(math.ceil(tried[0] * TRIED) - base - 1, 0) if tried else 0

    def plain_seen(self, rows: int) -> int:
        """How often plain steps of about so many rows were."""
        rows, most = min(rows, MOST_ROWS), 0
        for at, times in self._plain.seen.items():
            if times > most and self._is_near(rows, at):
                most = times
        return most

    def _is_near(self, rows: int, seen: int) -> bool:
        mine, its = self._padded[rows], self._padded[seen]
        if mine <= NEAR * its and its <= NEAR * mine:
            return True
        if not self.prior.padded_to:
            return False
        least, most = sorted((self._share[rows], self._share[seen]))
        return most <= NEAR_TIME * least

    def observe(self, rows: int, seconds: float, *, drafted: bool = False) -> None:
        rows = min(rows, MOST_ROWS)
        share, point = self._share[rows], self._point[rows]
        if self.scale is None:
            self.scale = seconds / share
        curve, at = self._drafted if drafted else self._plain, self._grid[point]
        guess = 1.0  # where it was seen there is no need of one
        if at not in curve.seen:
            guess = (self._with_drafts() if drafted and self._plain.points else curve).at(at)
        rate, weight = DRIFTING if self.prior.drifts else STEADY
        off = curve.observe(at, seconds / (self.scale * share), guess, weight)
        self.scale *= off**rate
        if drafted:
            seen = curve.seen[at]
            self._unsure[point] = seen < RECENT or (seen < SETTLED and not 1 / SURE < off < SURE)

    def _with_drafts(self) -> _Curve:
        """For steps with drafts: with fewer rows than any seen they are like plain ones."""
        plain, drafted = self._plain, self._drafted
        if not drafted.points:
            return plain
        fewer = bisect.bisect_left(plain.points, drafted.points[0])
        return _Curve(plain.points[:fewer] + drafted.points, plain.factors[:fewer] + drafted.factors)

    def as_a_guess(self) -> CostModel:
        """For steps that are alike: each cost counts as seen once, a few times where they hardly differ."""
        return CostModel.from_dict(self.as_dict(), self.prior, seen=GUESSED if self.prior.padded_to else 1)

    def as_dict(self) -> dict[str, Any]:
        return {"scale": self.scale, "plain": self._plain.as_dict(), "drafted": self._drafted.as_dict()}

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any], prior: PassPrior = CPU, seen: int = REMEMBERED) -> CostModel:
        if stored["scale"] is not None and not 0 < float(stored["scale"]) < 1e6:
            raise ValueError("a cost model of another form")
        model = cls(prior)
        model.scale = None if stored["scale"] is None else float(stored["scale"])
        model._plain = _Curve.from_dict(stored["plain"], model._grid, seen)
        model._drafted = _Curve.from_dict(stored["drafted"], model._grid, seen)
        if seen >= RECENT:
            model._unsure = [point not in model._drafted.points for point in model._grid]
        return model


def _with(base: int, nodes: int) -> npt.NDArray[np.int64]:
    return np.minimum(np.arange(base + 1, base + nodes + 1), MOST_ROWS)


class _Line:
    """Seconds of a draft as a + b depth, neither below 0, by least squares over fading trials."""

    def __init__(self, sums: SequenceOf[float] = (0.0,) * 5, trials: int = 0) -> None:
        self.sums, self._trials = list(sums), trials  # of 1, d, d d, s, s d
        self._recent: list[float] = []  # measured over expected
        self._first: tuple[int, float] | None = None  # not believed alone: it may be a slow one
        self.grows = SOME_GROWS
        self.a, self.b = self._fit()

    @property
    def known(self) -> bool:
        return self.sums[0] > 0

    def _fit(self) -> tuple[float, float]:
        """While only one depth was seen, a share of the time is taken to grow with it."""
        one, d, dd, s, sd = self.sums
        if not one:
            return 0.0, 0.0
        mean, spread = d / one, dd / one - (d / one) ** 2
        guess = self.grows * s / d
        b = max((sd / one - s / one * mean + A_PRIORI * guess) / (spread + A_PRIORI), 0.0)
        a = s / one - b * mean
        return (a, b) if a > 0 else (0.0, s / d)

    def _add(self, depth: int, seconds: float) -> None:
        one, d, dd, s, sd = [DRAFTS_FADE * old for old in self.sums]
        self.sums = [one + 1, d + depth, dd + depth * depth, s + seconds, sd + seconds * depth]

    def observe(self, depth: int, seconds: float) -> None:
        self._trials += 1
        if self._trials <= FIRST_DRAFTS:
            return
        if self.known:
            expected = max(self.a + self.b * depth, NOTHING_S)
            self._recent = [*self._recent, min(max(seconds / expected, 1 / OUTLIER), OUTLIER)][-RECENT:]
            seconds = expected * sorted(self._recent)[(len(self._recent) - 1) // 2]
        elif self._first is None:
            self._first = depth, seconds
            return
        else:
            self._recent = [1.0]
            each, before = seconds / depth, self._first[1] / self._first[0]
            if before <= OUTLIER * each:
                self._add(*self._first)
            seconds = min(each, OUTLIER * before) * depth
        self._add(depth, seconds)
        self.a, self.b = self._fit()


class Lines(NamedTuple):
    """Seconds of a method's draft as a + b depth, by the size of the number of sequences it is for."""

    a: SequenceOf[float]
    b: SequenceOf[float]
    each_s: float = 0.0  # what it takes for each sequence on top, to be asked

    @property
    def slope(self) -> float:
        return self.b[-1]

    def seconds(self, its: npt.NDArray[np.bool_], depth: npt.NDArray[np.int64], limit: Any = math.inf) -> Floats:
        """When the first 1, 2, ... of some nodes are drafted, of which `its` are the method's, down to `limit`."""
        rows = np.cumsum(its & (depth == 1))
        size = np.frexp(np.maximum(rows - 1, 0))[1]
        deepest = np.minimum(np.maximum.accumulate(np.where(its, depth, 0)), limit)
        a, b = np.array(self.a), np.array(self.b)
        return np.where(rows > 0, a[size] + b[size] * deepest + rows * self.each_s, 0.0)

    def at(self, rows: int, depth: int) -> float:
        """Seconds of one draft for so many sequences."""
        size = size_of(rows)
        return self.a[size] + rows * self.each_s + self.b[size] * depth


class DraftTimes:
    """By method and by how many sequences it drafts for at once, in powers of two."""

    def __init__(self) -> None:
        self._lines: dict[str, dict[int, _Line]] = {}

    def lines(self, method: str, sequences: int, guess_s: float, each_s: float) -> Lines:
        """For up to so many sequences. What was never seen takes what the nearest takes, and less for fewer;
        `guess_s` a token ahead while nothing is known."""
        known = {size: line for size, line in self._lines.get(method, {}).items() if line.known}
        sizes = range(size_of(sequences) + 1)
        if not known:
            return Lines([0.0] * len(sizes), [guess_s] * len(sizes), each_s)
        a, b = [], []
        for size in sizes:
            near = size if size in known else min(known, key=lambda one: (abs(one - size), one))
            less = FOR_FEWER ** max(near - size, 0)
            a.append(known[near].a * less)
            b.append(known[near].b * less)
        return Lines(a, b, each_s)

    def observe(self, method: str, rows: int, depth: int, seconds: float, *, passes: bool = False) -> None:
        """`passes`: every token ahead takes one of a model."""
        lines, size = self._lines.setdefault(method, {}), size_of(rows)
        line = lines.get(size) or lines.setdefault(size, _Line())
        line.grows = ALL_GROWS if passes else SOME_GROWS
        line.observe(depth, seconds)

    def as_dict(self) -> dict[str, Any]:
        return {
            method: {str(size): line.sums for size, line in lines.items() if line.known}
            for method, lines in self._lines.items()
        }

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> DraftTimes:
        times = cls()
        for method, lines in stored.items():
            for size, sums in lines.items():
                if len(sums) != 5 or not all(0 < float(one) < 1e9 for one in sums):
                    raise ValueError("draft times of another form")
                line = _Line([float(one) for one in sums], FIRST_DRAFTS)
                times._lines.setdefault(str(method), {})[int(size)] = line
        return times


def size_of(count: int) -> int:
    """1, 2, 3-4, 5-8, ...: costs are kept apart for these."""
    return max(count - 1, 0).bit_length()
