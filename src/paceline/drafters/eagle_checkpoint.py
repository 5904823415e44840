"""A folder of an EAGLE drafter: config.json (`eagle_config`) and safetensors files, or a pytorch_model.bin.

Raw folders name the layer `midlayer`, speculators' `layers.0`; both are read, and `write` chooses.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from paceline.config import ModelConfig
from paceline.drafters.eagle_config import (
    LAYER,
    EagleConfig,
    Json,
    check_target,
    is_eagle,
    parse,
    plain_name,
    raw_description,
    shapes,
    speculators_description,
)
from paceline.errors import BrokenModel, ModelNotFound

CONFIG, WEIGHTS, PICKLED = "config.json", "model.safetensors", "pytorch_model.bin"
REDUNDANT = ("rotary_emb.", "verifier_", "t2d")  # no tensors of the drafter, whatever a folder holds


def recognise(folder: Path) -> str | None:
    """The method of the drafter in this folder, if it is an EAGLE."""
    try:
        raw = _read_json(folder)
        return is_eagle(raw, frozenset(raw and _names(folder)))
    except (BrokenModel, ModelNotFound):
        return None


def read(folder: Path, target: ModelConfig | None = None) -> tuple[EagleConfig, dict[str, Tensor]]:
    """The config and its tensors, checked for presence and shape, and against the target where it is given."""
    raw, source = _read_json(folder), str(folder)
    stored = {plain_name(name): tensor for name, tensor in _load(folder).items()}
    if target is not None:
        raw = _with_defaults(raw, target)
    config = parse(raw, stored, str(folder / CONFIG))
    if target is not None:
        check_target(config, target, source)
    wanted = shapes(config)
    for name, shape in wanted.items():
        if name not in stored:
            raise BrokenModel(f"{source}: tensor {name} is missing")
        if tuple(stored[name].shape) != shape:
            raise BrokenModel(f"{source}: tensor {name} has shape {list(stored[name].shape)}, not {list(shape)}")
    extra = next((name for name in stored if name not in wanted and not name.startswith(REDUNDANT)), None)
    if extra is not None:
        raise BrokenModel(f"{source}: tensor {extra} has no place in a drafter as {CONFIG} describes it")
    return config, {name: stored[name] for name in wanted}


def _with_defaults(raw: Json, target: ModelConfig) -> Json:
    """A vocabulary that neither config nor tensors give is the target's."""
    if "transformer_layer_config" in raw:
        return raw
    return {"vocab_size": target.vocab_size, **raw}


def write(folder: Path, config: EagleConfig, tensors: Mapping[str, Tensor], *, speculators: bool = False) -> None:
    """`tensors` by the names of `shapes`; `t2d` is derived from `d2t`."""
    wanted = shapes(config)
    assert tensors.keys() >= wanted.keys(), f"missing: {sorted(wanted.keys() - tensors.keys())}"
    kept = {name: tensors[name].detach().cpu().contiguous() for name in wanted}
    assert all(tuple(kept[name].shape) == shape for name, shape in wanted.items()), "shapes contradict the config"
    if "d2t" in kept:
        kept["t2d"] = torch.zeros(config.body.vocab_size, dtype=torch.bool)
        kept["t2d"][kept["d2t"].long() + torch.arange(len(kept["d2t"]))] = True
    if config.fused and not speculators:
        kept = {name.replace(f"{LAYER}.", "midlayer."): tensor for name, tensor in kept.items()}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(kept, folder / WEIGHTS, {"format": "pt"})
    description = speculators_description(config) if speculators else raw_description(config)
    (folder / CONFIG).write_text(json.dumps(description, indent=2) + "\n", encoding="utf-8")


def _read_json(folder: Path) -> Json:
    if not folder.is_dir():
        raise ModelNotFound(f"{folder} is not a drafter's folder; it does not exist or is a file")
    try:
        raw = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise BrokenModel(f"{folder} is not a drafter's folder: it holds no {CONFIG}") from error
    except (OSError, ValueError) as error:
        raise BrokenModel(f"{folder / CONFIG} cannot be read: {error}") from error
    if not isinstance(raw, dict):
        raise BrokenModel(f"{folder / CONFIG} must hold an object")
    return raw


def _names(folder: Path) -> set[str]:
    found: set[str] = set()
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, "pt") as file:
                found |= set(file.keys())
        except (SafetensorError, OSError) as error:
            raise BrokenModel(f"{path} is truncated or damaged; download it again") from error
    return found or set(_load(folder))


def _load(folder: Path) -> dict[str, Tensor]:
    paths = sorted(folder.glob("*.safetensors")) or [folder / PICKLED]
    found: dict[str, Tensor] = {}
    for path in paths:
        try:
            # A pickle is read as tensors alone: never code, whatever the file holds.
            pickled = path.suffix != ".safetensors"
            found |= torch.load(path, map_location="cpu", weights_only=True) if pickled else load_file(path)
        except FileNotFoundError as error:
            raise BrokenModel(f"{folder} holds no weights: neither .safetensors nor {PICKLED} is there") from error
        except (SafetensorError, UnpicklingError, RuntimeError, EOFError, OSError, ValueError, TypeError) as error:
            reason = str(error).partition("\n")[0]
            raise BrokenModel(f"{path} is truncated or damaged ({reason}); download it again") from error
    return found
