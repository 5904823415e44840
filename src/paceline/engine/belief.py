"""What is believed of the costs of many numbers of rows at once, from steps that other work slows down.

One such step says little about its own number of rows, but something about all: that the machine is slower now, or that
rows around this one take longer than was thought. So the belief is a Gaussian over the logarithms of how far the prior
is off, at every number of rows and for steps with and without drafts: near numbers are off by about as much, steps with
drafts by a little more or less, and all move together as the machine slows down and recovers. A measurement moves each
by what it says about it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence as SequenceOf

import numpy as np
import numpy.typing as npt

# Variances, of logarithms: 0.01 is about a tenth more or less.
NOISE = 0.1**2  # one step
LEVEL, LEVEL_MOVES = 0.1**2, 4e-4  # how fast the machine is: at first, and from step to step
TILT = 0.1  # as rows grow by e, everywhere: the prior is too flat or too steep
FORM = 0.01  # beyond that, between one number of rows and e times as many
OWN = 0.03**2  # a number of rows for itself
DRAFTED = 0.05**2  # steps with drafts against those without
FORGETS = 1e-4  # of it in every step: what rows cost may change too
SURPRISE = 2.5  # standard deviations: what is further off counts as no more

Floats = npt.NDArray[np.float64]


@functools.cache
def _at_first(grid: tuple[int, ...]) -> Floats:
    ahead = np.log(np.array(grid, dtype=np.float64))
    form = TILT * np.multiply.outer(ahead, ahead) + FORM * np.minimum.outer(ahead, ahead) + OWN * np.eye(len(grid))
    return np.block([[form, form], [form, form + DRAFTED]])


class Belief:
    """Over the points of a grid, first without and then with drafts."""

    def __init__(self, grid: SequenceOf[int]) -> None:
        self._points = len(grid)
        self._first = _at_first(tuple(grid))
        self._mean = np.zeros(2 * self._points)
        self._spread = self._first + LEVEL

    def observe(self, point: int, off: float, *, drafted: bool) -> float:
        """A step took `off` times what the prior says; how many times what was believed."""
        self._spread += FORGETS * (self._first - self._spread) + LEVEL_MOVES
        return self._take_in(point + self._points * drafted, math.log(off), NOISE)

    def assume(self, point: int, off: float, times: float, *, drafted: bool) -> None:
        """As if a step had so often taken that: from an earlier run, or from steps that are like these."""
        self._take_in(point + self._points * drafted, math.log(off), NOISE / times, math.inf)

    def loosen(self) -> None:
        """The machine may be faster or slower now."""
        self._spread += LEVEL

    def factors(self) -> tuple[list[float], list[float]]:
        """How far the prior is off, without and with drafts."""
        factors: list[float] = np.exp(self._mean).tolist()
        return factors[: self._points], factors[self._points :]

    def _take_in(self, at: int, measured: float, noise: float, surprise: float = SURPRISE) -> float:
        with_it = self._spread[at].copy()
        variance = float(with_it[at]) + noise
        off, most = measured - float(self._mean[at]), surprise * math.sqrt(variance)
        gain = with_it / variance
        self._mean += gain * min(max(off, -most), most)
        self._spread -= np.multiply.outer(gain, with_it)
        return math.exp(off)
