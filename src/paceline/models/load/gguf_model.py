"""A GGUF file as a Hugging Face model: its config, and its tensors under their Hugging Face names.

llama.cpp interleaves the q and k rows of Llama models for its rotary kernel; their order is restored (Qwen models are
stored as trained). A tensor of divisors stands for Llama 3's RoPE scaling; the parameters are recovered and checked
against the tensor.
"""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from paceline.errors import BrokenModel, UnsupportedModel
from paceline.files.gguf import GGUFFile
from paceline.files.json_fields import JsonFields
from paceline.models.load.hf_config import MOST_LAYERS, check_shape
from paceline.models.quant.block_file import checked_blocks
from paceline.models.spec import ModelConfig, RopeConfig
from paceline.models.weights import BLOCKS, StoredWeight, WeightKind
from paceline.text.gguf_vocab import check_tokenizer_fields

ARCHITECTURES = ("llama", "qwen2", "qwen3")
LLAMA3_LOW, LLAMA3_HIGH, LLAMA3_ORIGINAL = 1.0, 4.0, 8192  # in every Llama 3.x; the factor is the largest divisor
ROPE_DIVISORS = "rope_freqs.weight"
YARN_NEUTRAL = {"yarn_ext_factor": 1.0, "yarn_attn_factor": 1.0, "yarn_log_multiplier": 0.0}
NEUTRAL = {"expert_count": 0, "logit_scale": 1.0, "embedding_scale": 1.0, "residual_scale": 1.0, "attention.scale": 0.0}

PER_LAYER = ("attention.head_count", "attention.head_count_kv", "feed_forward_length")  # may be lists in a file
TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
KINDS = {"F32": WeightKind.FLOAT32, "F16": WeightKind.FLOAT16, "BF16": WeightKind.BFLOAT16} | {
    kind.name: kind for kind in BLOCKS
}
LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


def gguf_config(file: GGUFFile) -> ModelConfig:
    source = str(file.path)
    architecture = file.metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise UnsupportedModel(f"{source}: architecture {architecture!r} is not supported; supported in GGUF: {known}")
    check_tokenizer_fields(file.metadata, source)
    fields = _fields(file, architecture)
    fields.refuse_options(NEUTRAL)
    if "token_embd.weight" not in file.tensors:
        raise BrokenModel(f"{source}: tensor token_embd.weight is missing")
    num_heads, num_layers = fields.integer("attention.head_count"), fields.integer("block_count", most=MOST_LAYERS)
    hidden_size = fields.integer("embedding_length")
    head_dim = fields.integer("attention.key_length", hidden_size // num_heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if fields.integer(key, head_dim) != head_dim:
            raise UnsupportedModel(f"{source}: {architecture}.{key} other than the head size is not supported")
    window = fields.integer("attention.sliding_window", 0, least=0)
    rope, positions = _rope(file, fields, head_dim), fields.integer("context_length")
    if rope.kind == "yarn":  # files may keep the length before scaling
        positions = max(positions, int(rope.original_max_positions * rope.factor))
    config = ModelConfig(
        architecture=architecture,
        vocab_size=file.tensors["token_embd.weight"].shape[0],
        hidden_size=hidden_size,
        intermediate_size=fields.integer("feed_forward_length"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=fields.integer("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        max_positions=positions,
        rms_norm_eps=fields.number("attention.layer_norm_rms_epsilon"),
        rope=rope,
        tie_embeddings="output.weight" not in file.tensors,
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        output_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_gate.bias" in file.tensors,
        qk_norm="blk.0.attn_q_norm.weight" in file.tensors,
        windows=(window,) * num_layers if window else (),
        bos_token_id=file.metadata.get("tokenizer.ggml.bos_token_id"),
        eos_token_ids=_end_tokens(file.metadata),
    )
    check_shape(config, source)
    return config


def gguf_names(file: GGUFFile) -> dict[str, str]:
    """Map Hugging Face names to names in the file; an unknown tensor keeps its name, which the loader refuses."""
    names: dict[str, str] = {}
    for name in file.tensors:
        if name == ROPE_DIVISORS:  # read by gguf_config
            continue
        match = LAYER_TENSOR.fullmatch(name)
        hf_name = TOP_NAMES.get(name, name)
        if match and match[2] in LAYER_NAMES:
            hf_name = f"model.layers.{match[1]}.{LAYER_NAMES[match[2]]}.{match[3]}"
        if hf_name in names:
            raise BrokenModel(
                f"{file.path}: tensors {names[hf_name]} and {name} are one and the same; keep one of them"
            )
        names[hf_name] = name
    return names


def gguf_kind(file: GGUFFile, name: str) -> WeightKind:
    """Return the kind that a tensor has in memory: its own, or fp32 for blocks that no kernel reads."""
    return KINDS.get(file.type_name(name), WeightKind.FLOAT32)


def gguf_weight(file: GGUFFile, name: str, config: ModelConfig) -> StoredWeight:
    """Read a tensor in the row order of a Hugging Face model."""
    kind = gguf_kind(file, name) if len(file.tensors[name].shape) == 2 else WeightKind.FLOAT32
    if not kind.is_blocks and kind is not WeightKind.BFLOAT16:
        return StoredWeight.of(torch.from_numpy(_hf_rows(file.read(name), name, config)))
    data = torch.from_numpy(_hf_rows(file.raw(name), name, config))
    if kind is WeightKind.BFLOAT16:
        return StoredWeight.of(data.view(torch.bfloat16))
    return checked_blocks(kind, data, f"{file.path}: tensor {name}")


def _hf_rows(values: npt.NDArray[Any], name: str, config: ModelConfig) -> npt.NDArray[Any]:
    if config.architecture == "llama":
        if ".attn_q." in name:
            return uninterleave(values, config.num_heads)
        if ".attn_k." in name:
            return uninterleave(values, config.num_kv_heads)
    return values


def uninterleave(values: npt.NDArray[Any], num_heads: int) -> npt.NDArray[Any]:
    """Reorder the rows of each head from (x0 y0 x1 y1 ...), rotary pairs side by side, to (x0 x1 ... y0 y1 ...)."""
    half = values.shape[0] // num_heads // 2
    pairs = values.reshape(num_heads, half, 2, *values.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(values.shape)


def llama3_divisors(theta: float, factor: float, head_dim: int) -> npt.NDArray[np.float32]:
    """Compute the divisors of Llama 3's scaling, one for each rotary frequency."""
    wavelength = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = (LLAMA3_ORIGINAL / wavelength - LLAMA3_LOW) / (LLAMA3_HIGH - LLAMA3_LOW)
    smooth = np.clip(smooth, 0.0, 1.0)
    return (1 / ((1 - smooth) / factor + smooth)).astype(np.float32)


def _rope(file: GGUFFile, fields: JsonFields, head_dim: int) -> RopeConfig:
    theta = fields.number("rope.freq_base", 10_000.0)
    kind = fields.values.get("rope.scaling.type", "none")
    if ROPE_DIVISORS in file.tensors:
        divisors = file.read(ROPE_DIVISORS).astype(np.float32)
        factor = float(divisors.max(initial=0.0)) or 1.0
        expected = llama3_divisors(theta, factor, head_dim)
        if kind != "none" or divisors.shape != expected.shape or not np.allclose(divisors, expected, rtol=1e-4):
            raise UnsupportedModel(
                f"{file.path}: {ROPE_DIVISORS} is not Llama 3's RoPE scaling, the only one supported"
            )
        return RopeConfig(
            theta=theta,
            kind="llama3",
            factor=factor,
            low_freq_factor=LLAMA3_LOW,
            high_freq_factor=LLAMA3_HIGH,
            original_max_positions=LLAMA3_ORIGINAL,
        )
    if kind == "linear":
        return RopeConfig(theta=theta, kind="linear", factor=fields.number("rope.scaling.factor"))
    if kind == "yarn":
        return _yarn(fields, theta)
    if kind != "none":
        raise UnsupportedModel(f"{file.path}: RoPE scaling {kind!r} is not supported; supported: linear, llama3, yarn")
    legacy = fields.number("rope.scale_linear", 1.0)
    return RopeConfig(theta=theta) if legacy == 1.0 else RopeConfig(theta=theta, kind="linear", factor=legacy)


def _yarn(fields: JsonFields, theta: float) -> RopeConfig:
    fields.refuse_options({f"rope.scaling.{key}": neutral for key, neutral in YARN_NEUTRAL.items()})
    if theta <= 1:
        raise fields.wrong("rope.freq_base", "above 1 for yarn")
    factor = fields.number("rope.scaling.factor")
    return RopeConfig(
        theta=theta,
        kind="yarn",
        factor=factor,
        original_max_positions=fields.integer("rope.scaling.original_context_length"),
        beta_fast=fields.number("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=fields.number("rope.scaling.yarn_beta_slow", 1.0),
        attention_factor=fields.number("rope.scaling.attn_factor", 1.0) * (1.0 + 0.1 * max(math.log(factor), 0.0)),
    )


def _end_tokens(metadata: dict[str, Any]) -> tuple[int, ...]:
    keys = (f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))
    return tuple(dict.fromkeys(metadata[key] for key in keys if key in metadata))


def _fields(file: GGUFFile, architecture: str) -> JsonFields:
    """Return the architecture's own metadata. A list with an equal entry for each layer becomes the entry."""
    prefix, source = f"{architecture}.", str(file.path)
    fields = JsonFields({}, source, f"{prefix}{{}}")
    for name, value in file.metadata.items():
        if name.startswith(prefix):
            fields.values[name.removeprefix(prefix)] = _scalar(value)
    for key in PER_LAYER:
        if isinstance(fields.values.get(key), list):
            raise UnsupportedModel(f"{source}: {prefix}{key} differs between layers: not supported")
    return fields


def _scalar(value: Any) -> Any:
    if isinstance(value, list) and value and all(entry == value[0] for entry in value):
        value = value[0]
    # a float32 in the file: 1e-05, not 9.999999747378752e-06
    return float(str(np.float32(value))) if isinstance(value, float) else value
