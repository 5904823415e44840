"""Reading of a GGUF file's metadata: the keys that families share, as a model of Llama's kind.

A tensor of divisors stands for Llama 3's RoPE scaling; the parameters are recovered and checked against the tensor.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.errors import BrokenModel, UnsupportedModel
from paceline.files.gguf import GGUFFile
from paceline.files.json_fields import JsonFields
from paceline.models.families.family import Family
from paceline.models.families.hf import MOST_LAYERS, check_shape, periodic
from paceline.models.spec import HEAD, ModelConfig, RopeConfig, uniform

LLAMA3_LOW, LLAMA3_HIGH, LLAMA3_ORIGINAL = 1.0, 4.0, 8192  # in every Llama 3.x; the factor is the largest divisor
ROPE_DIVISORS = "rope_freqs.weight"
LONG_DIVISORS, SHORT_DIVISORS = "rope_factors_long.weight", "rope_factors_short.weight"
YARN_NEUTRAL = {"yarn_ext_factor": 1.0, "yarn_attn_factor": 1.0, "yarn_log_multiplier": 0.0}
NEUTRAL = {
    "expert_count": 0,
    "logit_scale": 1.0,
    "embedding_scale": 1.0,
    "residual_scale": 1.0,
    "attention.scale": 0.0,
    "attention.temperature_scale": 0.0,
}

PER_LAYER = ("attention.head_count", "attention.head_count_kv", "feed_forward_length")  # may be lists in a file


def read(file: GGUFFile, family: Family) -> ModelConfig:
    """Return the model that a file describes."""
    source, architecture = str(file.path), file.metadata["general.architecture"]
    fields = _fields(file, architecture)
    fields.refuse_options({key: value for key, value in NEUTRAL.items() if key not in family.honours})
    if "token_embd.weight" not in file.tensors:
        raise BrokenModel(f"{source}: tensor token_embd.weight is missing")
    num_heads, num_layers = fields.integer("attention.head_count"), fields.integer("block_count", most=MOST_LAYERS)
    hidden_size = fields.integer("embedding_length")
    head_dim = fields.integer("attention.key_length", hidden_size // num_heads)
    dims = fields.integer("rope.dimension_count", head_dim)
    for key, length in (
        ("attention.value_length", fields.integer("attention.value_length", head_dim)),
        ("rope.dimension_count", dims),
    ):
        if length != head_dim and key not in family.honours:
            raise UnsupportedModel(f"{source}: {architecture}.{key} other than the head size is not supported")
    positions = fields.integer("context_length")
    rope = _rope(file, fields, family, head_dim, dims, positions)
    if rope.kind == "yarn":  # files may keep the length before scaling
        positions = max(positions, int(rope.original_max_positions * rope.factor))
    eps = "attention.layer_norm_epsilon" if "layer_norm_eps" in family.honours else "attention.layer_norm_rms_epsilon"
    window = fields.integer("attention.sliding_window", 0, least=0)
    model = uniform(
        architecture=family.name,
        vocab_size=file.tensors["token_embd.weight"].shape[0],
        hidden_size=hidden_size,
        intermediate_size=fields.integer("feed_forward_length"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=fields.integer("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        max_positions=positions,
        rms_norm_eps=fields.number(eps),
        rope=rope,
        tie_embeddings="output.weight" not in file.tensors,
        qkv_bias=any(f"blk.0.attn_{part}.bias" in file.tensors for part in ("q", "qkv")),
        output_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_gate.bias" in file.tensors,
        bos_token_id=file.metadata.get("tokenizer.ggml.bos_token_id"),
        eos_token_ids=_end_tokens(file.metadata),
    )
    qk_norm = HEAD if "blk.0.attn_q_norm.weight" in file.tensors else None
    model = family.from_gguf(fields, model.with_layers(qk_norm=qk_norm, window=window or None))
    check_shape(model, source)
    return model


def sliding_layers(fields: JsonFields, num_layers: int, period: int) -> list[bool]:
    """Read which layers have a window: a list, one for all of them, or a period, whose last layer has none."""
    pattern = fields.values.get("attention.sliding_window_pattern", period)
    if isinstance(pattern, bool):
        return [pattern] * num_layers
    if isinstance(pattern, list) and len(pattern) == num_layers and all(isinstance(one, bool) for one in pattern):
        return pattern
    if isinstance(pattern, int) and pattern > 0:
        return periodic(num_layers, pattern)
    raise fields.wrong("attention.sliding_window_pattern", f"a number of layers, or {num_layers} flags")


def llama3_divisors(theta: float, factor: float, head_dim: int) -> npt.NDArray[np.float32]:
    """Compute the divisors of Llama 3's scaling, one for each rotary frequency."""
    wavelength = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = (LLAMA3_ORIGINAL / wavelength - LLAMA3_LOW) / (LLAMA3_HIGH - LLAMA3_LOW)
    smooth = np.clip(smooth, 0.0, 1.0)
    return (1 / ((1 - smooth) / factor + smooth)).astype(np.float32)


def _rope(
    file: GGUFFile, fields: JsonFields, family: Family, head_dim: int, rotated: int, positions: int
) -> RopeConfig:
    dims = None if rotated == head_dim else rotated
    theta = fields.number("rope.freq_base", 10_000.0)
    kind = fields.values.get("rope.scaling.type", "none")
    if "longrope" in family.honours and LONG_DIVISORS in file.tensors:
        return _longrope(file, fields, theta, rotated, positions)
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
            dims=dims,
            factor=factor,
            low_freq_factor=LLAMA3_LOW,
            high_freq_factor=LLAMA3_HIGH,
            original_max_positions=LLAMA3_ORIGINAL,
        )
    if kind == "linear":
        return RopeConfig(theta=theta, dims=dims, kind="linear", factor=fields.number("rope.scaling.factor"))
    if kind == "yarn":
        return _yarn(fields, theta, dims, family)
    if kind != "none":
        raise UnsupportedModel(f"{file.path}: RoPE scaling {kind!r} is not supported; supported: linear, llama3, yarn")
    legacy = fields.number("rope.scale_linear", 1.0)
    return (
        RopeConfig(theta=theta, dims=dims)
        if legacy == 1.0
        else RopeConfig(theta=theta, dims=dims, kind="linear", factor=legacy)
    )


def _longrope(file: GGUFFile, fields: JsonFields, theta: float, dims: int, positions: int) -> RopeConfig:
    """Read the divisors for the model's whole context."""
    original = fields.integer("rope.scaling.original_context_length", positions)
    name = LONG_DIVISORS if positions > original else SHORT_DIVISORS
    divisors = file.read(name).astype(np.float32) if name in file.tensors else np.empty(0, np.float32)
    if divisors.shape != (dims // 2,) or not (divisors > 0).all():
        raise BrokenModel(f"{file.path}: tensor {name} must hold {dims // 2} positive numbers")
    return RopeConfig(
        theta=theta,
        kind="longrope",
        dims=dims,
        original_max_positions=original,
        attention_factor=fields.number("rope.scaling.attn_factor", 1.0),
        divisors=tuple(divisors.tolist()),
    )


def _yarn(fields: JsonFields, theta: float, dims: int | None, family: Family) -> RopeConfig:
    neutral = {f"rope.scaling.{key}": value for key, value in YARN_NEUTRAL.items()}
    fields.refuse_options({key: value for key, value in neutral.items() if key not in family.honours})
    if theta <= 1:
        raise fields.wrong("rope.freq_base", "above 1 for yarn")
    factor = fields.number("rope.scaling.factor")
    growth = 1.0 + 0.1 * max(math.log(factor), 0.0)
    multiplier = fields.amount("rope.scaling.yarn_log_multiplier")
    return RopeConfig(
        theta=theta,
        kind="yarn",
        dims=dims,
        factor=factor,
        original_max_positions=fields.integer("rope.scaling.original_context_length"),
        beta_fast=fields.number("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=fields.number("rope.scaling.yarn_beta_slow", 1.0),
        attention_factor=fields.number("rope.scaling.attn_factor", 1.0) * growth / (1.0 + multiplier * (growth - 1.0)),
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
