"""A trained drafter's folder: its files, the model it was trained for, and speculators' layout of config.json.

Tensors are stored by name in safetensors files or a pickle. Reading runs no code, whatever a folder holds, and what is
wrong with it is a PacelineError that names the file. Under the key `paceline` a folder describes its model by its
shape and a sample of its embedding.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from paceline.errors import BrokenModel, InvalidParameter, ModelNotFound
from paceline.models.load.hf_config import rope_scaling
from paceline.models.spec import ModelConfig, RopeConfig

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


LEAST_LIKENESS = 0.9  # cosine of two samples of one embedding, however each is quantised; others are near 0


@dataclass(frozen=True, kw_only=True)
class TargetShape:
    """The model a drafter was trained for, as far as a folder says; 0 and () are unknown."""

    name: str = ""
    hidden_size: int = 0
    num_layers: int = 0
    vocab_size: int = 0
    embedding_sample: tuple[float, ...] = ()

    @staticmethod
    def of(config: ModelConfig, embedding: Tensor, name: str = "") -> TargetShape:
        return TargetShape(
            name=name,
            hidden_size=config.hidden_size,
            num_layers=config.num_layers,
            vocab_size=config.vocab_size,
            embedding_sample=embedding_sample(embedding, config.vocab_size),
        )

    def is_like(self, embedding: Tensor) -> bool:
        """The embedding (V, H) is the one sampled; a folder without a sample says nothing against it."""
        if not self.embedding_sample:
            return True
        mine = embedding_sample(embedding, self.vocab_size)
        ours, theirs = torch.tensor(mine), torch.tensor(self.embedding_sample)
        return len(ours) == len(theirs) and float(F.cosine_similarity(ours, theirs, dim=0)) >= LEAST_LIKENESS


UNKNOWN_TARGET = TargetShape()


def embedding_sample(embedding: Tensor, vocab_size: int) -> tuple[float, ...]:
    """A few values of a few rows: they tell one model from another of its shape, in any precision."""
    rows = torch.tensor([vocab_size * eighth // 8 for eighth in (1, 3, 5, 7)])
    values = embedding[rows][:, :16].detach().float().flatten().tolist()
    return tuple(round(value, 6) for value in values)


def target_of(raw: Mapping[str, Any], source: str) -> TargetShape:
    """What config.json says of the model its drafter was trained for."""
    verifier = section(section(raw, "speculators_config", source), "verifier", source)
    found: Json = {"name": verifier.get("name_or_path") or ""}
    if type(raw.get("num_target_layers")) is int:
        found["num_layers"] = raw["num_target_layers"]
    ours = section(section(raw, "paceline", source), "target", source)
    found |= {key: value for key, value in ours.items() if key in TargetShape.__dataclass_fields__}
    sample = found.pop("embedding_sample", [])
    wrong = [key for key, value in found.items() if type(value) is not (str if key == "name" else int)]
    if not isinstance(sample, list) or not all(type(one) in (int, float) for one in sample):
        wrong.append("embedding_sample")
    if wrong:
        raise BrokenModel(f"{source}: what it says of its target's {wrong[0]} is of another type than it must be")
    return TargetShape(**found, embedding_sample=tuple(sample))


def refuse_another(trained: TargetShape, source: str | Path, *facts: tuple[str, int, int]) -> None:
    """Raise where something about the drafter (0: not known) is not as this model has it."""
    for what, theirs, ours in facts:
        if theirs and theirs != ours:
            made_for = trained.name or "another model"
            raise InvalidParameter(
                "drafter", f"{source} was trained for {made_for}: its {what} is {theirs}, and this model's is {ours}"
            )


def layer_keys(body: ModelConfig, *, attention_bias: bool = False, mlp_bias: bool = False) -> Json:
    """The drafter's layers in the keys of a Hugging Face config, but for the scaling of RoPE."""
    return {
        "model_type": "qwen3" if body.qk_norm else "llama",
        "hidden_size": body.hidden_size,
        "intermediate_size": body.intermediate_size,
        "num_hidden_layers": body.num_layers,
        "num_attention_heads": body.num_heads,
        "num_key_value_heads": body.num_kv_heads,
        "head_dim": body.head_dim,
        "rms_norm_eps": body.rms_norm_eps,
        "rope_theta": body.rope.theta,
        "max_position_embeddings": body.max_positions,
        "vocab_size": body.vocab_size,
        "hidden_act": "silu",
        "attention_bias": attention_bias,
        "mlp_bias": mlp_bias,
        "tie_word_embeddings": False,
    }


def rope_keys(rope: RopeConfig) -> Json:
    return {**rope_scaling(rope), "rope_theta": rope.theta}


def target_keys(target: TargetShape) -> Json:
    return {
        "hidden_size": target.hidden_size,
        "num_layers": target.num_layers,
        "vocab_size": target.vocab_size,
        "embedding_sample": list(target.embedding_sample),
    }


def description(
    method: str,
    version: str,
    architecture: str,
    layer: Json,
    tokens: int,
    target: TargetShape,
    ours: Json | None = None,
) -> Json:
    """In speculators' layout; `tokens`: of a chain, unless its reader chooses; `ours`: keys of paceline alone."""
    greedy = {"proposal_type": "greedy", "speculative_tokens": tokens, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    return {
        "speculators_model_type": method,
        "speculators_version": version,
        "architectures": [architecture],
        "transformer_layer_config": layer,
        "speculators_config": {
            "algorithm": method,
            "proposal_methods": [greedy],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": target.name, "architectures": []},
        },
        "paceline": {"target": target_keys(target), **(ours or {})},
    }
