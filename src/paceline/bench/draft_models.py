"""A draft model, loaded once and shared by all engines that use it; each has a drafter of its own."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from paceline.build import drafter_context
from paceline.config import SpeculationConfig
from paceline.drafters.base import Drafter
from paceline.drafters.methods import METHODS
from paceline.drafters.model.make import Translation, drafter_of, translation_of
from paceline.drafters.model.vocabulary import load_beside
from paceline.errors import DeviceError
from paceline.models.load.loader import load_config
from paceline.models.load.open_model import LoadedModel
from paceline.models.spec import ModelConfig
from paceline.platform import cpu as machine

MEMORY_SHARE = 0.8  # share of free memory, for a draft model or for the caches of all engines
WITH_MODEL = tuple(name for name, method in METHODS.items() if "draft_model" in method.needs)


@dataclass(frozen=True, kw_only=True)
class DraftModel:
    name: str
    loaded: LoadedModel
    translation: Translation | None  # None: of its target's vocabulary
    weight_bytes: int

    def drafter(self, target: ModelConfig) -> Drafter:
        return drafter_of(self.loaded, self.translation, target.eos_token_ids, f"{WITH_MODEL[0]}/{self.name}")


def load_draft_model(name: str, path: Path, target: LoadedModel) -> DraftModel:
    """Load a draft model; refuse one that does not fit into memory or cannot be translated."""
    on_cpu = target.decoder.device.type == "cpu"
    config = load_config(path)
    needed = parameters(config) * (4 if on_cpu else target.decoder.dtypes.numbers.itemsize)
    free = machine.memory().available if on_cpu else 0
    if free and needed > MEMORY_SHARE * free:
        raise DeviceError(f"{name} needs {needed / 1e9:.1f} GB and {free / 1e9:.1f} GB of memory are free")
    context = drafter_context(target, SpeculationConfig())
    loaded = load_beside(path, context)
    return DraftModel(
        name=name,
        loaded=loaded,
        translation=translation_of(name, loaded, context),
        weight_bytes=int(parameters(config) * loaded.kind.bytes_per_weight),
    )


def parameters(config: ModelConfig) -> int:
    """Return the number of weights without norms, which are a thousandth of them."""
    attention = 2 * config.hidden_size * (config.layer.q_size + config.layer.kv_size)
    layer = attention + 3 * config.hidden_size * config.layer.inner
    embeddings = config.vocab_size * config.hidden_size * (1 if config.tie_embeddings else 2)
    return config.num_layers * layer + embeddings
