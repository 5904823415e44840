"""A speed-up as the advisor holds it, predicted or measured, with what explains it. No torch.

A choice rests on both, each by how sure it is: a check of a few groups on a busy machine says less than a replay, and
a replay says less than a long check.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline.bench.grid import Contender
from paceline.bench.results import Cell

PAYS = 1.03  # a speed-up below that is not worth a setting
MODEL_ERROR = 0.05  # what a prediction may be off beside its interval: a table is not a machine
UNKNOWN_ERROR = 0.08  # of a figure without an interval
INTERVAL = 2.0  # half a 95 % interval, in standard errors


@dataclass(frozen=True, kw_only=True)
class Figure:
    ratio: float
    low: float | None = None  # 95 % interval; None where groups share prompts
    high: float | None = None
    groups: int
    decode_ratio: float | None = None  # of what comes after every request's first token
    tau: float | None = None
    acceptance_rate: float | None = None
    tokens_per_answer: float = 0.0

    @property
    def pays(self) -> bool:
        return self.ratio >= PAYS

    @property
    def surely_pays(self) -> bool:
        """Chance alone would hardly show it: of several choices that gain nothing, one always looks a little better."""
        return self.pays and self.bounds[0] > 1

    @property
    def bounds(self) -> tuple[float, float]:
        """The interval; as wide as it might be where none was given."""
        if self.low is not None and self.high is not None:
            return self.low, self.high
        reach = math.exp(INTERVAL * self.error)
        return self.ratio / reach, self.ratio * reach

    @property
    def error(self) -> float:
        """Standard error of the logarithm."""
        if self.low is None or self.high is None:
            return UNKNOWN_ERROR
        return max(math.log(self.high / self.low) / (2 * INTERVAL), 1e-3)


Figures = Mapping[tuple[int, Contender], Figure]  # by concurrency and contender; plain decoding is not among them


def figures(
    cells: Mapping[tuple[int, Contender], Cell], rounds: Mapping[int, int]
) -> dict[tuple[int, Contender], Figure]:
    found: dict[tuple[int, Contender], Figure] = {}
    for (level, contender), cell in cells.items():
        if cell.speedup is None:
            continue
        several = rounds[level] > 1
        found[level, contender] = Figure(
            ratio=cell.speedup.ratio,
            low=None if several else cell.speedup.low,
            high=None if several else cell.speedup.high,
            groups=cell.speedup.pairs,
            decode_ratio=cell.decode_speedup.ratio if cell.decode_speedup else None,
            tau=cell.tau,
            acceptance_rate=cell.acceptance_rate,
            tokens_per_answer=cell.tokens / cell.answers,
        )
    return found


def combined(predicted: Figures, measured: Figures) -> Figures:
    """Both, weighted by their precision, where both are known; the prediction alone at levels the check did not reach.

    Once anything was measured only what was chosen for the check counts, so that all are known at the same levels.
    """
    if not measured:
        return predicted
    levels, contenders = set(levels_of(measured)), set(contenders_of(measured))
    both = {key: _both(predicted.get(key), figure) for key, figure in measured.items()}
    rest = {key: found for key, found in predicted.items() if key[0] not in levels and key[1] in contenders}
    return {**both, **rest}


def _both(predicted: Figure | None, measured: Figure) -> Figure:
    if predicted is None:
        return measured
    weights = 1 / (predicted.error**2 + MODEL_ERROR**2), 1 / measured.error**2
    logs = math.log(predicted.ratio), math.log(measured.ratio)
    centre = sum(weight * log for weight, log in zip(weights, logs, strict=True)) / sum(weights)
    reach = INTERVAL / math.sqrt(sum(weights))
    bounds = math.exp(centre - reach), math.exp(centre + reach)
    return dataclasses.replace(measured, ratio=math.exp(centre), low=bounds[0], high=bounds[1])


def levels_of(found: Figures) -> list[int]:
    return sorted({level for level, _ in found})


def contenders_of(found: Figures) -> list[Contender]:
    return list(dict.fromkeys(contender for _, contender in found))


def as_json(found: Figures) -> list[dict[str, object]]:
    return [
        {"concurrency": level, "label": contender.label, **dataclasses.asdict(contender), **dataclasses.asdict(figure)}
        for (level, contender), figure in found.items()
    ]


def at_level(found: Figures, level: int) -> Sequence[tuple[Contender, Figure]]:
    return [(contender, figure) for (where, contender), figure in found.items() if where == level]
