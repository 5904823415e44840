"""A folder of Medusa heads, as published: config.json and medusa_lm_head.safetensors or .pt.

Head i is `{i}.{j}.linear.weight` and `.bias` for its blocks j < medusa_num_layers, and `{i}.{medusa_num_layers}.weight`
for its output, which a folder may leave out of all heads: then they share the target's own. Published configs may name
fewer heads than their file holds; all of them are used.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from paceline.config import MAX_K, ModelConfig
from paceline.errors import BrokenModel, InvalidParameter, ModelNotFound

CONFIG, WEIGHTS = "config.json", ("medusa_lm_head.safetensors", "medusa_lm_head.pt")
HEADS, LAYERS, BASE = "medusa_num_heads", "medusa_num_layers", "base_model_name_or_path"
PREFIX = re.compile(r"^medusa_heads?\.")  # in files saved with their model
MOST_LAYERS = 64


class MedusaHead(NamedTuple):
    blocks: tuple[tuple[Tensor, Tensor | None], ...]  # (H, H) and (H,): x + silu(W x + b)
    output: Tensor | None  # (V, H); None: the target's own head

    @property
    def tensors(self) -> Iterator[Tensor]:
        yield from (part for block in self.blocks for part in block if part is not None)
        if self.output is not None:
            yield self.output


def save_heads(folder: Path, heads: SequenceOf[MedusaHead], base: str = "") -> None:
    """`base`: the model they were trained for."""
    layers = len(heads[0].blocks)
    config = {HEADS: len(heads), LAYERS: layers, BASE: base}
    tensors: dict[str, Tensor] = {}
    for i, head in enumerate(heads):
        for j, (weight, bias) in enumerate(head.blocks):
            tensors[f"{i}.{j}.linear.weight"] = weight.contiguous()
            if bias is not None:
                tensors[f"{i}.{j}.linear.bias"] = bias.contiguous()
        if head.output is not None:
            tensors[f"{i}.{layers}.weight"] = head.output.contiguous()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    save_file(tensors, folder / WEIGHTS[0])


def load_heads(folder: Path, target: ModelConfig) -> list[MedusaHead]:
    config = _config(folder)
    found = {PREFIX.sub("", name): tensor for name, tensor in _tensors(folder).items()}
    layers = config[LAYERS]
    numbered = [int(number) for name in found if (number := name.partition(".")[0]).isdecimal()]
    count = min(max([config[HEADS], *(number + 1 for number in numbered)]), MAX_K)
    shared = layers > 0 and not any(f"{i}.{layers}.weight" in found for i in range(count))
    heads = [_head(found, i, layers, shared, folder) for i in range(count)]
    for head in heads:
        _check_sizes(head, target, folder, config.get(BASE))
    return heads


def _head(found: Mapping[str, Tensor], i: int, layers: int, shared: bool, folder: Path) -> MedusaHead:
    def tensor(name: str) -> Tensor:
        if name not in found:
            raise BrokenModel(f"{folder}: tensor {name} is missing")
        if not found[name].is_floating_point():
            raise BrokenModel(f"{folder}: tensor {name} has dtype {found[name].dtype}, not one of floating point")
        return found[name]

    blocks = []
    for at in (f"{i}.{j}.linear" for j in range(layers)):
        blocks.append((tensor(f"{at}.weight"), tensor(f"{at}.bias") if f"{at}.bias" in found else None))
    return MedusaHead(tuple(blocks), None if shared else tensor(f"{i}.{layers}.weight"))


def _check_sizes(head: MedusaHead, target: ModelConfig, folder: Path, base: object) -> None:
    hidden, vocab = target.hidden_size, target.vocab_size
    wanted = [(part, (hidden, hidden)[: part.dim()]) for block in head.blocks for part in block if part is not None]
    wanted += [] if head.output is None else [(head.output, (vocab, hidden))]
    for tensor, shape in wanted:
        if tuple(tensor.shape) != shape:
            raise InvalidParameter(
                "drafter",
                f"{folder} holds heads for {base or 'another model'}: a tensor has shape {list(tensor.shape)} where "
                f"this model, of hidden size {hidden} and vocabulary {vocab}, needs {list(shape)}",
            )


def _config(folder: Path) -> dict[str, Any]:
    if not folder.is_dir():
        raise ModelNotFound(f"{folder} is not a folder of Medusa heads; it does not exist or is a file")
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise BrokenModel(f"{folder} is not a folder of Medusa heads: it holds no {CONFIG}") from error
    except (OSError, ValueError) as error:
        raise BrokenModel(f"{folder / CONFIG} cannot be read: {error}") from error
    if not isinstance(config, dict) or HEADS not in config:
        raise BrokenModel(f"{folder} is not a folder of Medusa heads: {CONFIG} has no {HEADS}")
    config.setdefault(LAYERS, 1)  # as the published code takes it
    for name, least, most in ((HEADS, 1, MAX_K), (LAYERS, 0, MOST_LAYERS)):
        if type(config[name]) is not int or not least <= config[name] <= most:
            raise BrokenModel(
                f"{folder / CONFIG}: {name} must be a whole number from {least} to {most}, found {config[name]!r}"
            )
    return config


def _tensors(folder: Path) -> dict[str, Tensor]:
    path = next((folder / name for name in WEIGHTS if (folder / name).is_file()), None)
    if path is None:
        raise BrokenModel(f"{folder} holds no weights: neither {' nor '.join(WEIGHTS)} is there")
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        found = torch.load(path, map_location="cpu", weights_only=True)  # never code, whatever the file holds
    except (SafetensorError, UnpicklingError, RuntimeError, EOFError, OSError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise BrokenModel(f"{path} is truncated or damaged ({reason}); download it again") from error
    if not isinstance(found, dict) or not all(isinstance(part, Tensor) for part in found.values()):
        raise BrokenModel(f"{path} must hold tensors by name")
    return found
