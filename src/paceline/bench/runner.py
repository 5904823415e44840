"""The run: all contenders answer a group of prompts before the next group begins.

A machine that slows down therefore slows all of them, and compared figures are measured at about one time. The order of
the contenders is drawn anew for every group. Each contender answers each prompt once. A row is added when all have
answered: if the run is interrupted, the rows so far remain valid.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from paceline.bench.grid import Contender
from paceline.bench.groups import PromptGroup, make_groups
from paceline.bench.intervals import MIN_PAIRS
from paceline.bench.measurement import AnswerRow, Measurement, Run, plain_of
from paceline.bench.prompts import Prompt
from paceline.sampling_params import SamplingParams

WARM_UP = Prompt(
    workload="warm-up",
    turns=("Describe, as you would to a visitor, the street on which the town's old bakery stands.",),
    origin="the warm-up",
)
WARM_UP_TOKENS = 24

OnProgress = Callable[[float, float, str], None]  # work done, work in all, what is under way


class Answerer(Protocol):
    def answer(self, prompts: Sequence[Sequence[Any]], params: Sequence[SamplingParams]) -> Run: ...


class EngineUnderTest(Protocol):
    """A subject of the measurement: `engines.Engines`, `endpoint.ServersUnderTest`, or a fake with its own clock."""

    @property
    def defaults(self) -> Mapping[str, Any]: ...
    def encode(self, prompt: Prompt, answers: Sequence[str]) -> list[Any]: ...
    def decode(self, tokens: Sequence[Any]) -> str: ...
    def open(self, concurrency: int) -> Mapping[Contender, Answerer]: ...


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """The settings of a run."""

    concurrencies: Sequence[int]
    max_tokens: int
    temperature: float = 0.0
    seed: int | None = 0  # seed of the order and of sampling; None: requests are not seeded
    max_rounds: int = 1  # groupings of the prompts at a concurrency; further ones where one gives too few groups


def measure(
    subject: EngineUnderTest,
    prompts: Sequence[Prompt],
    plan: RunPlan,
    measurement: Measurement,
    on_progress: OnProgress = lambda done, total, what: None,
) -> None:
    """Fill `measurement`, row by row."""
    noise = random.Random(plan.seed)
    measurement.comparable = plan.temperature == 0 or plan.seed is not None
    seed = plan.seed or 0
    for level in plan.concurrencies:
        groups, left_out = make_groups(prompts, level, seed)
        measurement.left_out[level] = len(left_out)
        measurement.rounds[level] = min(-(-MIN_PAIRS // max(len(groups), 1)), plan.max_rounds)
    grouped = [
        (level, make_groups(prompts, level, seed + turn)[0])
        for level, rounds in measurement.rounds.items()
        for turn in range(rounds)
    ]
    turns = sum(_weight(level) * group.turns for level, groups in grouped for group in groups)
    work = WorkEstimate(len(measurement.contenders) * turns, on_progress)
    pair = 0
    for concurrency, groups in grouped:
        work.begin("warming up")
        answerers = subject.open(concurrency)
        for answerer in answerers.values():  # the first passes fault pages in and give the policy the cost of a step
            warm = SamplingParams(temperature=plan.temperature, seed=plan.seed, max_tokens=WARM_UP_TOKENS)
            answerer.answer([subject.encode(WARM_UP, [])] * concurrency, [warm.resolve(subject.defaults)] * concurrency)
        for group in groups:
            for row in _rows(subject, answerers, group, pair, plan, noise, work):
                measurement.rows.append(row)
            pair += 1
        del answerers, answerer  # before the next ones are made: their caches are large
    measurement.complete = True
    work.begin(work.what)


def collect(
    subject: EngineUnderTest,
    prompts: Sequence[Prompt],
    plan: RunPlan,
    contenders: Sequence[Contender],
    on_progress: OnProgress,
) -> tuple[Measurement, BaseException | None]:
    """Measure, and return the reason to stop early beside the rows so far; raise it if there are none."""
    measurement = Measurement(list(contenders))
    try:
        measure(subject, prompts, plan, measurement, on_progress)
    except BaseException as reason:  # Ctrl-C, no memory, a server gone: keep the rows measured so far
        if not measurement.rows:
            raise
        return measurement, reason
    return measurement, None


def _rows(
    subject: EngineUnderTest,
    answerers: Mapping[Contender, Answerer],
    group: PromptGroup,
    pair: int,
    plan: RunPlan,
    noise: random.Random,
    work: WorkEstimate,
) -> Iterator[AnswerRow]:
    """Yield a row for each turn; the next turn continues from plain decoding's answers, or the only contender's."""
    concurrency = len(group.prompts)
    leader = plain_of(list(answerers)) or next(iter(answerers))
    talks: list[list[str]] = [[] for _ in group.prompts]
    for turn in range(group.turns):
        asked = [subject.encode(prompt, answers) for prompt, answers in zip(group.prompts, talks, strict=True)]
        params = [
            _params(plan, subject.defaults, prompt, f"{pair}/{turn}/{at}") for at, prompt in enumerate(group.prompts)
        ]
        order = list(answerers)
        noise.shuffle(order)
        runs: dict[Contender, Run] = {}
        for contender in order:
            work.begin(f"{group.workload or 'mixed'}, {concurrency} at once, {contender.label}")
            runs[contender] = answerers[contender].answer(asked, params)
            work.done += _weight(concurrency)
        yield AnswerRow(pair, group.workload, concurrency, runs, group.prompts[0].turns[turn])
        for answers, answer in zip(talks, runs[leader].answers, strict=True):
            answers.append(subject.decode(answer.tokens))


def _params(plan: RunPlan, defaults: Mapping[str, Any], prompt: Prompt, which: str) -> SamplingParams:
    """Return equal parameters for all contenders, with a seed for each request, so that samples are independent."""
    seed = None
    if plan.seed is not None and plan.temperature > 0:
        seed = random.Random(f"{plan.seed}/{which}").getrandbits(62)
    return SamplingParams(
        temperature=plan.temperature,
        max_tokens=plan.max_tokens,
        seed=seed,
        structured_outputs=None if prompt.schema is None else {"json": prompt.schema},
    ).resolve(defaults)


@dataclass
class WorkEstimate:
    """Work done and in all, in units of about equal time."""

    total: float
    report: OnProgress
    done: float = 0.0
    what: str = ""

    def begin(self, what: str) -> None:
        self.what = what
        self.report(self.done, self.total, what)


def _weight(concurrency: int) -> float:
    """Return the time of a batch in units of one request: less than the requests one by one."""
    return math.sqrt(concurrency)
