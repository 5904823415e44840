"""What is advised on: a loaded model whose engines can be timed, replayed and probed, and the draft models given.

A draft model is loaded once and shared by all engines that use it. One that cannot serve this target is left out, and
why is kept for the user; one that does not exist is an error, like any other name that is wrong.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from paceline import machine
from paceline.advisor.candidates import Drafted
from paceline.bench.engines import Engines
from paceline.bench.grid import AUTO, Contender
from paceline.bench.results import PLAIN
from paceline.bench.runner import Subject
from paceline.config import MAX_K, EngineConfig, ModelConfig, SpeculationConfig
from paceline.drafters import Drafter, DrafterContext
from paceline.drafters.draft_model import DraftModelDrafter, check_vocabulary
from paceline.engine.engine import Engine
from paceline.engine.policy import Policy
from paceline.errors import DeviceError, InvalidParameter, UnsupportedModel
from paceline.models.hub import Progress, resolve
from paceline.models.loader import load_config
from paceline.models.runtime import LoadedModel, load_model
from paceline.theory import kv_bytes_per_token

MEMORY_SHARE = 0.8  # of what is free: what a draft model may take


@dataclass(frozen=True, kw_only=True)
class DraftModel:
    name: str
    loaded: LoadedModel
    weight_bytes: int
    kv_bytes: int  # per token of context


class Advised(Subject, Protocol):
    """What the advisor asks of a machine: `Machine`, or a fake with a clock of its own."""

    contenders: list[Contender]
    clock: Callable[[], float]

    @property
    def config(self) -> ModelConfig: ...
    @property
    def draft_models(self) -> Sequence[DraftModel]: ...
    @property
    def methods(self) -> Sequence[str]:
        """Those that need no model of their own."""

    def drafters(self, contender: Contender) -> list[Drafter]: ...
    def probe(self, drafters: Sequence[Drafter], policy: Policy, *, sequences: int, length: int) -> Engine:
        """An engine with room for that many sequences of that length, which shares no prefixes."""


class Machine(Engines):
    def __init__(
        self, model: str, *, draft_models: Sequence[str] = (), progress: Progress | None = None, **options: Any
    ) -> None:
        super().__init__(model, [Contender(PLAIN)], progress=progress, **options)
        self.clock: Callable[[], float] = time.perf_counter
        self.draft_models: list[DraftModel] = []
        self.refused: dict[str, str] = {}  # draft model -> why it is left out
        for name in dict.fromkeys(draft_models):
            try:
                self.draft_models.append(self._load_draft_model(name, resolve(name, progress)))
            except (InvalidParameter, UnsupportedModel, DeviceError) as problem:
                self.refused[name] = str(problem).removeprefix("draft_model: ")

    @property
    def config(self) -> ModelConfig:
        return self.loaded.config

    @property
    def methods(self) -> list[str]:
        return [drafter.name for drafter in super().drafters(Contender(AUTO))]

    def drafters(self, contender: Contender) -> list[Drafter]:
        found = super().drafters(contender)
        if isinstance(contender, Drafted):
            model = next(each for each in self.draft_models if each.name == contender.draft_model)
            found.append(self.draft_model_drafter(model))
        return found

    def draft_model_drafter(self, model: DraftModel) -> DraftModelDrafter:
        return DraftModelDrafter(
            model.loaded.decoder, eos_token_ids=self.config.eos_token_ids, version=f"draft-model/{model.name}"
        )

    def probe(self, drafters: Sequence[Drafter], policy: Policy, *, sequences: int, length: int) -> Engine:
        config = probe_config(sequences, length)
        return Engine(self.loaded.decoder, config, drafters=drafters, policy=policy)

    def _load_draft_model(self, name: str, path: Path) -> DraftModel:
        loaded = self.loaded
        on_cpu = loaded.decoder.device.type == "cpu"
        config = load_config(path)
        needed = parameters(config) * (4 if on_cpu else loaded.dtype.itemsize)
        free = machine.memory().available if on_cpu else 0
        if free and needed > MEMORY_SHARE * free:
            raise DeviceError(f"{name} needs {needed / 1e9:.1f} GB and {free / 1e9:.1f} GB of memory are free")
        context = DrafterContext(
            loaded.config, loaded.decoder.device, SpeculationConfig(), token_texts=loaded.tokenizer.token_text
        )
        dtype = "auto" if on_cpu else str(loaded.dtype).removeprefix("torch.")
        drafter = load_model(path, dtype=dtype, device=loaded.decoder.device.type, threads=torch.get_num_threads())
        check_vocabulary(name, drafter, context)
        return DraftModel(
            name=name,
            loaded=drafter,
            weight_bytes=parameters(config) * drafter.dtype.itemsize,
            kv_bytes=int(
                kv_bytes_per_token(
                    layers=config.num_layers,
                    kv_heads=config.num_kv_heads,
                    head_dim=config.head_dim,
                    bytes_per_value=drafter.decoder.cache_dtype.itemsize,
                )
            ),
        )


def probe_config(sequences: int, length: int) -> EngineConfig:
    block_size = EngineConfig().block_size
    most = max(EngineConfig().max_num_seqs, sequences)
    return EngineConfig(
        num_blocks=sequences * -(-(length + MAX_K + 1) // block_size) + 2,
        max_num_seqs=most,
        max_num_batched_tokens=max(EngineConfig().max_num_batched_tokens, most),
        prefix_caching=False,
    )


def parameters(config: ModelConfig) -> int:
    """Weights of the model, norms left out: they are a thousandth."""
    attention = 2 * config.hidden_size * (config.q_size + config.kv_size)
    layer = attention + 3 * config.hidden_size * config.intermediate_size
    embeddings = config.vocab_size * config.hidden_size * (1 if config.tie_embeddings else 2)
    return config.num_layers * layer + embeddings
