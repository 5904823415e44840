"""A trained drafter's folder: its files, the model it was trained for, and speculators' layout of config.json.

Tensors are stored by name in safetensors files or a pickle. Reading runs no code, whatever a folder holds, and what is
wrong with it is a PacelineError that names the file. Under the key `paceline` a folder describes its model by its
shape and a sample of its embedding.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from paceline.errors import BrokenModel, InvalidParameter, ModelNotFound, UnsupportedModel
from paceline.files.json_fields import Json, JsonFields, read_json
from paceline.files.regular import open_regular
from paceline.files.safetensors_reader import SafetensorsFile
from paceline.models.families.hf import rope_scaling
from paceline.models.spec import ModelConfig, RopeConfig

CONFIG, WEIGHTS = "config.json", "model.safetensors"
FAMILIES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}  # family -> architecture of the layers
NUMBERS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
LEAST_LIKENESS = 0.9  # cosine of two samples of one embedding, however each is quantised; other embeddings are near 0


def read_config(folder: Path) -> Json:
    if not folder.is_dir():
        raise ModelNotFound(f"{folder} is not a drafter's folder; it does not exist or is a file")
    if not (folder / CONFIG).exists():
        raise BrokenModel(f"{folder} is not a drafter's folder: it holds no {CONFIG}")
    return read_json(folder / CONFIG)


def read_tensors(paths: SequenceOf[Path], folder: Path, wanted: str) -> dict[str, Tensor]:
    """Return the tensors of all these files; `wanted` names the files in the error where there are none."""
    tensors: dict[str, Tensor] = {}
    for path in paths:
        try:
            part = _tensors_of(path)
        except (UnpicklingError, RuntimeError, EOFError, OSError, ValueError, TypeError) as error:
            reason = str(error).partition("\n")[0]
            raise BrokenModel(f"{path} is truncated or damaged ({reason}); download it again") from error
        if not isinstance(part, dict) or not all(isinstance(one, Tensor) for one in part.values()):
            raise BrokenModel(f"{path} must hold tensors by name")
        if twice := next((name for name in part if name in tensors), None):
            raise BrokenModel(f"{folder}: tensor {twice} is in {path.name} and in another file; download it again")
        tensors |= part
    if not paths:
        raise BrokenModel(f"{folder} holds no weights: {wanted} is missing")
    return tensors


def _tensors_of(path: Path) -> Any:
    if path.suffix == ".safetensors":
        file = SafetensorsFile(path)
        return {name: file.read(name) for name in file.headers}
    open_regular(path).close()  # no pipe, no device
    return torch.load(path, map_location="cpu", weights_only=True)


def check_shapes(
    tensors: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]], folder: Path, redundant: tuple[str, ...]
) -> dict[str, Tensor]:
    """Return the tensors of `shapes`. Others are refused, but for names that begin with one of `redundant`."""
    for name, shape in shapes.items():
        if name not in tensors:
            raise BrokenModel(f"{folder}: tensor {name} is missing")
        if name != "d2t":
            check_is_number(name, tensors[name], folder)
        if tuple(tensors[name].shape) != shape:
            raise BrokenModel(
                f"{folder}: tensor {name} has shape {list(tensors[name].shape)}, and {CONFIG} asks for {list(shape)}"
            )
    extra = next((name for name in tensors if name not in shapes and not name.startswith(redundant)), None)
    if extra is not None:
        raise BrokenModel(f"{folder}: tensor {extra} has no place in a drafter as {CONFIG} describes it")
    return {name: tensors[name] for name in shapes}


def check_is_number(name: str, tensor: Tensor, folder: Path) -> None:
    if tensor.dtype not in NUMBERS:
        allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in NUMBERS)
        raise BrokenModel(f"{folder}: tensor {name} has dtype {tensor.dtype}; it must be one of {allowed}")


def chosen(tensors: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]], vocab_size: int) -> dict[str, Tensor]:
    """Return the tensors of `shapes`, to be written, and beside `d2t` the draft vocabulary as `t2d`, (V,) bool."""
    assert tensors.keys() >= shapes.keys(), f"missing: {sorted(shapes.keys() - tensors.keys())}"
    written = {name: tensors[name].detach().cpu().contiguous() for name in shapes}
    assert all(tuple(written[name].shape) == shape for name, shape in shapes.items()), "shapes contradict the config"
    if "d2t" in written:
        written["t2d"] = torch.zeros(vocab_size, dtype=torch.bool)
        written["t2d"][draft_ids(written["d2t"])] = True
    return written


def draft_ids(offsets: Tensor) -> Tensor:
    """Return the target's ids (draft vocabulary,) from the tensor `d2t`."""
    return offsets.cpu().long() + torch.arange(len(offsets))


def check_draft_ids(ids: Tensor, vocab_size: int, folder: Path) -> None:
    """Refuse ids outside the vocabulary: a GPU's trees are not checked again."""
    if len(wrong := ids[(ids < 0) | (ids >= vocab_size)]):
        raise BrokenModel(f"{folder} drafts token {int(wrong[0])}, and the vocabulary has {vocab_size}")


def write_folder(folder: Path, config: Json, tensors: Mapping[str, Tensor]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / WEIGHTS, {"format": "pt"})
    write_json(folder / CONFIG, config)


def write_json(path: Path, content: Json) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


# -- the model a drafter was trained for


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
        sizes = {field: getattr(config, field) for field in ("hidden_size", "num_layers", "vocab_size")}
        return TargetShape(name=name, embedding_sample=embedding_sample(embedding, config.vocab_size), **sizes)

    def is_like(self, embedding: Tensor) -> bool:
        """Return whether the embedding (V, H) may be the one sampled; without a sample any may."""
        if not self.embedding_sample:
            return True
        other, own = torch.tensor(embedding_sample(embedding, self.vocab_size)), torch.tensor(self.embedding_sample)
        return len(other) == len(own) and float(F.cosine_similarity(other, own, dim=0)) >= LEAST_LIKENESS


UNKNOWN_TARGET = TargetShape()


def embedding_sample(embedding: Tensor, vocab_size: int) -> tuple[float, ...]:
    """Return some values of some rows; they identify a model among those of its shape, in any precision."""
    rows = torch.tensor([vocab_size * eighth // 8 for eighth in (1, 3, 5, 7)])
    values = embedding[rows][:, :16].detach().float().flatten().tolist()
    return tuple(round(value, 6) for value in values)


def target_of(fields: JsonFields) -> TargetShape:
    """Return the model that config.json names as its drafter's target."""
    verifier = fields.section("speculators_config").section("verifier")
    layers = fields.values.get("num_target_layers")
    target = JsonFields(fields.section("paceline").section("target").values, fields.source, "{} of paceline.target")
    sample = target.values.get("embedding_sample") or []
    if not isinstance(sample, list) or not all(type(one) in (int, float) for one in sample):
        raise target.wrong("embedding_sample", "a list of numbers")
    return TargetShape(
        name=verifier.text("name_or_path", ""),
        hidden_size=target.integer("hidden_size", 0, least=0),
        num_layers=target.integer("num_layers", layers if type(layers) is int else 0, least=0),
        vocab_size=target.integer("vocab_size", 0, least=0),
        embedding_sample=tuple(sample),
    )


def refuse_another(
    trained: TargetShape, target: ModelConfig, source: str | Path, hidden_size: int, vocab_size: int
) -> None:
    """Raise where the drafter, with its own sizes, was trained for a model of another shape; 0: unknown to it."""
    for name, drafters, models in (
        ("hidden size", hidden_size, target.hidden_size),
        ("hidden size", trained.hidden_size, target.hidden_size),
        ("number of layers", trained.num_layers, target.num_layers),
        ("vocabulary", trained.vocab_size or vocab_size, target.vocab_size),
    ):
        if drafters and drafters != models:
            raise InvalidParameter(
                "drafter",
                f"{source} was trained for {trained.name or 'another model'}: its {name} is {drafters}, "
                f"and this model's is {models}",
            )


def refuse_other_drafter(kind: str, trained: TargetShape, method: str, embedding: Tensor | None, source: Path) -> None:
    """Raise for a drafter of another kind than the method, or of a model with other embeddings (V, H)."""
    if kind != method:
        raise InvalidParameter("drafter", f"{source} holds a drafter of method {kind}, not {method}")
    if embedding is not None and not trained.is_like(embedding):
        name = trained.name or "another model"
        raise InvalidParameter("drafter", f"{source} was trained for {name}, whose embeddings are not this model's")


# -- layers, and speculators' layout


def layer_shapes(body: ModelConfig, attention_input: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a layer's products, and of its norms but the one before attention."""
    hidden, middle = body.hidden_size, body.layer.inner
    shapes: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj": (body.layer.q_size, attention_input),
        "self_attn.k_proj": (body.layer.kv_size, attention_input),
        "self_attn.v_proj": (body.layer.kv_size, attention_input),
        "self_attn.o_proj": (hidden, body.layer.q_size),
        "mlp.gate_proj": (middle, hidden),
        "mlp.up_proj": (middle, hidden),
        "mlp.down_proj": (hidden, middle),
        "post_attention_layernorm": (hidden,),
    }
    if body.layer.qk_norm:
        shapes |= {"self_attn.q_norm": (body.layer.head_dim,), "self_attn.k_norm": (body.layer.head_dim,)}
    return shapes


def layer_keys(body: ModelConfig, *, attention_bias: bool = False, mlp_bias: bool = False) -> Json:
    """Return the drafter's layers in the keys of a Hugging Face config, but for the scaling of RoPE."""
    return {
        "model_type": "qwen3" if body.layer.qk_norm else "llama",
        "hidden_size": body.hidden_size,
        "intermediate_size": body.layer.inner,
        "num_hidden_layers": body.num_layers,
        "num_attention_heads": body.layer.heads,
        "num_key_value_heads": body.layer.kv_heads,
        "head_dim": body.layer.head_dim,
        "rms_norm_eps": body.rms_norm_eps,
        "rope_theta": body.layer.rope.theta,
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
    return {key: value for key, value in vars(target).items() if key != "name"}


def description(
    method: str, version: str, architecture: str, layer: Json, tokens: int, target: TargetShape, own: Json | None = None
) -> Json:
    """Return config.json in speculators' layout. `tokens`: of a chain, unless its reader chooses; `own`: keys under
    `paceline`."""
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
        "paceline": {"target": target_keys(target), **(own or {})},
    }


# -- exports for other engines


class ExportTarget(NamedTuple):
    """The model that an exported drafter was trained for."""

    name: str
    config: ModelConfig
    head: Callable[[], Tensor]  # (V, H), read when called

    def head_rows(self, offsets: Tensor) -> Tensor:
        """Return the head's rows for the draft vocabulary of `d2t`."""
        return self.head()[draft_ids(offsets)].contiguous()


def needed(target: ExportTarget | None, reason: str) -> ExportTarget:
    if target is None:
        raise InvalidParameter("model", f"{reason}; give --model")
    return target


def named(trained: TargetShape, target: ExportTarget | None, folder: Path, form: str) -> TargetShape:
    """Return the shape with the name of its model, which this format requires."""
    if trained.name:
        return trained
    return replace(trained, name=needed(target, f"{form} names the model a drafter is for, and {folder} does not").name)


def refuse_features(folder: Path, form: str, features: Mapping[str, bool]) -> None:
    """Raise for the first feature that the drafter has: vLLM's class of this format lacks all of them."""
    for name, has in features.items():
        if has:
            raise UnsupportedModel(f"{folder} cannot be exported as {form}: vLLM's class has no place for {name}")
