"""From figures to a choice: pure functions, the same for predicted and for measured ones. No torch.

One setting serves all the numbers of requests asked about. A fixed method is switched off where it does not pay, so
there it counts as plain decoding; `auto` is left on and counts as what it gives. The score is the mean logarithm of
the speed-up, so that twice as fast at one number and half as fast at another cancel.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.advisor.candidates import draft_model_of
from paceline.advisor.figures import PAYS, Figures, contenders_of, levels_of
from paceline.bench.grid import AUTO, Contender
from paceline.bench.results import PLAIN

AS_GOOD = 0.98  # what `auto` may lack of the best fixed choice and still be the better advice: it adapts
RIVAL = 0.92  # a second method this close by prediction is measured too

OFF = Contender(PLAIN)


@dataclass(frozen=True)
class Choice:
    """`up_to`: the highest number of requests at once, of those looked at, at which it pays; 0: none."""

    contender: Contender
    up_to: int = 0

    @property
    def off(self) -> bool:
        return self.contender == OFF


def score(found: Figures, contender: Contender) -> float:
    """Mean logarithm of the speed-up over the levels at which it is known; plain decoding scores 0."""
    ratios = [figure.ratio for (_, who), figure in found.items() if who == contender]
    if contender.method != AUTO:
        ratios = [max(ratio, 1.0) for ratio in ratios]
    return sum(map(math.log, ratios)) / len(ratios) if ratios else 0.0


def ranked(found: Figures) -> list[Contender]:
    """Fixed choices, the best first; of equals the shorter draft."""
    fixed = [contender for contender in contenders_of(found) if contender.method != AUTO]
    return sorted(fixed, key=lambda contender: (-score(found, contender), contender.k or 0))


def up_to(found: Figures, contender: Contender) -> int:
    return max((level for (level, who), figure in found.items() if who == contender and figure.pays), default=0)


def to_check(predicted: Figures, *, rival: bool = True) -> list[Contender]:
    """What is worth minutes of measuring: the best fixed choice, a rival of another method if close, and `auto`."""
    fixed = ranked(predicted)
    chosen = fixed[:1]
    if chosen and rival:
        others = [each for each in fixed if _source(each) != _source(chosen[0])]
        if others and score(predicted, others[0]) >= score(predicted, chosen[0]) + math.log(RIVAL):
            chosen.append(others[0])
    autos = [contender for contender in contenders_of(predicted) if contender.method == AUTO]
    autos.sort(key=lambda contender: -score(predicted, contender))
    return [*chosen, *autos[:1]]


def _source(contender: Contender) -> tuple[str, str | None]:
    return contender.method, draft_model_of(contender)


def decide(found: Figures) -> Choice:
    """The best of what is known; `auto` where it is as good; off where nothing pays."""
    least = math.log(PAYS) / max(len(levels_of(found)), 1)  # paying at one level is enough
    fixed = ranked(found)
    autos = [each for each in contenders_of(found) if each.method == AUTO and pays_somewhere(found, each)]
    best = fixed[0] if fixed and pays_somewhere(found, fixed[0]) else OFF
    for auto in sorted(autos, key=lambda each: -score(found, each)):
        gain = score(found, auto)
        if gain >= least and gain >= score(found, best) + math.log(AS_GOOD):
            return Choice(auto, up_to(found, auto))
    return Choice(best, up_to(found, best)) if score(found, best) >= least else Choice(OFF)


def pays_somewhere(found: Figures, contender: Contender) -> bool:
    return any(figure.surely_pays for (_, who), figure in found.items() if who == contender)


def levels_between(levels: Sequence[int]) -> list[int]:
    """The powers of two between the levels asked about: where exactly it stops paying costs only a replay."""
    highest = max(levels)
    powers = (2**power for power in range(9))
    return [level for level in powers if min(levels) < level < highest and level not in levels]
