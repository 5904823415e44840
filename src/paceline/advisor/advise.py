"""From prompts to advice: time steps, choose on one half of the prompts, check the best on the other.

Both halves are measured by the benchmark's own runner, interleaved with plain decoding. The best of many is partly the
luckiest, so its figure on the first half is called a prediction, and the second half, on which nothing was chosen,
measures it. Findings remain valid when the run is interrupted. No torch before that.

Each half has every other prompt of each workload. Where a half fills fewer than five groups, further rounds group its
prompts anew, each with new engines, so that no suffix store has seen their answers. Such groups share prompts: the
figure is valid, but its interval would be too narrow and is omitted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from paceline.advisor.choice import OFF, Figure, levels_between, to_check
from paceline.advisor.result import Advice
from paceline.bench.grid import Contender
from paceline.bench.groups import check_tokens, make_groups
from paceline.bench.intervals import MIN_PAIRS
from paceline.bench.measurement import Measurement, cells
from paceline.bench.prompts import Prompt
from paceline.bench.results import ALL
from paceline.bench.runner import OnProgress, RunPlan, measure
from paceline.config import AUTO
from paceline.drafters.methods import DRAFT_MODEL
from paceline.errors import InvalidParameter

if TYPE_CHECKING:
    from paceline.advisor.subject import AdviceSubject

LENGTHS, QUICK_LENGTHS = (1, 2, 4, 8, 16), (2, 4, 8)  # every k tried; the middle one with every drafter
MAX_ROUNDS = 5  # groupings of one half's prompts


@dataclass
class Advisor:
    subject: AdviceSubject
    prompts: Sequence[Prompt]
    plan: RunPlan
    advice: Advice
    on_progress: OnProgress = lambda done, total, what: None
    lengths: Sequence[int] = LENGTHS
    rival: bool = True  # measure a second drafter further that is close on the first half

    def run(self) -> BaseException | None:
        """Return the error that ended the run early, if any; `advice.missing` then lists what was not measured."""
        advice = self.advice
        self._first, self._second = halves(self.prompts)
        stages: list[tuple[str, Callable[[], None], Callable[[], object]]] = [  # name, work, its findings so far
            ("the profile", self._profile, lambda: advice.cost),
            ("the prediction", self._choose, lambda: advice.predicted),
            ("the check", self._check, lambda: advice.measured),
        ]
        for at, (name, work, findings) in enumerate(stages):
            try:
                work()
            except BaseException as reason:  # Ctrl-C, no memory: keep the findings so far
                later = [each for each, _, _ in stages[at + 1 :]]
                advice.missing = [f"the rest of {name}" if findings() else name, *later]
                return reason
        return None

    def _profile(self) -> None:
        from paceline.advisor.subject import activations_cost, drafter_cost, pass_cost

        subject, advice = self.subject, self.advice
        prompts = [subject.encode(prompt, []) for prompt in self._first]
        advice.cost = pass_cost(subject, self.plan, self._part(0.0, 0.1))
        drafters = [Contender(method) for method in subject.methods]
        drafters += [Contender(DRAFT_MODEL, None, model.name) for model in subject.draft_models]
        for contender in drafters:
            cost = drafter_cost(subject, contender, advice.cost, self.plan, max(prompts, key=len))
            advice.drafters = [*advice.drafters, cost]
        if (rounded := subject.with_int8()) is not None:
            advice.activations = activations_cost(subject.loaded, rounded, prompts, subject.clock)

    def _choose(self) -> None:
        """Measure every drafter with a middling k, and `auto`; then the best drafters with every other k."""
        levels, middle = self.plan.concurrencies, self.lengths[len(self.lengths) // 2]
        models = [model.name for model in self.subject.draft_models]
        fixed = [Contender(method, middle) for method in self.subject.methods]
        fixed += [Contender(DRAFT_MODEL, middle, name) for name in models]
        autos = [Contender(AUTO), *(Contender(AUTO, None, name) for name in models)]
        self._measure([*fixed, *autos], self._first, levels, self.advice.predicted, self._part(0.1, 0.3))
        best = [each for each in to_check(self.advice.predicted, rival=self.rival) if each.k is not None]
        others = [replace(each, k=k) for each in best for k in self.lengths if k != middle]
        if others:
            self._measure(others, self._first, levels, self.advice.predicted, self._part(0.4, 0.3))

    def _check(self) -> None:
        """Measure on the other prompts; then, where the recommendation stops paying, the concurrencies between."""
        advice = self.advice
        checked = to_check(advice.predicted, rival=self.rival)
        self._measure(checked, self._second, self.plan.concurrencies, advice.measured, self._part(0.7, 0.25))
        contender = advice.recommendation.contender if advice.recommendation is not None else OFF
        if further := levels_between(advice.known, contender):
            self._measure([contender], self._second, further, advice.between, self._part(0.95, 0.05))

    def _measure(
        self,
        contenders: Sequence[Contender],
        prompts: Sequence[Prompt],
        levels: Sequence[int],
        figures: dict[tuple[int, Contender], Figure],
        on_progress: OnProgress,
    ) -> None:
        """Add the figures of `contenders` to `figures`, and after an interruption those measured until then."""
        self.subject.contenders = [OFF, *contenders]
        measurement = Measurement(self.subject.contenders)
        plan = replace(self.plan, concurrencies=levels, max_rounds=MAX_ROUNDS)
        try:
            measure(self.subject, prompts, plan, measurement, on_progress)
        finally:
            by_label = {contender.label: contender for contender in measurement.contenders}
            whole = [cell for cell in cells(measurement) if cell.workload == ALL]
            for cell in whole:
                if figure := Figure.of(cell, interval=measurement.rounds[cell.concurrency] == 1):
                    figures[cell.concurrency, by_label[cell.label]] = figure
        if not figures:
            raise InvalidParameter("prompts", next(cell.too_short for cell in whole if cell.too_short) or "")

    def _part(self, start: float, share: float) -> OnProgress:
        """Report the progress of one stage as a part of the whole run's."""
        return lambda done, total, what: self.on_progress(start + share * done / max(total, 1), 1.0, what)


# -- the prompts in two halves


def halves(prompts: Sequence[Prompt]) -> tuple[list[Prompt], list[Prompt]]:
    """Split the prompts; the second half has one less for each workload with an odd number."""
    alike: dict[tuple[str, int], list[Prompt]] = {}
    for prompt in prompts:
        alike.setdefault((prompt.workload, len(prompt.turns)), []).append(prompt)
    first: list[Prompt] = []
    second: list[Prompt] = []
    for members in alike.values():
        shorter, longer = sorted((first, second), key=len)
        shorter += members[::2]
        longer += members[1::2]
    return first, second


def check_halves(halves: Sequence[Sequence[Prompt]], levels: Sequence[int], max_tokens: int) -> None:
    """Refuse a run that could not end in advice."""
    for half in halves:
        if len(half) < MIN_PAIRS:
            raise InvalidParameter(
                "prompts",
                f"{sum(map(len, halves))} prompts are too few: half of them are to choose on and half to check on, "
                f"and fewer than {MIN_PAIRS} in a half are not enough; give at least {2 * MIN_PAIRS}",
            )
        for level in levels:
            if not make_groups(half, level)[0]:
                raise InvalidParameter(
                    "concurrency",
                    f"half of the prompts ({len(half)}) never make {level} requests at once with equally many turns: "
                    f"give at least {2 * level} prompts, or lower the concurrency",
                )
        check_tokens(len(half) * max_tokens)
