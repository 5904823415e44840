"""A folder of Medusa heads, as published: config.json and medusa_lm_head.safetensors or .pt.

Head i is `{i}.{j}.linear.weight` and `.bias` for its blocks j < medusa_num_layers, and `{i}.{medusa_num_layers}.weight`
for its output. A folder may leave out the outputs of all heads, which then share the target's own. Published configs
may name fewer heads than their file holds; all of them are used.
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
from paceline.drafters.folder import (
    CONFIG,
    ExportTarget,
    check_is_number,
    needed,
    read_config,
    read_tensors,
    refuse_features,
    write_json,
)
from paceline.errors import BrokenModel, InvalidParameter
from paceline.files.json_fields import JsonFields
from paceline.models.spec import ModelConfig

WEIGHTS = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")
HEADS, LAYERS, BASE = "medusa_num_heads", "medusa_num_layers", "base_model_name_or_path"
PREFIX = re.compile(r"^medusa_heads?\.")  # prefix of names in files saved with their model
MOST_LAYERS = 64
DIGITS = 9  # more than any head's number has


class MedusaHead(NamedTuple):
    blocks: tuple[tuple[Tensor, Tensor | None], ...]  # (H, H) and (H,): x + silu(W x + b)
    output: Tensor | None  # (V, H); None: the target's own head

    @property
    def tensors(self) -> Iterator[Tensor]:
        yield from (part for block in self.blocks for part in block if part is not None)
        if self.output is not None:
            yield self.output


def save_heads(folder: Path, heads: SequenceOf[MedusaHead], base: str = "") -> None:
    """Write a folder; `base`: the model that the heads were trained for."""
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
    raw = read_config(folder)
    if HEADS not in raw:
        raise BrokenModel(f"{folder} is not a folder of Medusa heads: {CONFIG} has no {HEADS}")
    fields = JsonFields(raw, str(folder / CONFIG))
    named_heads = fields.integer(HEADS, most=MAX_K)
    layers = fields.integer(LAYERS, 1, least=0, most=MOST_LAYERS)  # the published code's default
    paths = [folder / name for name in WEIGHTS if (folder / name).is_file()]
    stored = read_tensors(paths[:1], folder, " or ".join(WEIGHTS))
    tensors = {PREFIX.sub("", name): tensor for name, tensor in stored.items()}
    firsts = [name.partition(".")[0] for name in tensors]
    numbered = [int(first) for first in firsts if first.isdecimal() and len(first) < DIGITS]
    count = min(max([named_heads, *(number + 1 for number in numbered)]), MAX_K)
    shared = layers > 0 and not any(f"{i}.{layers}.weight" in tensors for i in range(count))
    heads = [_head(tensors, i, layers, shared, folder) for i in range(count)]
    for head in heads:
        _check_sizes(head, target, folder, raw.get(BASE))
    return heads


def export(folder: Path, form: str, out: Path, target: ExportTarget | None) -> None:
    """Write heads as vLLM's class reads them."""
    model = needed(target, f"{form} states the model's sizes, and {folder} does not")
    heads = load_heads(folder, model.config)
    biased = [bias is not None for head in heads for _, bias in head.blocks]
    refuse_features(folder, form, {"a bias in some blocks and not in others": any(biased) and not all(biased)})
    if any(head.output is None for head in heads):
        shared = model.head()
        heads = [head if head.output is not None else head._replace(output=shared.clone()) for head in heads]
    save_heads(out, heads, model.name)
    keys = {
        "architectures": ["MedusaModel"],
        "model_type": form,
        "hidden_size": model.config.hidden_size,
        "vocab_size": model.config.vocab_size,
        "medusa_fc_bias": any(biased),
    }
    write_json(out / CONFIG, read_config(out) | keys)


def _head(tensors: Mapping[str, Tensor], i: int, layers: int, shared: bool, folder: Path) -> MedusaHead:
    def tensor(name: str) -> Tensor:
        if name not in tensors:
            raise BrokenModel(f"{folder}: tensor {name} is missing")
        check_is_number(name, tensors[name], folder)
        return tensors[name]

    blocks = []
    for at in (f"{i}.{j}.linear" for j in range(layers)):
        blocks.append((tensor(f"{at}.weight"), tensor(f"{at}.bias") if f"{at}.bias" in tensors else None))
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
