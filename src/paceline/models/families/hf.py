"""Reading of a Hugging Face config.json: the keys that families share, as a model of Llama's kind.

The defaults are transformers'. Options that a family does not honour are refused, so a model that loads is the model
that was trained.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from paceline.errors import BrokenModel, UnsupportedModel
from paceline.files.json_fields import Json, JsonFields
from paceline.models.families.family import Family
from paceline.models.load.quantized_config import KEYS
from paceline.models.spec import GELU_TANH, SILU, ModelConfig, RopeConfig, uniform

MOST_LAYERS = 10_000  # layers, more than any model has; bounds the lists built of a damaged file
ROPE_KINDS = ("default", "linear", "llama3", "yarn")
ACTIVATION_NAMES = {"silu": SILU, "swish": SILU, "gelu_pytorch_tanh": GELU_TANH}

# keys of some families that change the arithmetic, with the value that does not
NEUTRAL: dict[str, Any] = {
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "logit_scale": 1.0,
    "logits_scaling": 1.0,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "attention_multiplier": None,
    "partial_rotary_factor": 1.0,
    "no_rope_layers": None,
    "num_experts": None,
    "num_local_experts": None,
    "attention_chunk_size": None,
}


def read(fields: JsonFields, family: Family) -> ModelConfig:
    """Return the model that a config describes."""
    _refuse_foreign_options(fields, family)
    num_heads = fields.integer("num_attention_heads")
    num_layers = fields.integer("num_hidden_layers", most=MOST_LAYERS)
    hidden_size = fields.integer("hidden_size")
    max_positions = fields.integer("max_position_embeddings")
    head_dim = _head_dim(fields, hidden_size, num_heads)
    found = rope(fields, "full_attention", family.honours, head_dim)
    if found.kind == "yarn":  # configs often keep the original length and add rope_scaling only
        max_positions = max(max_positions, int(found.original_max_positions * found.factor))
    bos_token_ids = token_ids(fields.values, "bos_token_id", fields.source)
    model = uniform(
        architecture=family.name,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=fields.integer("num_key_value_heads", num_heads),
        head_dim=head_dim,
        max_positions=max_positions,
        rms_norm_eps=fields.number("layer_norm_eps" if "layer_norm_eps" in family.honours else "rms_norm_eps", 1e-6),
        rope=found,
        tie_embeddings=fields.flag("tie_word_embeddings"),
        bos_token_id=bos_token_ids[0] if bos_token_ids else None,
        eos_token_ids=token_ids(fields.values, "eos_token_id", fields.source),
    )
    model = family.from_hf(fields, model.with_layers(activation=_activation(fields)))
    check_shape(model, fields.source)
    return model


def check_shape(model: ModelConfig, source: str) -> None:
    for layer in {replace(layer, window=None) for layer in model.layers}:
        if layer.heads % layer.kv_heads:
            raise BrokenModel(
                f"{source}: num_attention_heads ({layer.heads}) is not a multiple of "
                f"num_key_value_heads ({layer.kv_heads})"
            )
        if layer.head_dim % 2 or (layer.rope.dims or 0) % 2:
            raise BrokenModel(f"{source}: head_dim must be even for rotary positions, found {layer.head_dim}")


def token_ids(raw: Json, key: str, source: str) -> tuple[int, ...]:
    """Read a field that is absent, null, one token id or a list of them."""
    return JsonFields(raw, source).integers(key, "a token id or a list of them")


def _activation(fields: JsonFields) -> str:
    key = "hidden_activation" if fields.values.get("hidden_activation") is not None else "hidden_act"
    name = fields.text(key, "silu")
    if name not in ACTIVATION_NAMES:
        supported = ", ".join(sorted(set(ACTIVATION_NAMES) - {"swish"}))
        raise UnsupportedModel(f"{fields.source}: {key} {name!r} is not supported; supported: {supported}")
    return ACTIVATION_NAMES[name]


def _refuse_foreign_options(fields: JsonFields, family: Family) -> None:
    for key in KEYS:
        if fields.values.get(key) is not None:
            raise UnsupportedModel(
                f"{fields.source}: the option {key} is not supported (use the unquantised model, or a GGUF file)"
            )
    fields.refuse_options({key: value for key, value in NEUTRAL.items() if key not in family.honours})


def _head_dim(fields: JsonFields, hidden_size: int, num_heads: int) -> int:
    if fields.values.get("head_dim") is not None:
        return fields.integer("head_dim")
    if hidden_size % num_heads:
        raise BrokenModel(
            f"{fields.source}: hidden_size ({hidden_size}) is not a multiple of num_attention_heads ({num_heads})"
        )
    return hidden_size // num_heads


# -- rotary positions


def _rope_settings(fields: JsonFields) -> Json:
    """Return the settings in either spelling: rope_scaling, or rope_parameters of transformers 5."""
    settings = fields.values.get("rope_scaling") or fields.values.get("rope_parameters") or {}
    if not isinstance(settings, dict):
        raise fields.wrong("rope_parameters", "an object")
    return settings


def has_rope_by_layer(fields: JsonFields) -> bool:
    """Return whether rope_parameters has settings of its own for each type of layers."""
    return any(isinstance(value, dict) for value in _rope_settings(fields).values())


def rope(
    fields: JsonFields, layer_type: str, honours: tuple[str, ...] = ("rope_by_layer",), head_dim: int = 0
) -> RopeConfig:
    """Read the rotation of layers of a type. Beside rope_scaling, rope_theta is a key of the config."""
    settings, source = _rope_settings(fields), fields.source
    if has_rope_by_layer(fields):
        if "rope_by_layer" not in honours or not isinstance(settings.get(layer_type), dict):
            raise UnsupportedModel(f"{source}: rope_parameters that differ between layers are not supported")
        settings = settings[layer_type]
    kind = settings.get("rope_type", settings.get("type", "default"))
    if kind in ("longrope", "su") and "longrope" in honours:
        kind = "longrope"
    elif kind not in ROPE_KINDS:
        supported = ", ".join(ROPE_KINDS)
        raise UnsupportedModel(f"{source}: RoPE scaling {kind!r} is not supported; supported: {supported}")
    original, max_positions = "original_max_position_embeddings", fields.integer("max_position_embeddings")
    outer = {key: fields.values[key] for key in (original,) if key in fields.values}
    own = JsonFields({"rope_theta": fields.values.get("rope_theta")} | settings | outer, source)
    dims = None
    if "partial_rotary_factor" in honours:
        share = own.number("partial_rotary_factor", fields.number("partial_rotary_factor", 1.0))
        dims = None if share == 1.0 else int(head_dim * share)
    else:
        own.refuse_options({"partial_rotary_factor": 1.0})
    theta = own.number("rope_theta", 10_000.0)
    if kind == "default":
        return RopeConfig(theta=theta, dims=dims)
    if kind == "linear":
        return RopeConfig(theta=theta, kind=kind, dims=dims, factor=own.number("factor"))
    trained = own.integer(original, max_positions)
    if kind == "yarn":
        return _yarn(own, theta, trained, max_positions, dims)
    if kind == "longrope":
        return _longrope(own, theta, trained, max_positions, head_dim if dims is None else dims)
    low, high = own.number("low_freq_factor"), own.number("high_freq_factor")
    if high <= low:
        raise BrokenModel(f"{source}: high_freq_factor ({high}) must be above low_freq_factor ({low})")
    return RopeConfig(
        theta=theta,
        kind=kind,
        dims=dims,
        factor=own.number("factor"),
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_positions=trained,
    )


def _longrope(fields: JsonFields, theta: float, original: int, max_positions: int, dims: int) -> RopeConfig:
    """Read the divisors for the model's whole context."""
    factor = max_positions / original
    key = "long_factor" if factor > 1 else "short_factor"
    divisors = fields.values.get(key)
    if (
        not isinstance(divisors, list)
        or len(divisors) != dims // 2
        or not all(type(one) in (int, float) and 0 < one < math.inf for one in divisors)
    ):
        raise fields.wrong(key, f"a list of {dims // 2} positive numbers")
    usual = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return RopeConfig(
        theta=theta,
        kind="longrope",
        dims=dims,
        original_max_positions=original,
        attention_factor=fields.number("attention_factor", usual),
        divisors=tuple(map(float, divisors)),
    )


def _yarn(fields: JsonFields, theta: float, original: int, max_positions: int, dims: int | None) -> RopeConfig:
    factor = fields.number("factor", max_positions / original)
    if theta <= 1:
        raise BrokenModel(f"{fields.source}: rope_theta must be above 1 for yarn, found {theta}")

    def attention(multiplier: float) -> float:
        return 0.1 * multiplier * math.log(factor) + 1.0 if factor > 1 else 1.0

    usual = attention(1.0)
    if fields.values.get("mscale") and fields.values.get("mscale_all_dim"):
        usual = attention(fields.number("mscale")) / attention(fields.number("mscale_all_dim"))
    return RopeConfig(
        theta=theta,
        kind="yarn",
        dims=dims,
        factor=factor,
        original_max_positions=original,
        beta_fast=fields.number("beta_fast", 32.0),
        beta_slow=fields.number("beta_slow", 1.0),
        truncate=fields.flag("truncate", True),
        attention_factor=fields.number("attention_factor", usual),
    )


def rope_scaling(rope: RopeConfig) -> Json:
    """Spell a RopeConfig as transformers do, without rope_theta: `_rope` reads it."""
    names = {
        "linear": ("factor",),
        "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
        "yarn": ("factor", "beta_fast", "beta_slow", "truncate", "attention_factor"),
    }
    settings = {"rope_type": rope.kind} | {name: getattr(rope, name) for name in names.get(rope.kind, ())}
    if rope.kind in ("llama3", "yarn"):
        settings["original_max_position_embeddings"] = rope.original_max_positions
    return settings


# -- windows


def periodic(num_layers: int, period: int) -> list[bool]:
    """Return False for the last layer of each period."""
    return [(layer + 1) % period != 0 for layer in range(num_layers)]


def sliding_layers(fields: JsonFields, num_layers: int) -> list[bool] | None:
    """Read which layers have a window; None where `layer_types` is absent."""
    kinds, source = fields.values.get("layer_types"), fields.source
    if kinds is None:
        return None
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise BrokenModel(f"{source}: layer_types must name all {num_layers} layers")
    unknown = sorted(set(map(str, kinds)) - {"full_attention", "sliding_attention"})
    if unknown:
        raise UnsupportedModel(
            f"{source}: layer type {unknown[0]!r} is not supported; supported: full_attention, sliding_attention"
        )
    return [kind == "sliding_attention" for kind in kinds]


def checked_window(fields: JsonFields, window: object) -> int:
    if type(window) is not int or window < 1:
        raise BrokenModel(f"{fields.source}: sliding_window must be a positive integer, found {window!r}")
    return window


def with_windows(fields: JsonFields, model: ModelConfig, slides: list[bool], window: object) -> ModelConfig:
    """Return the model with a window in the chosen layers."""
    if not any(slides):
        return model.with_layers(window=None)
    size = checked_window(fields, window)
    layers = (replace(one, window=size if slides[at] else None) for at, one in enumerate(model.layers))
    return replace(model, layers=tuple(layers))
