"""Drafters that come with the package: folders in `shipped`, each for the model whose shape and embedding it names."""

from __future__ import annotations

import logging
from pathlib import Path

from torch import Tensor

from paceline.drafters.folder import CONFIG, TargetShape, read_config, target_of
from paceline.drafters.methods import packaged_folders
from paceline.errors import PacelineError
from paceline.files.json_fields import JsonFields
from paceline.models.spec import ModelConfig

log = logging.getLogger("paceline")


def packaged_for(config: ModelConfig, embedding: Tensor) -> Path | None:
    """Return the packaged drafter for a model with this embedding (V, H), in any precision; other models of its shape
    have none."""
    for path in packaged_folders():
        try:
            target = target_of(JsonFields(read_config(path), str(path / CONFIG)))
        except PacelineError as problem:
            log.warning("the packaged drafter in %s cannot be read: %r", path, problem)
            continue
        if target.embedding_sample and _shape(target) == _shape(config) and target.is_like(embedding):
            return path
    return None


def _shape(model: ModelConfig | TargetShape) -> tuple[int, int, int]:
    return model.hidden_size, model.num_layers, model.vocab_size
