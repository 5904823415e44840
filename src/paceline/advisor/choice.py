"""From measured speed-ups to a choice: pure functions, the same for either half of the prompts. No torch.

One setting serves all the given concurrencies. A fixed method is switched off where it does not pay, so there it counts
as plain decoding; `auto` is left on and counts with its measured speed-up. The score is the mean logarithm of the
speed-up, so that twice as fast at one concurrency and half as fast at another cancel.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from paceline.bench.grid import Contender
from paceline.bench.results import PLAIN, Cell
from paceline.config import AUTO
from paceline.theory import alpha_for, survival_from_counts, tokens_from_survival

PAYS = 1.03  # a speed-up below that is not worth a setting
AS_GOOD = 0.98  # share of the best fixed choice's speed-up from which `auto` is preferred: it adapts
RIVAL = 0.92  # a second method this close on the first half is measured on the second half too
CHOSEN_ERROR = 0.05  # standard error added to a figure that was chosen for being the highest: part of it is luck
UNKNOWN_ERROR = 0.08  # standard error of a figure without an interval
INTERVAL = 2.0  # half a 95 % interval, in standard errors

OFF = Contender(PLAIN)


@dataclass(frozen=True)
class Drafted(Contender):
    """A contender that may use a certain draft model."""

    draft_model: str = ""

    @property
    def label(self) -> str:
        name = Path(self.draft_model).name
        return f"{AUTO} with {name}" if self.method == AUTO else f"{name} k={self.k}"


def draft_model_of(contender: Contender) -> str | None:
    return contender.draft_model if isinstance(contender, Drafted) else None


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A speed-up over plain decoding, and the figures that explain it."""

    ratio: float
    low: float | None = None  # 95 % interval; None where groups share prompts
    high: float | None = None
    groups: int
    decode_ratio: float | None = None  # of the time after every request's first token
    tau: float | None = None
    acceptance_rate: float | None = None  # accepted tokens over drafted ones
    alpha: float | None = None  # the constant acceptance that gives the same tokens per draft, counted by depth
    tokens_per_answer: float = 0.0

    @classmethod
    def of(cls, cell: Cell, *, interval: bool) -> Figure | None:
        """None where too little was measured."""
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
        """Pays beyond chance: of several choices that gain nothing, one always looks a little better."""
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


def combined(predicted: Figures, measured: Figures) -> Figures:
    """Both halves, weighted by their precision; the first alone at concurrencies the check did not reach.

    Once anything was checked only the checked contenders count, so that all are known at the same concurrencies.
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
    weights = 1 / (predicted.error**2 + CHOSEN_ERROR**2), 1 / measured.error**2
    logs = math.log(predicted.ratio), math.log(measured.ratio)
    centre = sum(weight * log for weight, log in zip(weights, logs, strict=True)) / sum(weights)
    reach = INTERVAL / math.sqrt(sum(weights))
    bounds = math.exp(centre - reach), math.exp(centre + reach)
    return dataclasses.replace(measured, ratio=math.exp(centre), low=bounds[0], high=bounds[1])


def levels_of(found: Figures) -> list[int]:
    return sorted({level for level, _ in found})


def contenders_of(found: Figures) -> list[Contender]:
    return list(dict.fromkeys(contender for _, contender in found))


def of_contender(found: Figures, contender: Contender) -> dict[int, Figure]:
    return {level: figure for (level, other), figure in found.items() if other == contender}


# -- the choice


@dataclass(frozen=True)
class Choice:
    """`up_to`: the highest concurrency, of those measured, at which it pays; 0: none."""

    contender: Contender
    up_to: int = 0

    @property
    def off(self) -> bool:
        return self.contender == OFF


def score(found: Figures, contender: Contender) -> float:
    """Mean logarithm of the speed-up over the concurrencies at which it is known; plain decoding scores 0."""
    ratios = [figure.ratio for figure in of_contender(found, contender).values()]
    if contender.method != AUTO:
        ratios = [max(ratio, 1.0) for ratio in ratios]
    return sum(map(math.log, ratios)) / len(ratios) if ratios else 0.0


def ranked(found: Figures, *, auto: bool = False) -> list[Contender]:
    """Fixed choices, or those of `auto`, the best first; of equals the shorter draft."""
    chosen = [contender for contender in contenders_of(found) if (contender.method == AUTO) == auto]
    return sorted(chosen, key=lambda contender: (-score(found, contender), contender.k or 0))


def up_to(found: Figures, contender: Contender) -> int:
    return max((level for level, figure in of_contender(found, contender).items() if figure.pays), default=0)


def pays_somewhere(found: Figures, contender: Contender) -> bool:
    return any(figure.surely_pays for figure in of_contender(found, contender).values())


def to_check(predicted: Figures, *, rival: bool = True) -> list[Contender]:
    """The best fixed choice, a rival of another drafter if it is close, and the best `auto`."""
    fixed = ranked(predicted)
    chosen = fixed[:1]
    if chosen and rival:
        others = [each for each in fixed if _drafter(each) != _drafter(chosen[0])]
        if others and score(predicted, others[0]) >= score(predicted, chosen[0]) + math.log(RIVAL):
            chosen.append(others[0])
    return [*chosen, *ranked(predicted, auto=True)[:1]]


def _drafter(contender: Contender) -> tuple[str, str | None]:
    return contender.method, draft_model_of(contender)


def decide(found: Figures) -> Choice:
    """The best contender; `auto` where it is as good; off where nothing pays."""
    least = math.log(PAYS) / max(len(levels_of(found)), 1)  # paying at one concurrency is enough
    fixed = ranked(found)
    best = fixed[0] if fixed and pays_somewhere(found, fixed[0]) else OFF
    for auto in ranked(found, auto=True):
        gain = score(found, auto)
        if pays_somewhere(found, auto) and gain >= max(least, score(found, best) + math.log(AS_GOOD)):
            return Choice(auto, up_to(found, auto))
    return Choice(best, up_to(found, best)) if score(found, best) >= least else Choice(OFF)


def levels_between(found: Figures, contender: Contender) -> list[int]:
    """Powers of two between the highest concurrency at which it pays and the next one measured: where does it stop?"""
    highest = up_to(found, contender)
    above = min((level for level in levels_of(found) if level > highest), default=0)
    return [level for level in (2**power for power in range(9)) if highest < level < above] if highest else []
