"""From prompts to advice: answer half of them plainly, time passes, replay every choice, check the best on the rest.

Only the first and the last take the model's time: what a choice would have given on answers that are known is looked
up. Whatever ends the run, what was found until then stands.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from paceline.advisor.advice import Advice
from paceline.advisor.candidates import Drafted
from paceline.advisor.figures import Figures, figures
from paceline.advisor.guesses import Guesses, read_guesses
from paceline.advisor.halves import halves
from paceline.advisor.machine import Advised
from paceline.advisor.profile import DrafterCost, host_drafter, model_drafter, profile
from paceline.advisor.recommend import OFF, levels_between, ranked, to_check
from paceline.advisor.records import Records, record
from paceline.advisor.replay import Replay
from paceline.advisor.rounds import measure_rounds, overall, rounds_for
from paceline.bench.grid import AUTO, Contender
from paceline.bench.groups import make_groups
from paceline.bench.measurement import Measurement
from paceline.bench.prompts import Prompt
from paceline.bench.runner import WARM_UP, OnProgress, Plan, Subject
from paceline.bench.statistics import MIN_TOKENS
from paceline.errors import InvalidParameter

LENGTHS = (1, 2, 3, 4, 6, 8, 12, 16)  # the k that are tried
STAGES = (("the plain answers", 0.15), ("the profile", 0.1), ("the prediction", 0.15), ("the check", 0.6))


@dataclass
class Advisor:
    subject: Advised
    prompts: Sequence[Prompt]
    plan: Plan
    advice: Advice
    on_progress: OnProgress = lambda done, total, what: None
    lengths: Sequence[int] = ()  # the k that are tried; empty: LENGTHS
    rival: bool = True  # whether a second method that is close by prediction is checked too
    records: Records = field(default_factory=Records)
    _guesses: dict[str, Guesses] = field(default_factory=dict)
    _before: float = 0.0
    _share: float = 0.0

    def __post_init__(self) -> None:
        self.lengths = self.lengths or LENGTHS
        self.first, self.second = halves(self.prompts)

    def run(self) -> BaseException | None:
        """What ended the run early, if anything did; the advice then says what is missing."""
        stages: Sequence[Callable[[], None]] = (self._record, self._profile, self._predict, self._check)
        for at, stage in enumerate(stages):
            self._before, self._share = sum(share for _, share in STAGES[:at]), STAGES[at][1]
            try:
                stage()
            except BaseException as reason:  # Ctrl-C, no memory: what was found is not thrown away
                under_way, *later = [name for name, _ in STAGES[at:]]
                begun = self.advice.cost is not None if stage == self._profile else self.advice.measured
                self.advice.missing = [f"the rest of {under_way}" if begun else under_way, *later]
                return reason
        return None

    def _progress(self, done: float, total: float, what: str) -> None:
        self.on_progress(self._before + self._share * done / max(total, 1), 1.0, what)

    def _record(self) -> None:
        answered = record(self.subject, self.first, self.plan, self.records, self._progress)
        warm_up = tuple(self.subject.encode(WARM_UP, []))
        tokens = sum(len(each.answer) for prompt, each in self.records.items() if prompt != warm_up)
        if tokens < MIN_TOKENS:
            raise InvalidParameter(
                "prompts",
                f"the answers to {len(answered)} prompts have only {tokens} tokens together, and fewer than "
                f"{MIN_TOKENS} say nothing: give more prompts, or more tokens to each",
            )

    def _profile(self) -> None:
        subject, levels = self.subject, self.plan.concurrencies
        self.advice.cost = profile(subject, levels, self.records.longest, self.plan, self._progress)
        longest = max(self.records.values(), key=lambda each: len(each.prompt) + len(each.answer))
        self.advice.drafters = [host_drafter(subject, method, longest) for method in subject.methods]
        for model in subject.draft_models:
            found = model_drafter(subject, model, levels, self.plan)
            self.advice.drafters = [*self.advice.drafters, found]

    def _predict(self) -> None:
        for model in self.subject.draft_models:
            self._progress(0, 1, f"reading the answers with {model.name}")
            drafter = self.subject.drafters(Drafted("draft-model", 1, model.name))[-1]
            decoder = model.loaded.decoder
            found = read_guesses(drafter, list(self.records.values()), decoder.cache_dtype, decoder.device)
            self._guesses[model.name] = found
        levels = list(self.plan.concurrencies)
        self.advice.predicted = self._replay(self.candidates(), levels)
        further = [level for level in levels_between(levels) if make_groups(self.first, level)[0]]
        best = ranked(self.advice.predicted)[:1]
        self.advice.between = self._replay([OFF, *best], further) if best and further else {}

    def candidates(self) -> list[Contender]:
        """Everything there is to choose from, plain decoding first."""
        fixed = [Contender(method, k) for method in self.subject.methods for k in self.lengths]
        models = [model.name for model in self.subject.draft_models]
        drafted: list[Contender] = [Drafted("draft-model", k, name) for name in models for k in self.lengths]
        autos: list[Contender] = [Contender(AUTO), *(Drafted(AUTO, None, name) for name in models)]
        return [OFF, *fixed, *drafted, *autos]

    def _replay(self, contenders: Sequence[Contender], levels: Sequence[int]) -> Figures:
        assert self.advice.cost is not None
        costs: dict[str, DrafterCost] = {each.draft_model: each for each in self.advice.drafters if each.draft_model}
        replay = Replay(
            subject=self.subject,
            records=self.records,
            cost=self.advice.cost,
            model_costs=costs,
            guesses=self._guesses,
            contenders=list(contenders),
        )
        return self._figures(replay, self.first, contenders, levels)

    def _check(self) -> None:
        """Measured as a benchmark measures, on prompts nothing was predicted from."""
        chosen = [OFF, *to_check(self.advice.predicted, rival=self.rival)]
        self.subject.contenders = chosen
        self.advice.measured = self._figures(self.subject, self.second, chosen, self.plan.concurrencies)

    def _figures(
        self, subject: Subject, prompts: Sequence[Prompt], contenders: Sequence[Contender], levels: Sequence[int]
    ) -> Figures:
        measurement = Measurement(list(contenders))
        try:
            measure_rounds(subject, prompts, replace(self.plan, concurrencies=levels), measurement, self._progress)
        except BaseException:
            if subject is self.subject and measurement.rows:  # a check cut short still says what it can
                self.advice.measured = self._overall(measurement, prompts, levels)
            raise
        return self._overall(measurement, prompts, levels)

    def _overall(self, measurement: Measurement, prompts: Sequence[Prompt], levels: Sequence[int]) -> Figures:
        return figures(overall(measurement), {level: rounds_for(prompts, level) for level in levels})
