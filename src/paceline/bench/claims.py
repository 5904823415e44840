"""What a benchmark may claim: which figure counts, and when chance would hardly show it. No torch.

Answers that loop flatter every method that copies, so where some do, the figure without them counts. The best of
several is often only the luckiest: with n compared the 95 % interval is widened for n (Bonferroni) before its lower end
is held against 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

from paceline.bench.results import Cell, Speedup


@dataclass(frozen=True)
class Best:
    """The most promising cell at one concurrency, among so many compared at all of them."""

    cell: Cell
    speedup: Speedup
    compared: int

    @property
    def pays(self) -> bool:
        return surely_faster(self.speedup, self.compared)

    @property
    def may_be_chance(self) -> bool:
        """It would pay, had nothing else been tried."""
        return self.speedup.low > 1 and not self.pays

    @property
    def without_loops(self) -> bool:
        return self.cell.looping > 0


def judged(cell: Cell) -> Speedup | None:
    """The figure a claim rests on; None where too little is left of it."""
    if not cell.looping:
        return cell.speedup
    return cell.without_loops.speedup if cell.without_loops else None


def surely_faster(speedup: Speedup, compared: int) -> bool:
    normal = NormalDist()
    wider = normal.inv_cdf(1 - 0.025 / compared) / normal.inv_cdf(1 - 0.025)
    return math.log(speedup.ratio) > wider * math.log(speedup.ratio / speedup.low)


def best_by_concurrency(cells: Sequence[Cell]) -> list[Best]:
    """Those that surely pay come before those with a higher ratio."""
    figures = [(cell, speedup) for cell in cells if (speedup := judged(cell)) is not None]
    found: dict[int, Best] = {}
    for cell, speedup in figures:
        now = Best(cell, speedup, len(figures))
        before = found.get(cell.concurrency)
        if before is None or (now.pays, now.speedup.ratio) > (before.pays, before.speedup.ratio):
            found[cell.concurrency] = now
    return [found[concurrency] for concurrency in sorted(found)]
