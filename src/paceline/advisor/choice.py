"""From measured speed-ups to a recommendation: pure functions, for one half of the prompts or both. No torch.

One setting serves all the given concurrencies. A fixed method is switched off where it does not pay, so there it counts
as plain decoding; `auto` is left on and counts with its measured speed-up. The score is the mean logarithm of the
speed-up, so that twice as fast at one concurrency and half as fast at another cancel.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass

from paceline.bench.grid import Contender
from paceline.bench.results import PLAIN, Cell
from paceline.config import AUTO
from paceline.theory import alpha_for, survival_from_counts, tokens_from_survival

PAYS = 1.03  # speed-up; a lower one is not worth a setting
AS_GOOD = 0.98  # share of the best fixed setting's speed-up from which `auto` is preferred: it adapts
RIVAL = 0.92  # share of the best speed-up from which a second drafter is measured on the second half too
CHOSEN_ERROR = 0.05  # standard error added to a figure that was chosen for being the highest: part of it is luck
UNKNOWN_ERROR = 0.08  # standard error of a figure without an interval
INTERVAL = 2.0  # standard errors; half a 95 % interval

OFF = Contender(PLAIN)


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A speed-up over plain decoding, and the figures that explain it."""

    ratio: float
    low: float | None = None  # 95 % interval; None where groups share prompts
    high: float | None = None
    groups: int
    decode_ratio: float | None = None  # ratio over the time after every request's first token
    tau: float | None = None
    acceptance_rate: float | None = None  # accepted tokens over drafted ones
    alpha: float | None = None  # constant acceptance with the measured tokens per draft, counted by depth
    tokens_per_answer: float = 0.0

    @classmethod
    def of(cls, cell: Cell, *, interval: bool) -> Figure | None:
        """Return a cell's figure; None where too little was measured."""
        if cell.speedup is None:
            return None
        survival = survival_from_counts(cell.drafted_per_position, cell.accepted_per_position)
        return cls(
            ratio=cell.speedup.ratio,
            low=cell.speedup.low if interval else None,
            high=cell.speedup.high if interval else None,
            groups=cell.speedup.pairs,
            decode_ratio=cell.decode_speedup.ratio if cell.decode_speedup else None,
            tau=cell.tau,
            acceptance_rate=cell.acceptance_rate,
            alpha=alpha_for(tokens_from_survival(survival), len(survival)) if survival else None,
            tokens_per_answer=cell.tokens / cell.answers,
        )

    @property
    def pays(self) -> bool:
        return self.ratio >= PAYS

    @property
    def surely_pays(self) -> bool:
        """Return whether it pays beyond chance: of settings that gain nothing, one always looks a little better."""
        return self.pays and self.bounds[0] > 1

    @property
    def bounds(self) -> tuple[float, float]:
        """The interval; without one, the interval of UNKNOWN_ERROR."""
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


Figures = Mapping[tuple[int, Contender], Figure]  # key: concurrency, contender; plain decoding left out


def combined(predicted: Figures, measured: Figures) -> Figures:
    """Weight both halves by their precision; the first alone counts at concurrencies that were not checked.

    Once anything was checked only the checked contenders count, so that all are known at the same concurrencies.
    """
    if not measured:
        return predicted
    levels, contenders = set(levels_of(measured)), set(contenders_of(measured))
    both = {key: _weighted(predicted.get(key), figure) for key, figure in measured.items()}
    unchecked = {key: figure for key, figure in predicted.items() if key[0] not in levels and key[1] in contenders}
    return {**both, **unchecked}


def _weighted(predicted: Figure | None, measured: Figure) -> Figure:
    if predicted is None:
        return measured
    weights = 1 / (predicted.error**2 + CHOSEN_ERROR**2), 1 / measured.error**2
    logs = math.log(predicted.ratio), math.log(measured.ratio)
    centre = sum(weight * log for weight, log in zip(weights, logs, strict=True)) / sum(weights)
    reach = INTERVAL / math.sqrt(sum(weights))
    return dataclasses.replace(
        measured, ratio=math.exp(centre), low=math.exp(centre - reach), high=math.exp(centre + reach)
    )


def levels_of(figures: Figures) -> list[int]:
    return sorted({level for level, _ in figures})


def contenders_of(figures: Figures) -> list[Contender]:
    return list(dict.fromkeys(contender for _, contender in figures))


def by_level(figures: Figures, contender: Contender) -> dict[int, Figure]:
    return {level: figure for (level, other), figure in figures.items() if other == contender}


# -- the recommendation


@dataclass(frozen=True)
class Recommendation:
    """`up_to`: the highest measured concurrency at which it pays; 0: none."""

    contender: Contender
    up_to: int = 0

    @property
    def off(self) -> bool:
        return self.contender == OFF


def score(figures: Figures, contender: Contender) -> float:
    """Return the mean logarithm of the speed-up over the measured concurrencies; plain decoding scores 0."""
    ratios = [figure.ratio for figure in by_level(figures, contender).values()]
    if contender.method != AUTO:
        ratios = [max(ratio, 1.0) for ratio in ratios]
    return sum(map(math.log, ratios)) / len(ratios) if ratios else 0.0


def ranked(figures: Figures, *, auto: bool = False) -> list[Contender]:
    """Sort the fixed settings, or those of `auto`, the best first; of equals the shorter draft. A draft model takes
    memory, so a setting with one must be better by what is worth a setting."""

    def order(contender: Contender) -> tuple[float, int]:
        memory = math.log(PAYS) if contender.draft_model else 0.0
        return memory - score(figures, contender), contender.k or 0

    return sorted([one for one in contenders_of(figures) if (one.method == AUTO) == auto], key=order)


def up_to(figures: Figures, contender: Contender) -> int:
    return max((level for level, figure in by_level(figures, contender).items() if figure.pays), default=0)


def pays_somewhere(figures: Figures, contender: Contender) -> bool:
    return any(figure.surely_pays for figure in by_level(figures, contender).values())


def to_check(predicted: Figures, *, rival: bool = True) -> list[Contender]:
    """Choose the best fixed setting, one of another drafter if it is close, and the best `auto`."""
    fixed = ranked(predicted)
    checked = fixed[:1]
    if checked and rival:
        best = checked[0]
        others = [each for each in fixed if (each.method, each.draft_model) != (best.method, best.draft_model)]
        if others and score(predicted, others[0]) >= score(predicted, best) + math.log(RIVAL):
            checked.append(others[0])
    return [*checked, *ranked(predicted, auto=True)[:1]]


def recommend(figures: Figures) -> Recommendation:
    """Choose the best setting: `auto` where it is as good, plain decoding where nothing pays."""
    least = math.log(PAYS) / max(len(levels_of(figures)), 1)  # paying at one concurrency is enough
    fixed = ranked(figures)
    best = fixed[0] if fixed and pays_somewhere(figures, fixed[0]) else OFF
    for auto in ranked(figures, auto=True):
        gain = score(figures, auto)
        if pays_somewhere(figures, auto) and gain >= max(least, score(figures, best) + math.log(AS_GOOD)):
            return Recommendation(auto, up_to(figures, auto))
    return Recommendation(best, up_to(figures, best)) if score(figures, best) >= least else Recommendation(OFF)


def levels_between(figures: Figures, contender: Contender) -> list[int]:
    """Return the powers of two between the highest concurrency at which it pays and the next one measured."""
    highest = up_to(figures, contender)
    above = min((level for level in levels_of(figures) if level > highest), default=0)
    return [level for level in (2**power for power in range(9)) if highest < level < above] if highest else []
