"""A Hugging Face config.json as a ModelConfig, or an error with the reason why it is none.

The defaults are transformers'. Options that the decoder does not implement are refused, so a model that loads is the
model that was trained.
"""

from __future__ import annotations

import math
from typing import Any

from paceline.errors import BrokenModel, UnsupportedModel, short_repr
from paceline.files.json_fields import Json, JsonFields
from paceline.models.load.quantized_config import KEYS, Quantization, parse_quantization
from paceline.models.spec import ModelConfig, RopeConfig

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
MOST_LAYERS = 10_000  # layers, more than any model has; bounds the lists built of a damaged file
ROPE_KINDS = ("default", "linear", "llama3", "yarn")
MISTRAL_WINDOW = 4096  # transformers' default when the key is absent
QWEN_WINDOW, QWEN_FULL_LAYERS, QWEN3_HEAD_DIM = 4096, 28, 128

# keys of related architectures that change the arithmetic, with the value that does not
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


def parse_checkpoint(raw: Json, source: str) -> tuple[ModelConfig, Quantization | None]:
    """Read the config of a model whose weights may be quantised; `source` names the file in errors."""
    plain = {key: value for key, value in raw.items() if key not in KEYS}
    return parse_config(plain, source), parse_quantization(raw, source)


def parse_config(raw: Json, source: str) -> ModelConfig:
    """Read the config of a model whose weights are plain numbers."""
    fields = JsonFields(raw, source)
    architecture = _architecture(raw, source)
    _refuse_foreign_options(fields)
    num_heads = fields.integer("num_attention_heads")
    num_layers = fields.integer("num_hidden_layers", most=MOST_LAYERS)
    hidden_size = fields.integer("hidden_size")
    attention_bias = fields.flag("attention_bias") and architecture in ("llama", "qwen3")
    max_positions = fields.integer("max_position_embeddings")
    rope = _rope(raw, max_positions, source)
    if rope.kind == "yarn":  # configs often keep the original length and add rope_scaling only
        max_positions = max(max_positions, int(rope.original_max_positions * rope.factor))
    bos_token_ids = token_ids(raw, "bos_token_id", source)
    config = ModelConfig(
        architecture=architecture,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=fields.integer("num_key_value_heads", num_heads),
        head_dim=_head_dim(fields, architecture, hidden_size, num_heads),
        max_positions=max_positions,
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope=rope,
        tie_embeddings=fields.flag("tie_word_embeddings"),
        qkv_bias=attention_bias or architecture == "qwen2",
        output_bias=attention_bias,
        mlp_bias=fields.flag("mlp_bias") and architecture == "llama",
        qk_norm=architecture == "qwen3",
        windows=_windows(fields, architecture, num_layers),
        bos_token_id=bos_token_ids[0] if bos_token_ids else None,
        eos_token_ids=token_ids(raw, "eos_token_id", source),
    )
    check_shape(config, source)
    return config


def check_shape(config: ModelConfig, source: str) -> None:
    if config.num_heads % config.num_kv_heads:
        raise BrokenModel(
            f"{source}: num_attention_heads ({config.num_heads}) is not a multiple of "
            f"num_key_value_heads ({config.num_kv_heads})"
        )
    if config.head_dim % 2:
        raise BrokenModel(f"{source}: head_dim must be even for rotary positions, found {config.head_dim}")


def token_ids(raw: Json, key: str, source: str) -> tuple[int, ...]:
    """Read a field that is absent, null, one token id or a list of them."""
    return JsonFields(raw, source).integers(key, "a token id or a list of them")


def _architecture(raw: Json, source: str) -> str:
    names = raw.get("architectures") or []
    supported = ", ".join(ARCHITECTURES)
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise BrokenModel(f"{source}: architectures must be a list of names, found {short_repr(names)}")
    if len(names) == 1 and names[0] in ARCHITECTURES:
        return ARCHITECTURES[names[0]]
    if not names:
        model_type = raw.get("model_type")
        if model_type in ARCHITECTURES.values():
            return str(model_type)
        if model_type is None:
            raise BrokenModel(f"{source}: the key architectures is missing, so the model cannot be recognised")
        names = [short_repr(model_type)]
    raise UnsupportedModel(f"{source}: architecture {', '.join(names)} is not supported; supported: {supported}")


def _refuse_foreign_options(fields: JsonFields) -> None:
    activation = fields.values.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise UnsupportedModel(f"{fields.source}: hidden_act {activation!r} is not supported; supported: silu")
    for key in KEYS:
        if fields.values.get(key) is not None:
            raise UnsupportedModel(
                f"{fields.source}: the option {key} is not supported (use the unquantised model, or a GGUF file)"
            )
    fields.refuse_options(NEUTRAL)


def _head_dim(fields: JsonFields, architecture: str, hidden_size: int, num_heads: int) -> int:
    if fields.values.get("head_dim") is not None:
        return fields.integer("head_dim")
    if architecture == "qwen3":
        return QWEN3_HEAD_DIM
    if hidden_size % num_heads:
        raise BrokenModel(
            f"{fields.source}: hidden_size ({hidden_size}) is not a multiple of num_attention_heads ({num_heads})"
        )
    return hidden_size // num_heads


def _rope(raw: Json, max_positions: int, source: str) -> RopeConfig:
    """Read both spellings: rope_theta beside rope_scaling, and rope_parameters of transformers 5 with all of it."""
    settings = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    if not isinstance(settings, dict) or any(isinstance(value, dict) for value in settings.values()):
        raise UnsupportedModel(f"{source}: rope_parameters that differ between layers are not supported")
    kind = settings.get("rope_type", settings.get("type", "default"))
    if kind not in ROPE_KINDS:
        supported = ", ".join(ROPE_KINDS)
        raise UnsupportedModel(f"{source}: RoPE scaling {kind!r} is not supported; supported: {supported}")
    original = "original_max_position_embeddings"
    outer = {key: raw[key] for key in (original,) if key in raw}
    fields = JsonFields({"rope_theta": raw.get("rope_theta")} | settings | outer, source)
    fields.refuse_options({"partial_rotary_factor": 1.0})
    theta = fields.number("rope_theta", 10_000.0)
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind == "linear":
        return RopeConfig(theta=theta, kind=kind, factor=fields.number("factor"))
    original_max_positions = fields.integer(original, max_positions)
    if kind == "yarn":
        return _yarn(fields, theta, original_max_positions, max_positions)
    low, high = fields.number("low_freq_factor"), fields.number("high_freq_factor")
    if high <= low:
        raise BrokenModel(f"{source}: high_freq_factor ({high}) must be above low_freq_factor ({low})")
    return RopeConfig(
        theta=theta,
        kind=kind,
        factor=fields.number("factor"),
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_positions=original_max_positions,
    )


def _yarn(fields: JsonFields, theta: float, original: int, max_positions: int) -> RopeConfig:
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


def _windows(fields: JsonFields, architecture: str, num_layers: int) -> tuple[int | None, ...]:
    """Read the sliding window of each layer; () when every layer attends to all positions."""
    if architecture == "llama":
        return ()
    raw, source = fields.values, fields.source
    if architecture == "mistral":
        window = raw.get("sliding_window", MISTRAL_WINDOW)
        sliding = [window is not None] * num_layers
        if raw.get("layer_types") is not None and _layer_types(raw, num_layers, source) != sliding:
            raise UnsupportedModel(f"{source}: a Mistral model whose layer_types differ is not supported")
    else:
        window = raw.get("sliding_window", QWEN_WINDOW) if fields.flag("use_sliding_window") else None
        first = raw.get("max_window_layers", QWEN_FULL_LAYERS)
        if not isinstance(first, int):
            raise BrokenModel(f"{source}: max_window_layers must be an integer, found {first!r}")
        sliding = [window is not None and layer >= first for layer in range(num_layers)]
        if raw.get("layer_types") is not None:
            sliding = _layer_types(raw, num_layers, source)
    if not any(sliding):
        return ()
    if type(window) is not int or window < 1:
        raise BrokenModel(f"{source}: sliding_window must be a positive integer, found {window!r}")
    return tuple(window if slides else None for slides in sliding)


def _layer_types(raw: Json, num_layers: int, source: str) -> list[bool]:
    kinds = raw["layer_types"]
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise BrokenModel(f"{source}: layer_types must name all {num_layers} layers")
    unknown = sorted(set(map(str, kinds)) - {"full_attention", "sliding_attention"})
    if unknown:
        raise UnsupportedModel(
            f"{source}: layer type {unknown[0]!r} is not supported; supported: full_attention, sliding_attention"
        )
    return [kind == "sliding_attention" for kind in kinds]
