"""A machine whose every cost is known: the real engine over a toy model, on a clock that only costs move.

The model says after a token what a table has for that token and place, so that nothing need be computed; the drafter
knows the table and is right as often as it is told to be. Both add what they cost to the clock, and the clock adds
noise: every step is off by some 5 %, and one in fifty takes up to twice as long.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from paceline.bench.engines import TimedEngine, room_for
from paceline.bench.grid import Contender
from paceline.bench.prompts import Prompt
from paceline.bench.results import PLAIN
from paceline.config import EngineConfig
from paceline.core.draft import Draft
from paceline.drafters import Drafter
from paceline.drafters.base import HostDrafter
from paceline.engine.engine import Engine
from paceline.engine.policy.adaptive import AdaptivePolicy
from paceline.models.kv_cache import KVSpec
from paceline.models.plan import ModelOutput
from paceline.models.spec import ModelConfig
from paceline.testing import toy_config

VOCAB, PLACES, EOS = 512, 512, 1


@dataclass
class Costs:
    """Seconds. A pass takes as long as reading the weights or computing its rows takes, whichever is longer."""

    read_s: float = 0.030
    row_s: float = 0.001
    fixed_s: float = 0.002
    prompt_row_s: float | None = None  # None: as any other row
    draft_s: float = 0.0005  # of each token drafted ahead
    right: float = 0.7  # how often a drafted token is
    ends: float = 0.01  # how likely the answer ends after a token
    noise: float = 0.05


class Clock:
    def __init__(self, noise: float, seed: int = 0) -> None:
        self.now, self._noise, self._random = 0.0, noise, random.Random(seed)

    def __call__(self) -> float:
        return self.now

    def spend(self, seconds: float) -> None:
        if self._noise:
            seconds *= self._random.lognormvariate(0, self._noise)
            seconds *= self._random.uniform(1.2, 2.0) if self._random.random() < 0.02 else 1.0
        self.now += seconds


def table(costs: Costs, seed: int = 0) -> torch.Tensor:
    """(VOCAB, PLACES): what is said after a token at a place."""
    noise = torch.Generator().manual_seed(seed)
    said = torch.randint(2, VOCAB, (VOCAB, PLACES), generator=noise)
    ends = torch.rand((VOCAB, PLACES), generator=noise) < costs.ends
    return torch.where(ends, EOS, said)


class TableModel:
    def __init__(self, costs: Costs, clock: Clock, said: torch.Tensor) -> None:
        self.config: ModelConfig = toy_config(VOCAB, PLACES, eos_token_ids=(EOS,))
        self.kv_specs = (KVSpec(num_kv_heads=1, head_dim=1),)
        self.device, self.cache_dtype, self.torch_threads = torch.device("cpu"), torch.float32, None
        self.pass_bytes = 0
        self._costs, self._clock, self._said = costs, clock, said

    def prepare(self, *_):
        return False

    def forward(self, tokens, plan, caches, logit_rows, taps=()):
        costs, rows, decoding = self._costs, len(tokens), len(logit_rows)
        per_prompt_row = costs.row_s if costs.prompt_row_s is None else costs.prompt_row_s
        computing = decoding * costs.row_s + (rows - decoding) * per_prompt_row
        self._clock.spend(costs.fixed_s + max(costs.read_s, computing))
        said = self._said[tokens[logit_rows], plan.positions.long()[logit_rows]]
        return ModelOutput(torch.nn.functional.one_hot(said, VOCAB).float(), None)


class KnowingDrafter(HostDrafter):
    """Whether the token at a position is right: always the same, for every drafter and distance."""

    name = "knowing"

    def __init__(self, costs: Costs, clock: Clock, said: torch.Tensor) -> None:
        self._costs, self._clock, self._said = costs, clock, said.tolist()

    def propose(self, rows):
        self._clock.spend(self._costs.draft_s * max(row.max_nodes for row in rows))
        chains = [self.guess(row.sequence, row.max_nodes) for row in rows]
        width = max(map(len, chains))
        tokens = torch.tensor([chain + [0] * (width - len(chain)) for chain in chains], dtype=torch.int64)
        return Draft.chains(tokens, torch.tensor([len(chain) for chain in chains]))

    def level(self, sequence):
        return 4

    def guess(self, sequence, count):
        token, place, chain = sequence.tokens[-1], len(sequence.tokens) - 1, []
        for _ in range(min(count, PLACES - place)):
            right = random.Random(token * PLACES + place).random() < self._costs.right
            token = self._said[token][place] if right else (token + 3) % VOCAB
            chain.append(token)
            place += 1
        return chain


@dataclass
class FakeMachine:
    costs: Costs
    monkeypatch: pytest.MonkeyPatch
    prompt_tokens: int = 12
    seed: int = 0
    contenders: list[Contender] = field(default_factory=lambda: [Contender(PLAIN)])
    methods: Sequence[str] = ("knowing",)
    draft_models: Sequence[Any] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.clock = Clock(self.costs.noise, self.seed)
        self._said = table(self.costs)
        self._model = TableModel(self.costs, self.clock, self._said)
        for module in ("engine.step_clock", "engine.runner", "platform.device_timer"):
            self.monkeypatch.setattr(f"paceline.{module}.time", SimpleNamespace(perf_counter=self.clock))

    @property
    def config(self) -> ModelConfig:
        return self._model.config

    def with_int8(self) -> None:
        """Its weights are no blocks."""

    def encode(self, prompt: Prompt, answers: Sequence[str]) -> list[int]:
        noise = random.Random(f"{prompt.turns}{answers}")
        return [noise.randrange(2, VOCAB) for _ in range(self.prompt_tokens)]

    def decode(self, tokens: Sequence[int]) -> str:
        return " ".join(map(str, tokens))

    def drafters(self, contender: Contender) -> list[Drafter]:
        return [] if contender.method == PLAIN else [KnowingDrafter(self.costs, self.clock, self._said)]

    def drafter(self, contender: Contender) -> Drafter:
        return self.drafters(contender)[0]

    def open(self, concurrency: int) -> dict[Contender, TimedEngine]:
        return {contender: self._engine(contender) for contender in self.contenders}

    def _engine(self, contender: Contender) -> TimedEngine:
        drafters = self.drafters(contender)
        policy = AdaptivePolicy(contender.method, contender.k)
        engine = Engine(self._model, EngineConfig(num_blocks=1200), drafters=drafters, policy=policy)
        return TimedEngine(engine, clock=self.clock)

    def probe(self, drafters, policy, *, sequences, length):
        return Engine(self._model, room_for(sequences, length, prefix_caching=False), drafters=drafters, policy=policy)
