"""Seconds of a step by its rows and of a draft by its depth: two small tables, learnt while serving.

A step takes scale x (1 + steepness x (prior(rows) - 1)) x factor[plain or drafted][rows]. The *scale* is how fast the
machine is right now and follows every step. The *steepness* is what rows cost here against the prior: one number for
all of them, so that a machine unlike the prior is known after a few steps, whatever sizes they had (a Kalman filter of
one state). The *factors* take what is left, slowly, and share it with neighbouring numbers of rows. A draft takes
a + b x depth, by method and by the number of sequences it is for, in powers of two.
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

# Rows that steps are told apart by where passes are not padded.
GRID = (1, 2, 3, 4, 5, 6, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 64, 80, 96, 128, 192, 256, 384, 512)
MOST_ROWS = 4096  # beyond, a step costs what it costs there
MAX_NODES = 1024  # of one step: passes beyond are as dear as they are long
SCALE_RATE = 0.2  # share of a surprise that the scale takes: other work slows a machine down for seconds
FACTOR_RATE = 0.05  # the same of a factor, once seen often: shapes do not change while a machine runs
OUTLIER = 1.5  # times off: a step further off says no more than this (a capture, a collection of garbage)
STEEP_DOUBT = 0.5  # variance of the log of the steepness before any step was timed: a factor of two either way
STEEP_DRIFT = 2e-4  # added to it by each step: what is known of it ages
NOISE = 0.03  # variance of the log of one step's time: what the filter takes for chance
NEIGHBOUR = 0.5  # say of the next number of rows in the grid, and of the one after it the square of that, and so on
KNOWN = 0.1  # say of plain steps seen that makes the cost of one known: three numbers of rows away at most
OTHER_KIND = 0.01  # say of plain steps in what drafted ones take: only while those are unseen
REMEMBERED = 4.0  # times that a cost of an earlier run counts as seen: this run's machine may be another
# First steps of a run that remembers another: their surprise is the machine's speed, up to so many times, and nothing
# else is learnt from them. They may all be plain: what drafted ones took must stay comparable.
SETTLING, MOST_CHANGE = 3, 32.0
DRAFT_OUTLIER = 3.0  # as OUTLIER, of drafts: first guesses of them are further off
FIRST_DRAFTS = 2  # timings of a model at some size that are not believed: they allocate and compile
NOTHING_S = 1e-7  # seconds: a draft takes as long at least, so that its time has a ratio
DRAFTS_FADE = 0.9  # share of its weight that a timed draft keeps with the next one
PASS_GUESS, LOOKUP_GUESS = 0.1, 0.01  # of a step of one row: a token ahead before any was timed
RIDGE = 0.1  # spread of depths (squared) below which a draft's time is taken to grow in proportion to its depth
FEWER = 0.8  # of a draft's time for twice as many sequences, before one for so few was timed

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


def size_of(count: int) -> int:
    """1, 2, 3-4, 5-8, ...: batches are told apart by these."""
    return max(count - 1, 0).bit_length()


@functools.cache
def _shape(prior: PassPrior) -> tuple[Floats, Ints, int]:
    """By rows: the prior's time against one row, and the place in the grid; and the size of that."""
    grid, rows = np.array(prior.padded_to or GRID), np.minimum(np.arange(MOST_ROWS + MAX_NODES + 1), MOST_ROWS)
    above = np.minimum(np.searchsorted(grid, rows), len(grid) - 1)
    below = np.maximum(above - 1, 0)
    point = above if prior.padded_to else np.where(rows - grid[below] < grid[above] - rows, below, above)
    padded = np.maximum(grid[above], rows) if prior.padded_to else np.maximum(rows, 1)
    known, times = np.array(prior.times).T
    share = np.interp(padded, known, times) * np.maximum(padded / known[-1], 1.0)
    return share / share[1], point, len(grid)


class StepTimes:
    """Of steps that are alike but for their rows."""

    def __init__(self, prior: PassPrior = CPU) -> None:
        self._share, self._point, points = _shape(prior)
        self.scale: float | None = None  # seconds of a plain step of one row
        self._steep, self._doubt = 0.0, STEEP_DOUBT  # log of the steepness, and its variance
        self._factor = np.zeros((2, points))  # logs, of plain and of drafted steps, at the numbers of rows seen
        self._told = np.zeros((4, points))  # each of these factors times how often it was seen, and how often
        self._seen = self._told[2:]
        self._near = NEIGHBOUR ** np.abs(np.arange(points)[:, None] - np.arange(points))
        self._known: dict[int, tuple[float, float, float]] = {}  # `_at`, until a step is observed
        self._settled = SETTLING  # steps of this run, up to so many

    def _at(self, rows: int) -> tuple[float, float, float]:
        """The logs of the factors of plain and drafted steps of so many rows, and how often such plain ones were seen.
        Numbers of rows share what is known: one never seen is as far off the prior as its neighbours."""
        point = self._point.item(rows)
        found = self._known.get(point)
        if found is None:
            plain, drafted, seen, drafted_seen = (self._told @ self._near[point]).tolist()
            drafted, drafted_seen = drafted + OTHER_KIND * plain, drafted_seen + OTHER_KIND * seen
            found = self._known[point] = plain / max(seen, 1e-12), drafted / max(drafted_seen, 1e-12), seen
        return found

    def seconds(self, rows: int) -> float:
        """Of a plain step."""
        rows = min(rows, MOST_ROWS)
        shape = 1 + math.exp(self._steep) * (self._share.item(rows) - 1)
        return (self.scale or 1.0) * shape * math.exp(self._at(rows)[0])

    def seconds_with(self, base: int, nodes: int) -> Floats:
        """Of steps with 1, 2, ..., nodes drafted nodes on top of `base` rows; no more rows ever cost less."""
        steep, scale = math.exp(self._steep), self.scale or 1.0
        first, end = min(base, MOST_ROWS) + 1, min(base, MOST_ROWS) + 1 + nodes
        seconds = self._share[first:end] * (scale * steep)
        seconds += scale * (1 - steep)
        plain, drafted, seen, drafted_seen = self._told @ self._near
        smooth = (drafted + OTHER_KIND * plain) / np.maximum(drafted_seen + OTHER_KIND * seen, 1e-12)  # as in `_at`
        seconds *= np.exp(smooth)[self._point[first:end]]
        return np.maximum.accumulate(seconds, out=seconds)

    def plain_known(self, rows: int) -> bool:
        return self._at(min(rows, MOST_ROWS))[2] >= KNOWN

    def observe(self, rows: int, seconds: float, *, drafted: bool) -> float:
        """Returns the log of what it took over what was expected."""
        rows, kind = min(rows, MOST_ROWS), int(drafted)
        grows = math.exp(self._steep) * (self._share.item(rows) - 1)
        if self.scale is None:
            self.scale = seconds / (1 + grows)
        point, smooth = self._point.item(rows), self._at(rows)[kind]
        expected = self.scale * (1 + grows) * math.exp(smooth)
        surprise = off = math.log(min(max(seconds / expected, 1 / OUTLIER), OUTLIER))
        # The filter: how much of a surprise is the steepness's, by how much of the time it decides.
        weight = grows / (1 + grows)
        gain = weight * self._doubt / (weight * weight * self._doubt + NOISE)
        self._steep += gain * off
        self._doubt += STEEP_DRIFT - gain * weight * self._doubt
        off *= 1 - gain * weight
        seen = min(self._seen.item(kind, point) + 1, 1 / FACTOR_RATE)
        factor = (smooth if seen == 1 else self._factor.item(kind, point)) + off / seen
        self._factor[kind, point], self._told[kind, point], self._seen[kind, point] = factor, seen * factor, seen
        self._known.clear()
        self.scale *= math.exp(SCALE_RATE * off * (1 - 1 / seen))
        return surprise

    def settle(self, rows: int, seconds: float, *, drafted: bool) -> float | None:
        """Of the first steps of a run that remembers another: times as slow as the machine then was, for `slow_down`;
        None: that is settled."""
        if self._settled == SETTLING or self.scale is None:
            return None
        rows = min(rows, MOST_ROWS)
        shape = 1 + math.exp(self._steep) * (self._share.item(rows) - 1)
        off = seconds / (self.scale * shape * math.exp(self._at(rows)[drafted]))
        return float(min(max(off, 1 / MOST_CHANGE), MOST_CHANGE) ** (1 / (1 + self._settled)))

    def slow_down(self, times: float) -> None:
        """The machine is so many times as slow as it was."""
        self._settled = min(self._settled + 1, SETTLING)
        if self.scale is not None:
            self.scale *= times

    def fade(self) -> None:
        """No step drafted for long: what made drafting dear is forgotten by half, to be put to the test again."""
        self._factor[1] /= 2
        self._told[1] /= 2
        self._known.clear()

    def state(self) -> dict[str, Any]:
        factor, seen = self._factor.tolist(), self._seen.tolist()
        return {"scale": self.scale, "steep": self._steep, "doubt": self._doubt, "factor": factor, "seen": seen}

    @classmethod
    def of_state(cls, state: Mapping[str, Any], prior: PassPrior) -> StepTimes:
        made = cls(prior)
        factor, seen = np.array(state["factor"], np.float64), np.array(state["seen"], np.float64)
        numbers = [float(state["steep"]), float(state["doubt"]), *factor.ravel().tolist(), *seen.ravel().tolist()]
        scale = 1.0 if state["scale"] is None else float(state["scale"])
        fits = factor.shape == seen.shape == made._factor.shape and (seen >= 0).all()
        if not fits or not 0 < scale < 1e6 or not all(abs(one) < 1e6 for one in numbers) or numbers[1] <= 0:
            raise ValueError("step times of another form")
        made.scale, made._settled = None if state["scale"] is None else scale, 0
        made._steep, made._doubt, made._factor = numbers[0], numbers[1], factor
        made._seen[:] = np.minimum(seen, REMEMBERED)
        made._told[:2] = made._seen * factor
        return made


def _fit(sums: tuple[float, ...]) -> tuple[float, float]:
    """a and b, neither below 0, by least squares from the sums of 1, d, d d, s, s d."""
    one, d, dd, s, sd = sums
    mean, spread = d / one, dd / one - (d / one) ** 2
    b = max((sd / one - s / one * mean + RIDGE * s / d) / (spread + RIDGE), 0.0)
    a = s / one - b * mean
    return (a, b) if a > 0 else (0.0, s / d)


class DraftTimes:
    def __init__(self) -> None:
        self._sums: dict[str, dict[int, tuple[float, ...]]] = {}  # by method and size, of timed drafts
        self._skipped: dict[tuple[str, int], int] = {}
        self._lines: dict[tuple[str, int], tuple[float, float]] = {}  # by method and size, until one is timed

    def line(self, method: str, sequences: int, guess: float) -> tuple[float, float]:
        """a and b of a draft for so many; `guess` seconds a token ahead while nothing is known."""
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
        """`skip`: first timings of a size that are not believed."""
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

    def slow_down(self, times: float) -> None:
        """The machine is so many times as slow as it was."""
        self._multiply(times)

    def fade(self) -> None:
        """No step drafted for long: what was timed once is halved, to be put to the test again."""
        self._multiply(0.5)

    def _multiply(self, times: float) -> None:
        for sizes in self._sums.values():
            for size, (one, d, dd, s, sd) in sizes.items():
                least = max(times, one * NOTHING_S / s)
                sizes[size] = one, d, dd, s * least, sd * least
        self._lines.clear()

    def state(self) -> list[list[Any]]:
        return [[method, size, *sums] for method, sizes in self._sums.items() for size, sums in sizes.items()]

    @classmethod
    def of_state(cls, state: SequenceOf[SequenceOf[Any]]) -> DraftTimes:
        made = cls()
        for method, size, *sums in state:
            if len(sums) != 5 or not all(0 < float(one) < 1e9 for one in sums):
                raise ValueError("draft times of another form")
            made._sums.setdefault(str(method), {})[int(size)] = tuple(map(float, sums))
            made._skipped[str(method), int(size)] = FIRST_DRAFTS
        return made
