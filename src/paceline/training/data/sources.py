"""Fingerprints of training data: a resumed run refuses other data."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence as SequenceOf
from pathlib import Path

from paceline.drafters.folder import embedding_sample
from paceline.errors import InvalidParameter
from paceline.files.prompt_files import read_file
from paceline.models.load.loader import load_weights
from paceline.models.spec import ModelConfig
from paceline.training.data.store import Source

SYNTHETIC = "synthetic"  # the source of answers to prompts that the target wrote


def fingerprint(path: Path, config: ModelConfig) -> str:
    """Return the fingerprint of a model, from a few values of its first weight and of its last."""
    weights, last = load_weights(path, config), f"model.layers.{config.num_layers - 1}.mlp.down_proj.weight"
    ends = (("model.embed_tokens.weight", config.vocab_size), (last, config.hidden_size))
    return digest(repr([embedding_sample(weights[name].numbers(), rows) for name, rows in ends]))


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def sources_of(
    data: SequenceOf[Path], *, regenerate: bool, synthesise: int, length: int, target: str
) -> tuple[Source, ...]:
    """Return the sources of the files, in their order, and the synthetic one behind them."""
    by_target = f" answered by {target} in {length} tokens"
    files: dict[str, Source] = {}
    for path in data:
        name = path.stem
        if name in files or name == SYNTHETIC:
            other = "that of --synthesise" if name == SYNTHETIC else "another file's"
            raise InvalidParameter("data", f"{path}: its source would be {name}, which is {other}; rename the file")
        text, _ = read_file(path, "data")
        origin = f"{len(text)} {digest(text)}"
        files[name] = Source(name, origin + by_target if regenerate else origin, generated=regenerate)
    synthetic = (Source(SYNTHETIC, by_target.strip(), generated=True, count=synthesise),) if synthesise else ()
    return (*files.values(), *synthetic)
