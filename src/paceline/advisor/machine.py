"""The subject of advice: a loaded model whose engines can be measured and probed, and the draft models given.

A draft model is loaded once and shared by all engines that use it. One that cannot serve this target is left out with
its reason; one that does not exist is an error, like any other name that is wrong.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from paceline.advisor.choice import OFF, draft_model_of
from paceline.bench.draft_models import MEMORY_SHARE, DraftModel, load_draft_model
from paceline.bench.engines import Engines, room_for
from paceline.bench.grid import Contender
from paceline.build import make_engine, trained_folders
from paceline.config import AUTO, ModelConfig, SpeculationConfig
from paceline.drafters import Drafter
from paceline.engine.engine import Engine
from paceline.engine.policy.interface import Policy
from paceline.errors import DeviceError, InvalidParameter, UnsupportedModel
from paceline.models.kernels import INT8
from paceline.models.load.hub import PullProgress, resolve
from paceline.models.load.open_model import LoadedModel, load_model
from paceline.platform import cpu as machine


def _fits_twice(path: Path) -> bool:
    """Whether a model's weights fit into what is free of memory once more."""
    files = path.iterdir() if path.is_dir() else [path]
    size = sum(file.stat().st_size for file in files if file.suffix in (".safetensors", ".gguf"))
    free = machine.memory().available
    return not free or size <= MEMORY_SHARE * free


class Machine(Engines):
    def __init__(
        self, model: str, *, draft_models: Sequence[str] = (), progress: PullProgress | None = None, **options: Any
    ) -> None:
        super().__init__(model, [OFF], progress=progress, **options)
        self.clock: Callable[[], float] = time.perf_counter
        self._options = {name: options[name] for name in ("dtype", "device", "threads") if name in options}
        self.draft_models: list[DraftModel] = []
        self.refused: dict[str, str] = {}  # draft model -> reason why it is left out
        for name in dict.fromkeys(draft_models):
            try:
                self.draft_models.append(load_draft_model(name, resolve(name, progress), self.loaded))
            except (InvalidParameter, UnsupportedModel, DeviceError) as problem:
                self.refused[name] = str(problem).removeprefix("draft_model: ")

    def with_int8(self) -> LoadedModel | None:
        """The same model with activations rounded to int8; None without kernels, weights or memory for it."""
        if not self.loaded.kind.is_blocks or not _fits_twice(self.path):
            return None
        try:
            return load_model(self.path, activations=INT8, **self._options)
        except (InvalidParameter, DeviceError):
            return None

    @property
    def config(self) -> ModelConfig:
        return self.loaded.config

    @property
    def methods(self) -> list[str]:
        """The methods that `auto` has without a draft model: lookups and trained drafters."""
        return [drafter.name for drafter in self.drafters(Contender(AUTO))]

    def trained_bytes(self, method: str) -> int:
        """Return the size of the weights of the trained drafter that serves a method."""
        folders = trained_folders(self.loaded, SpeculationConfig(method=method, drafter=self._drafter))
        return sum(file.stat().st_size for folder in folders for file in folder.glob("*.safetensors"))

    def draft_models_for(self, contender: Contender) -> list[DraftModel]:
        return [model for model in self.draft_models if model.name == draft_model_of(contender)]

    def probe(self, drafters: Sequence[Drafter], policy: Policy, *, sequences: int, length: int) -> Engine:
        """An engine with room for that many sequences of that length, which shares no prefixes."""
        return make_engine(self.loaded, room_for(sequences, length, prefix_caching=False), drafters, policy)
