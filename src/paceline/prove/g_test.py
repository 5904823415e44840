"""G-tests of a sample against a known distribution, with a stated false-alarm probability and power.

With at least `ENOUGH` expected in every cell G follows chi-square; with less its tail is bounded without any limit
theorem (Agrawal 2020, "Finite-sample concentration of the multinomial in relative entropy"), so that small samples
raise no false alarm either.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

FALSE_ALARM = 1e-6  # probability for one whole run of `prove`, all its tests together
POWER = 0.99
ENOUGH = 20.0  # expected count of a cell from which chi-square is used far out in its tail
POOLED = 5.0  # expected count below which cells are counted as one


@dataclass(frozen=True)
class GTest:
    """The result of one test. `cells` are left after pooling; `impossible` counts outcomes of probability 0."""

    g: float
    cells: int
    samples: int
    smallest: float  # expected count of the rarest cell
    impossible: int = 0

    @property
    def df(self) -> int:
        return self.cells - 1

    @property
    def p_value(self) -> float:
        return 0.0 if self.impossible else tail(self.g, self.df, self.smallest)

    def detectable(self, alpha: float) -> float | None:
        """Return the total variation from which any bias (between the pooled cells) is found with probability POWER.

        The hardest to find of all biases of total variation d has the noncentrality 4 n d^2 (Cauchy-Schwarz).
        """
        if self.df < 1 or not self.samples:
            return None
        threshold = _root(lambda g: alpha - tail(g, self.df, self.smallest), float(self.df))
        needed = _root(lambda shift: noncentral_survival(threshold, self.df, shift) - POWER, 1.0)
        return min(math.sqrt(needed / (4 * self.samples)), 1.0)


def g_test(counts: Sequence[float], probabilities: Sequence[float]) -> GTest:
    """Test counts against probabilities that sum to 1, cell by cell."""
    total = float(sum(counts))
    impossible = sum(count for count, p in zip(counts, probabilities, strict=True) if p <= 0)
    cells: list[tuple[float, float]] = []
    rare = (0.0, 0.0)
    for count, p in sorted(zip(counts, probabilities, strict=True), key=lambda cell: -cell[1]):
        if p <= 0:
            continue
        if p * total >= POOLED:
            cells.append((count, p * total))
        else:
            rare = rare[0] + count, rare[1] + p * total
    if rare[1] > 0:
        if rare[1] < POOLED and cells:  # still too few: with the rarest of the others
            rare = rare[0] + cells[-1][0], rare[1] + cells[-1][1]
            cells.pop()
        cells.append(rare)
    g = 2 * sum(count * math.log(count / expected) for count, expected in cells if count)
    smallest = min((expected for _, expected in cells), default=0.0)
    return GTest(max(g, 0.0), len(cells), int(total), smallest, int(impossible))


def tail(g: float, df: int, smallest: float) -> float:
    """Return P(G >= g) under the null hypothesis: by chi-square, or an upper bound where some cell expects little."""
    if df < 1:
        return 1.0
    if smallest >= ENOUGH:
        return chi_square_survival(g, df)
    half = g / 2
    return 1.0 if half <= df else math.exp(min(-half + df * (1 + math.log(half / df)), 0.0))


def chi_square_survival(x: float, df: float) -> float:
    return 1.0 if x <= 0 else float(_upper_gamma(torch.tensor(df / 2.0), x / 2))


def noncentral_survival(x: float, df: int, shift: float) -> float:
    """Return P(X > x) of a noncentral chi-square, as a Poisson mixture of central ones."""
    half = shift / 2
    if half <= 0:
        return chi_square_survival(x, df)
    width = 12 * math.sqrt(half) + 20
    j = torch.arange(max(0, int(half - width)), int(half + width) + 1, dtype=torch.float64)
    weights = (j * math.log(half) - half - torch.lgamma(j + 1)).exp()
    return min(float((weights * _upper_gamma(df / 2 + j, x / 2)).sum()), 1.0)


def _upper_gamma(a: Tensor, x: float) -> Tensor:
    """Return the regularised upper incomplete gamma function Q(a, x), to nine digits or more."""
    gamma: Tensor = torch.special.gammaincc(a.double(), torch.full_like(a, x, dtype=torch.float64))
    return gamma


def _root(rising: Callable[[float], float], start: float) -> float:
    """Return where a rising function of a positive number crosses 0."""
    low, high = 0.0, max(start, 1.0)
    while rising(high) < 0:
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if rising(middle) < 0 else (low, middle)
    return high
