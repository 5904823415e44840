"""From prompts to advice: time passes, choose on one half of the prompts, check the best on the other.

Both halves are measured by the benchmark's own runner, interleaved with plain decoding. The best of many is partly the
luckiest, so its figure on the first half is called a prediction, and the second half, on which nothing was chosen,
measures it. If the run is interrupted, the findings until then remain valid.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from paceline.advisor.advice import Advice
from paceline.advisor.choice import OFF, Drafted, Figure, levels_between, to_check
from paceline.advisor.halves import halves, measure_half
from paceline.advisor.machine import Machine
from paceline.advisor.profile import activations_cost, method_cost, model_drafter, profile
from paceline.bench.grid import Contender
from paceline.bench.prompts import Prompt
from paceline.bench.runner import OnProgress, Plan
from paceline.config import AUTO
from paceline.drafters.model.draft_model import DraftModelDrafter

LENGTHS, QUICK_LENGTHS = (1, 2, 4, 8, 16), (2, 4, 8)  # the k that are tried; every drafter is with the middle one


@dataclass
class Advisor:
    subject: Machine
    prompts: Sequence[Prompt]
    plan: Plan
    advice: Advice
    on_progress: OnProgress = lambda done, total, what: None
    lengths: Sequence[int] = LENGTHS
    rival: bool = True  # whether a second drafter that is close on the first half is measured further

    def run(self) -> BaseException | None:
        """The error that ended the run early, if any; the advice then lists what is missing."""
        advice = self.advice
        self._first, self._second = halves(self.prompts)
        stages: list[tuple[str, Callable[[], None], Callable[[], object]]] = [  # name, work, its findings so far
            ("the profile", self._profile, lambda: advice.cost),
            ("the prediction", self._choose, lambda: advice.predicted),
            ("the check", self._check, lambda: advice.measured),
        ]
        for at, (name, work, found) in enumerate(stages):
            try:
                work()
            except BaseException as reason:  # Ctrl-C, no memory: keep the findings so far
                later = [each for each, _, _ in stages[at + 1 :]]
                advice.missing = [f"the rest of {name}" if found() else name, *later]
                return reason
        return None

    def _profile(self) -> None:
        subject, levels = self.subject, self.plan.concurrencies
        longest = max((subject.encode(prompt, []) for prompt in self._first), key=len)
        self.advice.cost = cost = profile(subject, levels, self.plan, self._part(0.0, 0.1))
        self.advice.drafters = [method_cost(subject, method, cost, self.plan, longest) for method in subject.methods]
        for model in subject.draft_models:
            self.advice.drafters = [*self.advice.drafters, model_drafter(subject, model, cost, self.plan)]
        if (rounded := subject.with_int8()) is not None:
            prompts = [subject.encode(prompt, []) for prompt in self._first]
            self.advice.activations = activations_cost(subject.loaded, rounded, prompts, subject.clock)

    def _choose(self) -> None:
        """Every drafter with a middling k, and `auto`; then the best of them with every other k."""
        levels, middle = self.plan.concurrencies, self.lengths[len(self.lengths) // 2]
        models = [model.name for model in self.subject.draft_models]
        fixed: list[Contender] = [Contender(method, middle) for method in self.subject.methods]
        fixed += [Drafted(DraftModelDrafter.name, middle, name) for name in models]
        autos: list[Contender] = [Contender(AUTO), *(Drafted(AUTO, None, name) for name in models)]
        self._measure([*fixed, *autos], self._first, levels, self.advice.predicted, self._part(0.1, 0.3))
        best = [each for each in to_check(self.advice.predicted, rival=self.rival) if each.k is not None]
        others = [replace(each, k=k) for each in best for k in self.lengths if k != middle]
        if others:
            self._measure(others, self._first, levels, self.advice.predicted, self._part(0.4, 0.3))

    def _check(self) -> None:
        """Measure on the other prompts; then, where the choice stops paying, the concurrencies between."""
        advice = self.advice
        checked = to_check(advice.predicted, rival=self.rival)
        self._measure(checked, self._second, self.plan.concurrencies, advice.measured, self._part(0.7, 0.25))
        contender = advice.choice.contender if advice.choice is not None else OFF
        if further := levels_between(advice.known, contender):
            self._measure([contender], self._second, further, advice.between, self._part(0.95, 0.05))

    def _measure(
        self,
        contenders: Sequence[Contender],
        prompts: Sequence[Prompt],
        levels: Sequence[int],
        found: dict[tuple[int, Contender], Figure],
        on_progress: OnProgress,
    ) -> None:
        self.subject.contenders = [OFF, *contenders]
        plan = replace(self.plan, concurrencies=levels)
        measure_half(self.subject, prompts, plan, self.subject.contenders, found, on_progress)

    def _part(self, start: float, share: float) -> OnProgress:
        """The progress of one stage as a part of the whole run's."""
        return lambda done, total, what: self.on_progress(start + share * done / max(total, 1), 1.0, what)
