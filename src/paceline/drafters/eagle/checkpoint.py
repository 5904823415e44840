"""A folder of an EAGLE drafter: config.json (`eagle_config`) and safetensors files, or a pytorch_model.bin.

Raw folders name the layer `midlayer`, speculators' `layers.0`; both are read, and `write` chooses.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from paceline.drafters.eagle.config import (
    LAYER,
    EagleConfig,
    check_target,
    is_eagle,
    parse,
    plain_name,
    raw_description,
    shapes,
    speculators_description,
)
from paceline.drafters.folder import (
    CONFIG,
    Json,
    check_draft_ids,
    check_shapes,
    chosen,
    draft_ids,
    in_draft_vocabulary,
    read_config,
    read_tensors,
    write_folder,
)
from paceline.errors import BrokenModel, ModelNotFound
from paceline.models.spec import ModelConfig

PICKLED = "pytorch_model.bin"
EAGLES = {"fc.weight", "d2t"}  # tensors that no language model has
REDUNDANT = ("rotary_emb.", "verifier_", "t2d")  # no tensors of the drafter, whatever a folder holds


def recognise(folder: Path) -> str | None:
    """The method of the drafter in this folder, if it is an EAGLE."""
    try:
        raw = read_config(folder)
        return is_eagle(raw, frozenset(raw and _names(folder)))
    except (BrokenModel, ModelNotFound):
        return None


def read(folder: Path, target: ModelConfig | None = None) -> tuple[EagleConfig, dict[str, Tensor]]:
    """The config and its tensors, checked for presence and shape, and against the target where it is given."""
    raw = read_config(folder)
    stored = {plain_name(name): tensor for name, tensor in _load(folder).items()}
    if "speculators_model_type" not in raw and not EAGLES & stored.keys():
        raise BrokenModel(
            f"{folder} holds a language model of one layer and no EAGLE drafter, which would have a tensor fc.weight; "
            "a smaller model of the same vocabulary drafts with --draft-model"
        )
    if target is not None:
        raw = _with_defaults(raw, target)
    config = parse(raw, stored, str(folder / CONFIG))
    if target is not None:
        check_target(config, target, str(folder))
    tensors = check_shapes(stored, shapes(config), folder, REDUNDANT)
    if "d2t" in tensors:
        check_draft_ids(draft_ids(tensors["d2t"]), config.body.vocab_size, folder)
    return config, tensors


def _with_defaults(raw: Json, target: ModelConfig) -> Json:
    """A vocabulary that neither config nor tensors give is the target's."""
    if "transformer_layer_config" in raw:
        return raw
    return {"vocab_size": target.vocab_size, **raw}


def write(folder: Path, config: EagleConfig, tensors: Mapping[str, Tensor], *, speculators: bool = False) -> None:
    """`tensors` by the names of `shapes`; `t2d` is derived from `d2t`."""
    kept = chosen(tensors, shapes(config))
    if "d2t" in kept:
        kept["t2d"] = in_draft_vocabulary(kept["d2t"], config.body.vocab_size)
    if config.fused and not speculators:
        kept = {name.replace(f"{LAYER}.", "midlayer."): tensor for name, tensor in kept.items()}
    write_folder(folder, speculators_description(config) if speculators else raw_description(config), kept)


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
    pickled = [folder / PICKLED] if (folder / PICKLED).is_file() else []
    return read_tensors(sorted(folder.glob("*.safetensors")) or pickled, folder, f"a .safetensors file or {PICKLED}")
