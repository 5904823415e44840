"""An EAGLE drafter's folder: config.json and safetensors files, or a pytorch_model.bin.

Folders as published name the layer `midlayer`, speculators' `layers.0`; both are read, and `write` chooses.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from paceline.drafters.eagle.config import (
    LAYER,
    EagleConfig,
    check_target,
    parse,
    plain_name,
    raw_description,
    shapes,
    speculators_description,
)
from paceline.drafters.folder import (
    CONFIG,
    ExportTarget,
    check_draft_ids,
    check_shapes,
    chosen,
    draft_ids,
    named,
    needed,
    read_config,
    read_tensors,
    refuse_features,
    write_folder,
)
from paceline.drafters.methods import SPECULATORS
from paceline.errors import BrokenModel
from paceline.models.spec import ModelConfig

PICKLED = "pytorch_model.bin"
EAGLES = {"fc.weight", "d2t"}  # tensors that no language model has
REDUNDANT = ("rotary_emb.", "verifier_", "t2d")  # no tensors of the drafter, whatever a folder holds


def read(folder: Path, target: ModelConfig | None = None) -> tuple[EagleConfig, dict[str, Tensor]]:
    """Return the config and its tensors, checked for presence and shape, and against the target where it is given."""
    raw = read_config(folder)
    stored = {plain_name(name): tensor for name, tensor in _load(folder).items()}
    if "speculators_model_type" not in raw and not EAGLES & stored.keys():
        raise BrokenModel(
            f"{folder} holds a language model of one layer and no EAGLE drafter, which would have a tensor fc.weight; "
            "a smaller model of the same vocabulary drafts with --draft-model"
        )
    if target is not None and "transformer_layer_config" not in raw:
        raw = {"vocab_size": target.vocab_size, **raw}  # for configs and tensors that give no vocabulary
    config = parse(raw, stored, str(folder / CONFIG))
    if target is not None:
        check_target(config, target, str(folder))
    tensors = check_shapes(stored, shapes(config), folder, REDUNDANT)
    if "d2t" in tensors:
        check_draft_ids(draft_ids(tensors["d2t"]), config.body.vocab_size, folder)
    return config, tensors


def write(folder: Path, config: EagleConfig, tensors: Mapping[str, Tensor], *, speculators: bool = False) -> None:
    """Write a folder. `tensors` have the names of `shapes`; `t2d` is derived from `d2t`."""
    written = chosen(tensors, shapes(config), config.body.vocab_size)
    if config.fused and not speculators:
        written = {name.replace(f"{LAYER}.", "midlayer."): tensor for name, tensor in written.items()}
    write_folder(folder, speculators_description(config) if speculators else raw_description(config), written)


def export(folder: Path, form: str, out: Path, target: ExportTarget | None) -> None:
    """Write an EAGLE-3 drafter as vLLM's class reads it, in speculators' layout or as published."""
    config, tensors = read(folder, None if target is None else target.config)
    features = {
        "norms of q and k (write speculators instead)": bool(config.body.layer.qk_norm) and form != SPECULATORS,
        "a bias of fc": "fc" in config.biases,
        "a bias of the MLP": any("mlp" in name for name in config.biases),
        "both norm_before_fc and fc_norm": config.norm_before_fc and config.fc_norm,
    }
    refuse_features(folder, form, features)
    if target is not None:
        config = replace(config, layer_ids=config.taps(target.config.num_layers))
    if target is not None or form == SPECULATORS:
        config = replace(config, target=named(config.target, target, folder, form))
    if not config.own_head and config.vocab < config.body.vocab_size:
        config = replace(config, own_head=True)
        model = needed(target, f"{folder} takes its output head from its model")
        tensors = {**tensors, "lm_head.weight": model.head_rows(tensors["d2t"])}
    write(out, config, tensors, speculators=form == SPECULATORS)


def _load(folder: Path) -> dict[str, Tensor]:
    pickled = [folder / PICKLED] if (folder / PICKLED).is_file() else []
    return read_tensors(sorted(folder.glob("*.safetensors")) or pickled, folder, f"a .safetensors file or {PICKLED}")
