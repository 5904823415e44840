"""Which method drafts for a sequence, and how far ahead, decided anew each step by expected tokens per second.

A drafted node is worth the probability that it is accepted and costs what one more row costs. Nodes of all sequences
are taken in order of worth while that raises the step's rate; no draft at all is always a candidate and wins ties.
Everything used here is committed history and timings, never the draft at hand: that would bias the output.

Methods that live on the host are tried in the shadow (`shadows`), so their acceptance is known without paying for it;
where several answers are waited for together, a token of one that runs ahead is worth less (`value`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Any

from paceline.config import MAX_K
from paceline.drafters import NONE, Drafter
from paceline.engine.acceptance import HOPELESS, Acceptance
from paceline.engine.batch import StepOutput
from paceline.engine.cost import CostModel
from paceline.engine.policy import AUTO, Choice, StepReport, wish
from paceline.engine.shadows import Shadows
from paceline.engine.value import token_values
from paceline.sequence import Sequence

log = logging.getLogger("paceline")
MARGIN, MARGIN_EACH, MARGIN_MOST = 0.04, 0.003, 0.1  # what a plan must promise over plain decoding, more in a batch
PROBE_EVERY = 64  # plain steps of a sequence after which a method that casts no shadow is tried once more
PROBE_BUDGET = 2
EXPLORE_SHARE, EXPLORE_WITHIN = 0.005, 0.85  # of the time: what putting guessed costs to the test may cost
FIRST_PLAIN = 3
PLAIN_EVERY = 128
ASKED = 8  # sequences without a draft that are considered in one step
SHADOWS = 4  # sequences whose shadows are compared in one step
FAR = 256  # an answer's end is not foreseen further than that
PACE_FADES = 0.9
DEEPEST, MAX_OFFERS = 16, 256  # how far ahead a plan looks, and how many nodes one step may take
READ_AT_ONCE = 16  # tokens a drafter with a lag reads in about the time it drafts one
PATIENT_TOKENS, SMALL_LAG = 2, 8  # a drafter that must read the prompt first does not delay the first tokens


@dataclass
class _Costs:
    """Step times, apart for greedy and sampled batches and for few and many sequences: their overheads differ."""

    models: dict[tuple[bool, int], CostModel]

    @staticmethod
    def _size(num_sequences: int) -> int:
        return max(num_sequences - 1, 0).bit_length()

    def of(self, num_sequences: int, sampled: bool) -> CostModel:
        return self.models.setdefault((sampled, self._size(num_sequences)), CostModel())


class AdaptivePolicy:
    """`method` auto, or one method with k left open, or both fixed; what a request asks for outranks it."""

    def __init__(self, drafters: SequenceOf[Drafter], method: str = NONE, k: int | None = None) -> None:
        self._drafters = {drafter.name: drafter for drafter in drafters}
        self._method, self._k = method, k
        self._costs = _Costs({})
        self._draft_seconds: dict[str, float] = {}  # per depth of a draft
        self._acceptance = Acceptance()
        self._shadows = Shadows()
        self._evidence: dict[tuple[str, str], int] = {}  # of the drafts under way
        self._promises: dict[str, list[float]] = {}  # by sequence: how likely each of those drafts is to get how far
        self._since_probe: dict[str, int] = {}
        self._complained: set[tuple[str, type]] = set()
        self._retired: frozenset[str] = frozenset()
        self._drafting_now: set[str] = set()  # sequences the last plan drafted for
        self._pace: dict[str, float] = {}  # tokens per step, by sequence
        self._turn = self._since_plain = 0
        self._allowance = 0.0  # steps that may be lost to learning what they cost
        self.expected_gain: float | None = None  # what drafting promised over plain decoding in the last step

    # -- deciding

    def plan(self, sequences: SequenceOf[Sequence], other_rows: int, others_wait: bool) -> list[Choice]:
        self._evidence.clear()
        self._promises.clear()
        choices = [Choice()] * len(sequences)
        if not self._drafters:
            return choices
        open_ended: dict[int, tuple[str, int]] = {}  # sequence -> (method or auto, most nodes)
        for index, sequence in enumerate(sequences):
            method, k = wish(sequence, self._method, self._k)
            most = min(k or MAX_K, sequence.room - 1)
            if method == NONE or most < 1:
                continue
            if k is None:
                open_ended[index] = method, most
            else:
                choices[index] = self._surest(sequence, method, most)
        base = len(sequences) + other_rows + sum(choice.budget for choice in choices)
        cost = self._costs.of(len(sequences), _any_sampled(sequences))
        if open_ended and self._knows_plain(cost, base):
            open_ended = self._in_turn(sequences, open_ended)
            values = [1.0] * len(sequences) if others_wait else self._values(sequences, cost)
            self._decide(sequences, open_ended, values, choices, cost, base)
            self._drafting_now = {sequences[index].key for index in open_ended if choices[index].budget}
        return choices

    def rests(self, sequences: SequenceOf[Sequence]) -> bool:
        """Where nobody may draft at all."""
        return not self._drafters or all(wish(one, self._method, self._k)[0] == NONE for one in sequences)

    def _in_turn(
        self, sequences: SequenceOf[Sequence], open_ended: dict[int, tuple[str, int]]
    ) -> dict[int, tuple[str, int]]:
        """Those that draft already, and some of the others in turn: asking all of many costs more than it finds."""
        idle = [index for index in open_ended if sequences[index].key not in self._drafting_now]
        if len(idle) <= ASKED:
            return open_ended
        first = self._turn * ASKED % len(idle)
        passed_over = {*idle} - {*(idle + idle)[first : first + ASKED]}
        return {index: wanted for index, wanted in open_ended.items() if index not in passed_over}

    def _surest(self, sequence: Sequence, method: str, budget: int) -> Choice:
        """With k fixed only the method is left to choose: the one with the most to go by."""
        evidence = {name: self._note_evidence(sequence, name) for name in self._allowed(method)}
        best = max(evidence, key=evidence.__getitem__, default=NONE)
        return Choice(best, budget) if evidence.get(best) else Choice()

    def _decide(
        self,
        sequences: SequenceOf[Sequence],
        open_ended: dict[int, tuple[str, int]],
        values: SequenceOf[float],
        choices: list[Choice],
        cost: CostModel,
        base: int,
    ) -> None:
        offers: list[tuple[float, int, int]] = []  # (-worth of the node, sequence, its depth from 1)
        methods: dict[int, str] = {}
        alone = [cost.seconds(base + depth) for depth in range(DEEPEST + 1)]
        trust = self._acceptance.trust
        # What a node must be worth to pay for its row; half of it, since costs are estimates and tokens may weigh more.
        least = max(0.5 * (alone[1] / alone[0] - 1) * len(sequences), HOPELESS)
        for index, (method, most) in open_ended.items():
            best = self._best_method(sequences[index], self._allowed(method), most, alone, least)
            if best is not None:
                methods[index], survival = best
                self._promises[sequences[index].key] = survival
                value = trust * values[index]
                offers += [(-worth * value, index, depth) for depth, worth in enumerate(survival, start=1)]
        self._fill(choices, offers, methods, cost, base, len(sequences))
        for index, method in methods.items():
            if choices[index].budget == 0 and self._probe_is_due(sequences[index], method):
                choices[index] = Choice(method, min(PROBE_BUDGET, sequences[index].room - 1))

    def _values(self, sequences: SequenceOf[Sequence], cost: CostModel) -> list[float]:
        """By sequence: what a token of it is worth to whoever waits for all answers of its job."""
        values, jobs = [1.0] * len(sequences), dict[str, list[int]]()
        for index, sequence in enumerate(sequences):
            jobs.setdefault(sequence.job, []).append(index)
        for members in jobs.values():
            if len(members) > 1:
                row_s = max(cost.seconds(len(members)) - cost.seconds(1), 0.0) / (len(members) - 1)
                paces = [self._pace.get(sequences[index].key, 1.0) for index in members]
                rooms = [min(sequences[index].room, FAR) for index in members]
                worth = token_values(paces, rooms, pass_s=max(cost.seconds(1) - row_s, 0.0), row_s=row_s)
                for index, value in zip(members, worth, strict=True):
                    values[index] = value
        return values

    def _probe_is_due(self, sequence: Sequence, method: str) -> bool:
        """Only drafters that cannot be watched in the shadow need it."""
        if self._shadows.casts(method):
            return False
        waited = self._since_probe.get(sequence.key, 0) + 1
        self._since_probe[sequence.key] = 0 if waited >= PROBE_EVERY else waited
        return waited >= PROBE_EVERY

    def _knows_plain(self, cost: CostModel, base: int) -> bool:
        """Whether to draft pays is judged against plain steps, so some are taken at first, and one now and then."""
        self._since_plain += 1
        if cost.times_seen(base) >= FIRST_PLAIN and self._since_plain < PLAIN_EVERY:
            return True
        self._since_plain = 0
        return False

    def _fill(
        self,
        choices: list[Choice],
        offers: list[tuple[float, int, int]],
        methods: dict[int, str],
        cost: CostModel,
        base: int,
        value: float,
    ) -> None:
        """Take nodes in order of worth up to the number that gives the most tokens per second."""
        offers.sort()
        plain = rate = value / cost.seconds(base)
        best, tokens, depths = 0, float(value), dict.fromkeys(methods.values(), 0)
        drafted = 0.0  # the rate of the best plan that drafts at all
        margin = min(MARGIN + MARGIN_EACH * (value - 1), MARGIN_MOST)
        unseen, regret = 0, 0.0  # a somewhat larger number of nodes whose cost is only guessed, and what it may lose
        for taken, (worth, index, depth) in enumerate(offers[:MAX_OFFERS], start=1):
            tokens -= worth
            depths[methods[index]] = max(depths[methods[index]], depth)
            seconds = cost.seconds(base + taken) + sum(self._drafting(m, d) for m, d in depths.items() if d)
            drafted = max(drafted, tokens / seconds)
            if tokens / seconds > rate * (1 if best else 1 + margin):
                best, rate, unseen = taken, tokens / seconds, 0
            elif best and not unseen and cost.times_seen(base + taken) < FIRST_PLAIN:
                unseen, regret = taken, 1 - tokens / seconds / rate
        self.expected_gain = drafted / plain if offers else None
        self._allowance = min(self._allowance + EXPLORE_SHARE, 1.0)
        if unseen and regret <= min(self._allowance, 1 - EXPLORE_WITHIN):
            self._allowance -= regret
            best = unseen
        for _, index, depth in offers[:best]:
            choices[index] = Choice(methods[index], max(depth, choices[index].budget))

    def _best_method(
        self, sequence: Sequence, methods: SequenceOf[str], most: int, seconds: SequenceOf[float], least: float
    ) -> tuple[str, list[float]] | None:
        """The method whose best draft for this sequence alone promises the highest rate; `seconds` by its depth."""
        best: tuple[float, str, list[float]] | None = None
        for method in methods:
            evidence = self._note_evidence(sequence, method)
            if not evidence:
                continue
            sampled = not sequence.params.greedy
            deepest = min(most, DEEPEST)
            survival = self._acceptance.survival(sequence.key, method, sampled, evidence, deepest, least)
            tokens, rate, drafting = 1.0, 0.0, self._drafting(method, 1)
            lag = self._drafters[method].lag(sequence)
            reading = drafting * lag / READ_AT_ONCE if lag > SMALL_LAG else 0.0
            for depth, worth in enumerate(survival, start=1):
                tokens += worth
                rate = max(rate, tokens / (seconds[depth] + drafting * depth + reading))
            if best is None or rate > best[0]:
                best = rate, method, survival
        return None if best is None else best[1:]

    def _allowed(self, method: str) -> SequenceOf[str]:
        names = self._drafters if method == AUTO else [method]
        return [name for name in names if name not in self._retired]

    def _note_evidence(self, sequence: Sequence, method: str) -> int:
        evidence = self._evidence[sequence.key, method] = self._ask(method, self._evidence_of, sequence)
        return evidence

    @staticmethod
    def _evidence_of(drafter: Drafter, sequence: Sequence) -> int:
        if drafter.lag(sequence) > SMALL_LAG and sequence.num_output < PATIENT_TOKENS:
            return 0
        return drafter.evidence(sequence)

    def _ask(self, method: str, question: Callable[[Drafter, Sequence], int], sequence: Sequence) -> int:
        """A drafter that fails to answer has nothing to say; the answer under way does not suffer."""
        try:
            return question(self._drafters[method], sequence)
        except Exception as problem:
            if (method, type(problem)) not in self._complained:  # said once: it may fail at every step
                log.warning("drafter %s failed to say what it knows: %r", method, problem)
                self._complained.add((method, type(problem)))
            return 0

    def _drafting(self, method: str, depth: int) -> float:
        return self._draft_seconds.get(method, 0.0) * depth

    # -- learning

    def observe(self, report: StepReport) -> None:
        self._retired = report.retired
        sequences = [output.sequence for output in report.outputs]
        drafting = sum(seconds for _, seconds in report.draft_s.values())
        if report.warm and len(sequences) == report.num_sequences and sequences:
            cost = self._costs.of(len(sequences), _any_sampled(sequences))
            cost.observe(report.rows, report.step_s - drafting)
        for method, (depth, seconds) in report.draft_s.items():
            before = self._draft_seconds.get(method, seconds / depth)
            self._draft_seconds[method] = 0.9 * before + 0.1 * seconds / depth
        if not self._drafters:
            return
        self._settle_promises(report.outputs)
        for output in report.outputs:
            self._judge(output)
        self._turn += 1
        for offset in range(min(SHADOWS, len(report.outputs))):
            self._cast_shadows(report.outputs[(self._turn + offset) % len(report.outputs)])

    def _settle_promises(self, outputs: SequenceOf[StepOutput]) -> None:
        promised, accepted = 0.0, 0
        for output in outputs:
            if output.drafted and (survival := self._promises.get(output.sequence.key)):
                promised += sum(survival[: output.drafted])
                accepted += output.accepted
        self._acceptance.note_promises(promised, accepted)

    def _judge(self, output: StepOutput) -> None:
        """A real draft met its fate, and so did the shadows it makes superfluous."""
        sequence, sampled = output.sequence, not output.sequence.params.greedy
        key = sequence.key
        if output.drafted:
            evidence = self._evidence.get((key, output.method), 1)
            self._acceptance.note(key, output.method, sampled, evidence, output.drafted, output.accepted)
            self._shadows.drop(sequence, output.method)
        for fate in self._shadows.meet(sequence, output.tokens):
            self._acceptance.note(key, fate.method, sampled, fate.evidence, fate.drafted, fate.matched)
        self._pace[key] = PACE_FADES * self._pace.get(key, 1.0) + (1 - PACE_FADES) * len(output.tokens)
        if output.finished:
            self.forget(sequence)

    def _cast_shadows(self, output: StepOutput) -> None:
        sequence = output.sequence
        method, k = wish(sequence, self._method, self._k)
        if output.finished or method == NONE or (method != AUTO and k is not None):
            return
        for name in self._allowed(method):
            if not self._shadows.follows(sequence, name) and not (output.drafted and output.method == name):
                self._ask(name, self._cast_shadow, sequence)

    def _cast_shadow(self, drafter: Drafter, sequence: Sequence) -> int:
        self._shadows.cast(drafter, sequence)
        return 0

    def plain_seconds(self, num_sequences: int, sampled: bool) -> float | None:
        cost = self._costs.of(num_sequences, sampled)
        return None if cost.scale is None else cost.seconds(num_sequences)

    def forget(self, sequence: Sequence) -> None:
        self._acceptance.forget(sequence.key)
        self._since_probe.pop(sequence.key, None)
        self._pace.pop(sequence.key, None)
        self._shadows.forget(sequence)

    # -- between runs

    def state(self) -> dict[str, Any]:
        costs = [
            {"sampled": sampled, "size": size, **model.as_dict()}
            for (sampled, size), model in self._costs.models.items()
        ]
        return {"costs": costs, "acceptance": self._acceptance.as_list(), "draft_seconds": self._draft_seconds}

    def load(self, state: Mapping[str, Any]) -> None:
        """Raises KeyError, TypeError or ValueError on a state of another form, and is then as before."""
        models = {(bool(m["sampled"]), int(m["size"])): CostModel.from_dict(m) for m in state["costs"]}
        seconds = {str(method): float(value) for method, value in state["draft_seconds"].items()}
        acceptance = Acceptance()
        acceptance.load(state["acceptance"])
        self._costs, self._draft_seconds, self._acceptance = _Costs(models), seconds, acceptance


def _any_sampled(sequences: SequenceOf[Sequence]) -> bool:
    return any(not sequence.params.greedy for sequence in sequences)
