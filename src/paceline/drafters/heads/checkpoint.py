"""A folder of Medusa heads, as published: config.json and medusa_lm_head.safetensors or .pt.

Head i is `{i}.{j}.linear.weight` and `.bias` for its blocks j < medusa_num_layers, and `{i}.{medusa_num_layers}.weight`
for its output, which a folder may leave out of all heads: then they share the target's own. Published configs may name
fewer heads than their file holds; all of them are used.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from pathlib import Path
from typing import NamedTuple

from safetensors.torch import save_file
from torch import Tensor

from paceline.config import MAX_K
from paceline.drafters.folder import CONFIG, Json, check_is_number, read_config, read_tensors, write_json
from paceline.errors import BrokenModel, InvalidParameter
from paceline.models.spec import ModelConfig

WEIGHTS = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")
HEADS, LAYERS, BASE = "medusa_num_heads", "medusa_num_layers", "base_model_name_or_path"
PREFIX = re.compile(r"^medusa_heads?\.")  # in files saved with their model
MOST_LAYERS = 64
DIGITS = 9  # a head's number has fewer


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
    write_json(folder / CONFIG, config)
    save_file(tensors, folder / WEIGHTS[0])


def load_heads(folder: Path, target: ModelConfig) -> list[MedusaHead]:
    config = _config(folder)
    found = {PREFIX.sub("", name): tensor for name, tensor in _tensors(folder).items()}
    layers = config[LAYERS]
    firsts = [name.partition(".")[0] for name in found]
    numbered = [int(first) for first in firsts if first.isdecimal() and len(first) < DIGITS]
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
        check_is_number(name, found[name], folder)
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


def _config(folder: Path) -> Json:
    config = read_config(folder)
    if HEADS not in config:
        raise BrokenModel(f"{folder} is not a folder of Medusa heads: {CONFIG} has no {HEADS}")
    config.setdefault(LAYERS, 1)  # as the published code takes it
    for name, least, most in ((HEADS, 1, MAX_K), (LAYERS, 0, MOST_LAYERS)):
        if type(config[name]) is not int or not least <= config[name] <= most:
            raise BrokenModel(
                f"{folder / CONFIG}: {name} must be a whole number from {least} to {most}, found {config[name]!r}"
            )
    return config


def _tensors(folder: Path) -> dict[str, Tensor]:
    paths = [folder / name for name in WEIGHTS if (folder / name).is_file()]
    return read_tensors(paths[:1], folder, " or ".join(WEIGHTS))
