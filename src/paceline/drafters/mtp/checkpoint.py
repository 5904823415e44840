"""Heads for multi-token prediction: read from a model's own checkpoint or from a folder of their own, and written.

A folder of its own has the names of its family's checkpoints. Under the key `paceline` it says which hidden state the
head reads, since it may be trained for any model.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from paceline.drafters import folder as drafter_folder
from paceline.drafters.eagle.config import EagleConfig, check_target, layer_config, shapes
from paceline.drafters.folder import (
    CONFIG,
    UNKNOWN_TARGET,
    TargetShape,
    check_shapes,
    chosen,
    layer_keys,
    read_config,
    read_tensors,
    target_keys,
    write_folder,
)
from paceline.drafters.mtp.layouts import COUNT, LAYOUTS, MIMO, HeadLayout, layout_of
from paceline.errors import BrokenModel
from paceline.files.json_fields import JsonFields
from paceline.models.families.hf import rope_scaling
from paceline.models.spec import ModelConfig
from paceline.models.weights import StoredWeight

NORMED = "normed_feature"  # key under `paceline`


def head_config(
    body: ModelConfig,
    layout: HeadLayout,
    names: Mapping[str, Any],
    *,
    normed_feature: bool,
    target: TargetShape = UNKNOWN_TARGET,
) -> EagleConfig:
    """Return the config of a head around one layer of this shape; `names`: of its tensors."""
    biases = frozenset(name.removesuffix(".bias") for name in names if name.endswith(".bias"))
    return EagleConfig(
        body=body,
        fused=False,
        mtp=True,
        feature_first=layout.feature_first,
        normed_feature=normed_feature,
        norm_output=True,
        own_head=False,
        biases=biases,
        target=target,
    )


def read_native(target: ModelConfig, extra: Mapping[str, StoredWeight]) -> tuple[EagleConfig, dict[str, Tensor]]:
    """Return the head that a model's own checkpoint holds, from its tensors that no decoder layer claims."""
    for layout in LAYOUTS.values():
        plain = {name: layout.plain_name(name) for name in extra}
        tensors = {name: extra[stored].numbers() for stored, name in plain.items() if name is not None}
        if tensors:
            body = target.of_depth(1).with_layers(window=None)
            config = head_config(body, layout, tensors, normed_feature=layout.normed_feature)
            return config, check_shapes(tensors, shapes(config), Path("the model"), ())
    raise BrokenModel("the checkpoint holds no head for multi-token prediction; it was removed, or never published")


def read(folder: Path, target: ModelConfig | None = None) -> tuple[EagleConfig, dict[str, Tensor]]:
    """Return the head of a folder, checked for presence and shape, and against the target where it is given."""
    raw, source = read_config(folder), str(folder / CONFIG)
    layout = layout_of(raw)
    if layout is None:
        raise BrokenModel(f"{source} promises no head for multi-token prediction of a known family")
    stored = read_tensors(sorted(folder.glob("*.safetensors")), folder, "a .safetensors file")
    tensors = {plain: tensor for name, tensor in stored.items() if (plain := layout.plain_name(name)) is not None}
    if not tensors:
        raise BrokenModel(
            f"{folder} holds no head for multi-token prediction, though {CONFIG} promises one: its tensors "
            f"{layout.prefix}* were left out; take the checkpoint as its authors publish it"
        )
    fields = JsonFields(raw, source)
    own = fields.section("paceline")
    layer = {**raw, "model_type": "llama", "num_hidden_layers": 1}
    config = head_config(
        layer_config(layer, tensors, False, source),
        layout,
        tensors,
        normed_feature=own.flag(NORMED, layout.normed_feature),
        target=drafter_folder.target_of(fields),
    )
    if target is not None:
        check_target(config, target, str(folder))
    return config, check_shapes(tensors, shapes(config), folder, ())


def write(folder: Path, config: EagleConfig, tensors: Mapping[str, Tensor], layout: HeadLayout = MIMO) -> None:
    """Write a folder. `tensors` have the names of `shapes`."""
    written = chosen(tensors, shapes(config), config.body.vocab_size)
    raw = {
        **layer_keys(config.body, attention_bias=any("self_attn" in name for name in config.biases)),
        "architectures": [layout.architecture],
        "model_type": "qwen2",  # the family of the layer, which every reader knows
        COUNT: 1,
        "num_hidden_layers": config.target.num_layers,
        "paceline": {NORMED: config.normed_feature, "target": target_keys(config.target)},
    }
    if config.body.layer.rope.kind != "default":
        raw["rope_scaling"] = rope_scaling(config.body.layer.rope)
    write_folder(folder, raw, {layout.stored_name(name): tensor for name, tensor in written.items()})
