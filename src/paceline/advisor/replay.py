"""Recorded answers decoded again by the real engine, drafters and policy, with a table in place of the model.

Scheduling, drafting, commits and the policy's learning are the engine's own; only the pass is looked up (`PassCost`)
and what the model says is what it said (`Records`). So a group of requests ends with its slowest answer, prompts take
their share and the suffix store fills as it would, and what comes out is a benchmark like any other, minutes sooner.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from paceline.advisor.candidates import Drafted
from paceline.advisor.guesses import Guesses, RecordedDrafter
from paceline.advisor.machine import Advised
from paceline.advisor.pass_cost import PassCost
from paceline.advisor.profile import DrafterCost
from paceline.advisor.records import Records
from paceline.bench.engines import TimedEngine
from paceline.bench.grid import Contender
from paceline.bench.prompts import Prompt
from paceline.config import MAX_K, EngineConfig, ModelConfig
from paceline.draft import Draft, Kind
from paceline.drafters import Drafter
from paceline.engine.adaptive import AdaptivePolicy
from paceline.engine.batch import Batch, Row, StepOutput
from paceline.engine.drafting import READ_AHEAD, DrafterSet
from paceline.engine.engine import Engine
from paceline.engine.layout import Layout, Span, lay_out
from paceline.engine.model_runner import Flight, ModelRunner
from paceline.engine.policy import StepReport
from paceline.models.decoder import ModelOutput
from paceline.models.kv_cache import KVSpec

READ_AT_ONCE = 16  # tokens a draft model reads in about the time it drafts one

Verdicts = dict[int, tuple[list[int], int, list[int]]]


class NoModel:
    """Holds the place of the target: its shape and its vocabulary, and no weights."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self.kv_specs: tuple[KVSpec, ...] = (KVSpec(num_kv_heads=1, head_dim=1),)
        self.device = torch.device("cpu")
        self.cache_dtype = torch.float32
        self.torch_threads: int | None = 1

    def prepare(self, *_: object) -> bool:
        return False

    def forward(self, *_: Any, **__: Any) -> ModelOutput:
        raise AssertionError("a replay computes nothing")


@dataclass
class RecordedFlight(Flight):
    said: Verdicts

    def read_verdicts(self) -> Verdicts:
        return self.said


class RecordedRunner(ModelRunner):
    """In place of the engine's own: draft for real, then look up what the pass would have said and taken."""

    def __init__(
        self, drafters: DrafterSet, records: Records, cost: PassCost, draft_seconds: Callable[[str, int, int], float]
    ) -> None:
        self.drafters, self._records, self._cost, self._draft_seconds = drafters, records, cost, draft_seconds
        self.block_size = EngineConfig().block_size
        self.step_s = 0.0  # of the last step

    def launch(self, batch: Batch) -> Flight:
        drafting = [row for row in batch.rows if row.samples and row.budget > 0]
        reading_s = self._reading_seconds(drafting)
        draft = self.drafters.propose([row for row in batch.rows if row.samples])
        layout = lay_out(batch, draft, self.block_size)
        model_s = self._cost.seconds(*_contents(layout))
        for method, (depth, measured) in self.drafters.seconds.items():
            rows = sum(row.method == method for row in drafting)
            self.drafters.seconds[method] = depth, self._draft_seconds(method, rows, depth) or measured
        self.step_s = model_s + reading_s + sum(seconds for _, seconds in self.drafters.seconds.values())
        said = {at: self._verdict(layout.spans[at], draft, row) for row, at in enumerate(layout.sampled)}
        return RecordedFlight(layout, draft, None, None, None, model_s, said)

    def _reading_seconds(self, drafting: Sequence[Row]) -> float:
        """Of draft models that have a prompt to read first; the engine does not count it as what a draft costs."""
        seconds = 0.0
        for method in {row.method for row in drafting}:
            drafter = next(each for each in self.drafters.drafters if each.name == method)
            rows = [row for row in drafting if row.method == method]
            behind = [drafter.lag(row.sequence) for row in rows]
            if max(behind) > READ_AHEAD:
                depth = max(row.budget for row in rows) + round(sum(behind) / READ_AT_ONCE)
                seconds += self._draft_seconds(method, len(rows), depth)
        return seconds

    def _verdict(self, span: Span, draft: Draft, row: int) -> tuple[list[int], int, list[int]]:
        sequence = span.row.sequence
        answer = self._records[tuple(sequence.tokens[: sequence.num_prompt])].answer[sequence.num_output :]
        accepted = _follow(draft, row, span.num_nodes, answer) if span.num_nodes else 0
        kinds = [int(Kind.DRAFTED)] * accepted + [int(Kind.BONUS)]
        return list(answer[: accepted + 1]), accepted, kinds


def _contents(layout: Layout) -> tuple[int, int, int, int]:
    """Sequences that decode, tokens drafted for them, tokens of prompts, and the positions all rows look at."""
    decoding = [span for span in layout.spans if span.row.sequence.decoding]
    reading = sum(span.row.count for span in layout.spans) - len(decoding)
    return len(decoding), sum(span.num_nodes for span in decoding), reading, int(layout.plan.positions.sum())


def _follow(draft: Draft, row: int, num_nodes: int, answer: Sequence[int]) -> int:
    """How far the tree goes along with the answer; its last token is the target's own, whatever was drafted."""
    tokens, parents = draft.tokens[row, :num_nodes].tolist(), draft.parents[row, :num_nodes].tolist()
    at, depth = -1, 0
    while depth < len(answer) - 1:
        wanted = answer[depth]
        child = next((n for n in range(at + 1, num_nodes) if parents[n] == at and tokens[n] == wanted), None)
        if child is None:
            break
        at, depth = child, depth + 1
    return depth


class Stopwatch:
    """Adds up what calls take."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock, self._seconds = clock, 0.0

    def watch(self, holder: object, *names: str) -> None:
        for name in names:
            setattr(holder, name, self._timed(getattr(holder, name)))

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            started = self._clock()
            try:
                return call(*arguments)
            finally:
                self._seconds += self._clock() - started

        return timed

    def take(self) -> float:
        """Seconds since it was last asked."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds


class ReplayEngine(Engine):
    """On a clock of its own, which every step moves on by what it would take.

    What the policy and the drafters' bookkeeping take is not in the table, but they run here too, so they are timed.
    """

    def __init__(
        self,
        model: NoModel,
        config: EngineConfig,
        runner: Callable[[DrafterSet], RecordedRunner],
        clock: Callable[[], float],
        **parts: Any,
    ) -> None:
        super().__init__(model, config, **parts)
        self.now = 0.0
        self.runner: RecordedRunner = runner(self.drafters)
        self._host = Stopwatch(clock)
        self._host.watch(self.policy, "plan", "observe", "meanwhile")
        self._host.watch(self.drafters, "commit", "overlap")

    def _report(self, batch: Batch, flight: Flight, outputs: list[StepOutput], step_s: float) -> StepReport:
        took = self.runner.step_s + self._host.take()
        self.now += took
        return super()._report(batch, flight, outputs, took)


@dataclass(kw_only=True)
class Replay:
    """A subject of a benchmark, made of what another subject said and costs."""

    subject: Advised
    records: Records
    cost: PassCost
    model_costs: Mapping[str, DrafterCost]  # by draft model
    guesses: Mapping[str, Guesses]  # by draft model
    contenders: list[Contender]

    @property
    def defaults(self) -> Mapping[str, Any]:
        return self.subject.defaults

    def encode(self, prompt: Prompt, answers: Sequence[str]) -> list[int]:
        return self.subject.encode(prompt, answers)

    def decode(self, tokens: Sequence[int]) -> str:
        return self.subject.decode(tokens)

    def open(self, concurrency: int) -> dict[Contender, TimedEngine]:
        return {contender: self._engine(contender, concurrency) for contender in self.contenders}

    def _engine(self, contender: Contender, concurrency: int) -> TimedEngine:
        drafters = self._drafters(contender)
        blocks = concurrency * -(-(self.records.longest + MAX_K + 1) // EngineConfig().block_size) + 1
        most = max(EngineConfig().max_num_seqs, concurrency)
        config = EngineConfig(num_blocks=blocks, max_num_seqs=most)
        engine = ReplayEngine(
            NoModel(self.subject.config),
            config,
            lambda known: RecordedRunner(known, self.records, self.cost, self._seconds(contender)),
            self.subject.clock,
            drafters=drafters,
            policy=AdaptivePolicy(drafters, contender.method, contender.k),
        )
        return TimedEngine(engine, clock=lambda: engine.now)

    def _drafters(self, contender: Contender) -> list[Drafter]:
        if not isinstance(contender, Drafted):
            return self.subject.drafters(contender)
        recorded = RecordedDrafter(
            "draft-model", self.records, self.guesses[contender.draft_model], self.subject.config.vocab_size
        )
        return [*self.subject.drafters(Contender(contender.method, contender.k)), recorded]

    def _seconds(self, contender: Contender) -> Callable[[str, int, int], float]:
        """What a draft model's draft takes; 0 for methods whose own time is the time measured."""
        if not isinstance(contender, Drafted):
            return lambda method, rows, depth: 0.0
        cost = self.model_costs[contender.draft_model]
        return lambda method, rows, depth: depth * cost.at(rows) if method == cost.method else 0.0
