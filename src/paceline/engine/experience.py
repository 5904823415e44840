"""What steps have taught: their costs, what drafts take, how often they held, and the pace of each sequence.

Methods that live on the host are tried in the shadow (`shadows`), so their acceptance is known without paying for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Any

from paceline.drafters import NONE
from paceline.engine.acceptance import Acceptance
from paceline.engine.asking import FEW_SHARE, SHARE, Purse
from paceline.engine.batch import StepOutput
from paceline.engine.budget import FEW
from paceline.engine.cost import CostModel, DraftTimes, size_of
from paceline.engine.methods import Methods
from paceline.engine.plans import Plan, any_sampled
from paceline.engine.policy import AUTO, StepReport
from paceline.engine.shadows import Shadows
from paceline.models.pass_prior import PassPrior
from paceline.sequence import Sequence

SHADOWS, SHADOWS_OF_FEW = 4, 1  # sequences whose shadows are cast in one step, at most
SHADOWS_SHARE = 0.0025  # of the steps' time, that it may take
PACE_FADES = 0.9
SHOWN = 0.02  # of a step: deciding that takes longer may show in it


@dataclass
class StepCosts:
    """Step times, apart for greedy and sampled batches and for few and many sequences: their overheads differ."""

    prior: PassPrior
    models: dict[tuple[bool, int], CostModel]

    def of(self, num_sequences: int, sampled: bool) -> CostModel:
        key = sampled, size_of(num_sequences)
        if key not in self.models:
            alike = [size for known, size in self.models if known == sampled]
            nearest = min(alike, key=lambda size: abs(size - key[1]), default=None)
            self.models[key] = CostModel(self.prior)
            if nearest is not None:
                self.models[key] = self.models[sampled, nearest].as_a_guess()
        return self.models[key]


class Experience:
    """`purse` pays for questions; `clock` says what learning takes."""

    def __init__(self, methods: Methods, prior: PassPrior, purse: Purse, clock: Callable[[], float]) -> None:
        self._methods, self._asking_purse, self._clock = methods, purse, clock
        self.costs, self.draft_times, self.acceptance = StepCosts(prior, {}), DraftTimes(), Acceptance()
        self.shadows, self._shadow_purse = Shadows(), Purse()
        self.pace: dict[str, float] = {}  # tokens per step, by sequence
        self.on_device = bool(prior.padded_to)  # passes are replayed, and drafts by models begin ahead
        self._runs_ahead = False  # steps are launched before the one before is read, where nobody drafts
        self._turn = 0

    def few(self, num_sequences: int) -> bool:
        """So few that planning for them without arrays takes less, where a pass empties the host's caches."""
        return num_sequences <= FEW and not self.on_device

    def learn(self, plan: Plan, report: StepReport, starts: SequenceOf[int]) -> None:
        """`starts`: where the tokens begin that each output has."""
        self._learn_costs(plan, report)
        if not self._methods.drafters:
            return
        self._settle_promises(plan, report.outputs)
        for output, start in zip(report.outputs, starts, strict=True):
            self._judge(plan, output, start)
        self._watch(report.outputs)

    def _learn_costs(self, plan: Plan, report: StepReport) -> None:
        self._asking_purse.earn(report.step_s, FEW_SHARE if self.few(report.num_sequences) else SHARE)
        self._shadow_purse.earn(report.step_s, SHADOWS_SHARE)
        self._runs_ahead |= report.ahead
        drafted: dict[str, int] = {}  # method -> sequences
        for output in report.outputs if report.rows > report.num_sequences else ():
            if output.drafted:
                drafted[output.method] = drafted.get(output.method, 0) + 1
        for method, (depth, seconds) in report.draft_s.items():
            passes = not self.shadows.casts(method)
            self.draft_times.observe(method, drafted.get(method, 1), depth, seconds, passes=passes)
        # A drafter that had to catch up is not timed, and its step says nothing of such steps.
        whole = len(report.outputs) == report.num_sequences and drafted.keys() <= report.draft_s.keys()
        taken = report.step_s - plan.seconds - sum(seconds for _, seconds in report.draft_s.values())
        if not (report.warm and whole and report.outputs and taken > 0):
            return
        cost = self.costs.of(len(report.outputs), any_sampled([output.sequence for output in report.outputs]))
        if plan.drafts and self.on_device and plan.seconds > SHOWN * report.step_s and cost.sure_of(report.rows):
            return  # how much of that hid behind a draft that had begun nobody knows
        if plan.drafts or report.ahead or not self._runs_ahead or not cost.plain_seen(report.rows):
            cost.observe(report.rows, taken, drafted=plan.drafts)
        elif plan.asked and cost.scale is not None:  # it could have been launched ahead, had nobody been asked
            self._asking_purse.pay(max(taken - cost.seconds(report.rows), 0.0))

    def _settle_promises(self, plan: Plan, outputs: SequenceOf[StepOutput]) -> None:
        promised: dict[str, tuple[float, int]] = {}
        for output in outputs:
            if output.drafted and (survival := plan.promises.get(output.sequence.key)):
                before, accepted = promised.get(output.method, (0.0, 0))
                promised[output.method] = before + sum(survival[: output.drafted]), accepted + output.accepted
        self.acceptance.note_promises(promised)

    def _judge(self, plan: Plan, output: StepOutput, start: int) -> None:
        """A real draft met its fate, and so did the shadows it makes superfluous."""
        sequence, sampled = output.sequence, not output.sequence.params.greedy
        key = sequence.key
        if output.drafted:
            evidence = plan.evidence.get((key, output.method), 1)
            self.acceptance.note(key, output.method, sampled, evidence, output.drafted, output.accepted)
            self.shadows.drop(sequence, output.method)
        for fate in self.shadows.meet(sequence, output.tokens, start):
            self.acceptance.note(key, fate.method, sampled, fate.evidence, fate.drafted, fate.matched)
        self.pace[key] = PACE_FADES * self.pace.get(key, 1.0) + (1 - PACE_FADES) * len(output.tokens)
        if output.finished or sequence.finished:
            self.forget(sequence)

    def _watch(self, outputs: SequenceOf[StepOutput]) -> None:
        """Cast shadows for some sequences, as far as there is time for it."""
        most = SHADOWS_OF_FEW if self.few(len(outputs)) else SHADOWS  # few are soon through, and mostly draft
        for _ in range(min(most, len(outputs))):
            if self._shadow_purse.seconds > 0:
                began = self._clock()
                self._turn += 1
                self._cast_shadows(outputs[self._turn % len(outputs)])
                self._shadow_purse.pay(self._clock() - began)

    def _cast_shadows(self, output: StepOutput) -> None:
        sequence = output.sequence
        method, k = self._methods.wish(sequence)
        if output.finished or sequence.finished or method == NONE or (method != AUTO and k is not None):
            return
        for name in self._methods.allowed(method):
            if not self.shadows.follows(sequence, name) and not (output.drafted and output.method == name):
                try:
                    self.shadows.cast(self._methods.drafters[name], sequence)
                except Exception as problem:
                    self._methods.complain(name, problem)

    def forget(self, sequence: Sequence) -> None:
        self.acceptance.forget(sequence.key)
        self.pace.pop(sequence.key, None)
        self.shadows.forget(sequence)

    def state(self) -> dict[str, Any]:
        costs = [
            {"sampled": sampled, "size": size, **model.as_dict()}
            for (sampled, size), model in self.costs.models.items()
        ]
        return {"costs": costs, "acceptance": self.acceptance.as_list(), "draft_times": self.draft_times.as_dict()}

    def load(self, state: Mapping[str, Any]) -> None:
        """Raises KeyError, TypeError or ValueError on a state of another form, and is then as before."""
        prior = self.costs.prior
        models = {(bool(m["sampled"]), int(m["size"])): CostModel.from_dict(m, prior) for m in state["costs"]}
        times = DraftTimes.from_dict(state["draft_times"])
        acceptance = Acceptance()
        acceptance.load(state["acceptance"])
        self.costs, self.draft_times, self.acceptance = StepCosts(prior, models), times, acceptance
