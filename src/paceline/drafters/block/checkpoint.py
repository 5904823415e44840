"""A block drafter's folder, DSpark or DFlash: config.json and safetensors files.

Embedding and output head are the target's own and not stored; a confidence head is ignored. A matrix may be stored as
int8 codes beside `NAME_scale`, one scale a row or one for each group of a row's columns; reading multiplies them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from paceline.drafters.block.config import MASKS, TAP_NORM, W1, DSparkConfig, described, parse, shapes
from paceline.drafters.folder import (
    CONFIG,
    WEIGHTS,
    ExportTarget,
    check_shapes,
    chosen,
    draft_ids,
    named,
    needed,
    read_config,
    read_tensors,
    refuse_features,
    write_folder,
    write_json,
)
from paceline.errors import BrokenModel

INDEX = "model.safetensors.index.json"
SHARD_BYTES = 15 << 20  # bytes; size of one file
SCALE = "_scale"
IGNORED = ("embed_tokens.", "lm_head.", "verifier_lm_head.", "rotary_emb.", "confidence_head.")
REDUNDANT = ("t2d",)
SMALL = (TAP_NORM, MASKS)  # matrices that are never stored as codes


def read(folder: Path) -> tuple[DSparkConfig, dict[str, Tensor]]:
    """Return the config, and its tensors in floating point, checked for presence and shape."""
    raw = read_config(folder)
    tensors = _expanded(_load(folder), folder)
    config = parse(raw, tensors, str(folder / CONFIG))
    return config, check_shapes(tensors, shapes(config), folder, REDUNDANT)


def _load(folder: Path) -> dict[str, Tensor]:
    stored = read_tensors(sorted(folder.glob("*.safetensors")), folder, "a .safetensors file")
    named = {name.removeprefix("model."): tensor for name, tensor in stored.items()}
    return {name: tensor for name, tensor in named.items() if not name.startswith(IGNORED)}


def quantised(tensors: Mapping[str, Tensor], group: int | None = 64) -> dict[str, Tensor]:
    """Return matrices as int8 codes and fp16 scales, a scale for `group` columns of a row (None: for a row); other
    tensors are unchanged."""
    stored: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if tensor.dim() != 2 or not tensor.is_floating_point() or name in SMALL:
            stored[name] = tensor
            continue
        rows, columns = tensor.shape
        size = group if group and columns % group == 0 else columns
        parts = tensor.float().view(rows, columns // size, size)
        scale = (parts.abs().amax(-1, keepdim=True) / 127).half()
        scale = torch.where(scale == 0, torch.full_like(scale, torch.finfo(torch.half).tiny), scale)
        codes = (parts / scale.float()).round().clamp(-127, 127).to(torch.int8)
        stored |= {name: codes.view(rows, columns), f"{name}{SCALE}": scale.squeeze(-1)}
    return stored


def _expanded(stored: Mapping[str, Tensor], folder: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for name, tensor in stored.items():
        if name.endswith(SCALE) and name.removesuffix(SCALE) in stored:
            continue
        if tensor.dtype == torch.int8:
            scale = stored.get(f"{name}{SCALE}")
            if scale is None:
                raise BrokenModel(f"{folder}: tensor {name} holds int8 codes, and {name}{SCALE} is missing")
            if tensor.dim() != 2 or scale.dim() != 2 or len(scale) != len(tensor) or tensor.shape[1] % scale.shape[1]:
                raise BrokenModel(f"{folder}: the shape of {name}{SCALE} does not divide that of {name}")
            parts = tensor.float().view(*scale.shape, -1) * scale.float()[..., None]
            tensor = parts.view(tensor.shape)
        elif name in ("d2t", "t2d"):
            tensor = tensor.long() if name == "d2t" else tensor
        elif not tensor.is_floating_point():
            raise BrokenModel(f"{folder}: tensor {name} has dtype {tensor.dtype}, not one of floating point")
        tensors[name] = tensor
    return tensors


def write(
    folder: Path,
    config: DSparkConfig,
    tensors: Mapping[str, Tensor],
    *,
    int8: bool = False,
    group: int | None = 64,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write a folder. `tensors` have the names of `shapes`; `t2d` is derived. `int8`: as `quantised` makes codes."""
    written = chosen(tensors, shapes(config), config.body.vocab_size)
    stored = quantised(written, group) if int8 else written
    folder.mkdir(parents=True, exist_ok=True)
    for old in (*folder.glob("*.safetensors"), folder / INDEX):
        old.unlink(missing_ok=True)
    shards: list[dict[str, Tensor]] = [{}]
    for name, tensor in stored.items():
        if shards[-1] and sum(one.nbytes for one in shards[-1].values()) + tensor.nbytes > shard_bytes:
            shards.append({})
        shards[-1][name] = tensor
    count = len(shards)
    names = [WEIGHTS] if count == 1 else [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
    for path, shard in zip(names, shards, strict=True):
        save_file(shard, folder / path, {"format": "pt"})
    if count > 1:
        where = {name: path for path, shard in zip(names, shards, strict=True) for name in shard}
        total = sum(tensor.nbytes for tensor in stored.values())
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": where})
    write_json(folder / CONFIG, described(config))


def export(folder: Path, form: str, out: Path, target: ExportTarget | None) -> None:
    """Write a block drafter as vLLM's class reads it."""
    config, tensors = read(folder)
    features = {
        "a norm for each tap before fc (tap_norm)": config.tap_norm,
        "an embedding for each mask (mask_embedding)": config.mask_embedding,
        "attention without norms of q and k": not config.body.layer.qk_norm,
        "masks without a token of the vocabulary (mask_token_id)": config.mask_token_id is None,
    }
    refuse_features(folder, form, features)
    config = replace(config, target=named(config.target, target, folder, form))
    written = chosen(tensors, shapes(config), config.body.vocab_size)
    if "d2t" in tensors:
        model = needed(target, f"{folder} takes its output head from its model")
        written["lm_head.weight"] = model.head_rows(tensors["d2t"])
        if config.markov_over_draft_vocab:
            written[W1] = tensors[W1].new_zeros(config.body.vocab_size, config.markov_rank)
            written[W1][draft_ids(tensors["d2t"])] = tensors[W1]
    raw = described(replace(config, markov_over_draft_vocab=False))
    write_folder(out, raw | {"use_aux_hidden_state": True}, written)
