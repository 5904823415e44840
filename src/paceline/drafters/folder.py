"""The files of a trained drafter's folder: config.json, and tensors by name in safetensors files or a pickle.

Whatever a folder holds, reading it runs no code, and what is wrong with it is a PacelineError that names the file.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from paceline.errors import BrokenModel, ModelNotFound

CONFIG, WEIGHTS = "config.json", "model.safetensors"
NUMBERS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
Json = dict[str, Any]


def read_config(folder: Path) -> Json:
    if not folder.is_dir():
        raise ModelNotFound(f"{folder} is not a drafter's folder; it does not exist or is a file")
    try:
        raw = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise BrokenModel(f"{folder} is not a drafter's folder: it holds no {CONFIG}") from error
    except (OSError, ValueError, RecursionError) as error:
        raise BrokenModel(f"{folder / CONFIG} cannot be read: {error}") from error
    if not isinstance(raw, dict):
        raise BrokenModel(f"{folder / CONFIG} must hold an object")
    return raw


def section(raw: Mapping[str, Any], key: str, source: str) -> Json:
    """The object under a key; empty where there is none."""
    found = raw.get(key) or {}
    if not isinstance(found, dict):
        raise BrokenModel(f"{source}: {key} must hold an object, found {found!r}")
    return found


def read_tensors(paths: Iterable[Path], folder: Path, wanted: str) -> dict[str, Tensor]:
    """Of all these files; `wanted` names them in the error where there are none."""
    found: dict[str, Tensor] = {}
    files = list(paths)
    if not files:
        raise BrokenModel(f"{folder} holds no weights: {wanted} is missing")
    for path in files:
        try:
            if path.suffix == ".safetensors":
                part = load_file(path)
            else:
                part = torch.load(path, map_location="cpu", weights_only=True)
        except (SafetensorError, UnpicklingError, RuntimeError, EOFError, OSError, ValueError, TypeError) as error:
            reason = str(error).partition("\n")[0]
            raise BrokenModel(f"{path} is truncated or damaged ({reason}); download it again") from error
        if not isinstance(part, dict) or not all(isinstance(one, Tensor) for one in part.values()):
            raise BrokenModel(f"{path} must hold tensors by name")
        found |= part
    return found


def check_shapes(
    found: Mapping[str, Tensor], wanted: Mapping[str, tuple[int, ...]], folder: Path, redundant: tuple[str, ...]
) -> dict[str, Tensor]:
    """The wanted tensors. Others are refused, but for names that begin with one of `redundant`."""
    for name, shape in wanted.items():
        if name not in found:
            raise BrokenModel(f"{folder}: tensor {name} is missing")
        if name != "d2t":
            check_is_number(name, found[name], folder)
        if tuple(found[name].shape) != shape:
            raise BrokenModel(
                f"{folder}: tensor {name} has shape {list(found[name].shape)}, and {CONFIG} asks for {list(shape)}"
            )
    extra = next((name for name in found if name not in wanted and not name.startswith(redundant)), None)
    if extra is not None:
        raise BrokenModel(f"{folder}: tensor {extra} has no place in a drafter as {CONFIG} describes it")
    return {name: found[name] for name in wanted}


def check_is_number(name: str, tensor: Tensor, folder: Path) -> None:
    if tensor.dtype not in NUMBERS:
        allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in NUMBERS)
        raise BrokenModel(f"{folder}: tensor {name} has dtype {tensor.dtype}; it must be one of {allowed}")


def chosen(tensors: Mapping[str, Tensor], wanted: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """The wanted tensors, to be written."""
    assert tensors.keys() >= wanted.keys(), f"missing: {sorted(wanted.keys() - tensors.keys())}"
    kept = {name: tensors[name].detach().cpu().contiguous() for name in wanted}
    assert all(tuple(kept[name].shape) == shape for name, shape in wanted.items()), "shapes contradict the config"
    return kept


def draft_ids(offsets: Tensor) -> Tensor:
    """(draft vocabulary,) the target's ids, from the tensor `d2t`."""
    return offsets.cpu().long() + torch.arange(len(offsets))


def check_draft_ids(ids: Tensor, vocab_size: int, folder: Path) -> None:
    """Trees of a GPU are not looked at again."""
    if len(wrong := ids[(ids < 0) | (ids >= vocab_size)]):
        raise BrokenModel(f"{folder} drafts token {int(wrong[0])}, and the vocabulary has {vocab_size}")


def in_draft_vocabulary(offsets: Tensor, vocab_size: int) -> Tensor:
    """(V,) bool, the tensor `t2d`."""
    found = torch.zeros(vocab_size, dtype=torch.bool)
    found[draft_ids(offsets)] = True
    return found


def write_folder(folder: Path, config: Json, tensors: Mapping[str, Tensor]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / WEIGHTS, {"format": "pt"})
    write_json(folder / CONFIG, config)


def write_json(path: Path, content: Json) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
