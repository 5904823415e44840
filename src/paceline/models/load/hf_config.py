"""Turns a Hugging Face config.json into a ModelConfig, or raises an error with the reason why it cannot.

The defaults are transformers'. Options that the decoder does not implement are refused, so a model that loads is the
model that was trained.
"""

from __future__ import annotations

import math
import sys
from typing import Any

from paceline.config import ModelConfig, RopeConfig
from paceline.errors import BrokenModel, UnsupportedModel
from paceline.models.load.quantized_config import KEYS, Quantization, parse_quantization

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
MOST_LAYERS = 10_000  # more than any model has; a damaged file must not cost hours of building lists
ROPE_KINDS = ("default", "linear", "llama3", "yarn")
SHOWN = 80  # characters of a wrong value in a message
MISTRAL_WINDOW = 4096  # transformers' default when the key is absent
QWEN_WINDOW, QWEN_FULL_LAYERS, QWEN3_HEAD_DIM = 4096, 28, 128

# keys of related architectures that change the arithmetic, with the value that does not
NEUTRAL: dict[str, Any] = {
    "quantization_config": None,
    "compression_config": None,
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

Json = dict[str, Any]


def parse_checkpoint(raw: Json, source: str) -> tuple[ModelConfig, Quantization | None]:
    """Of a model whose weights may be quantised; `source` names the file in errors."""
    plain = {key: value for key, value in raw.items() if key not in KEYS}
    return parse_config(plain, source), parse_quantization(raw, source)


def parse_config(raw: Json, source: str) -> ModelConfig:
    """Of a model whose weights are plain numbers."""
    architecture = _architecture(raw, source)
    _refuse_foreign_options(raw, source)
    num_heads = _integer(raw, "num_attention_heads", source)
    num_layers = _integer(raw, "num_hidden_layers", source, largest=MOST_LAYERS)
    hidden_size = _integer(raw, "hidden_size", source)
    num_kv_heads = _integer(raw, "num_key_value_heads", source, default=num_heads)
    attention_bias = _flag(raw, "attention_bias", source) and architecture in ("llama", "qwen3")
    max_positions = _integer(raw, "max_position_embeddings", source)
    rope = _rope(raw, max_positions, source)
    if rope.kind == "yarn":  # configs often keep the original length and add rope_scaling only
        max_positions = max(max_positions, int(rope.original_max_positions * rope.factor))
    config = ModelConfig(
        architecture=architecture,
        vocab_size=_integer(raw, "vocab_size", source),
        hidden_size=hidden_size,
        intermediate_size=_integer(raw, "intermediate_size", source),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=_head_dim(raw, architecture, hidden_size, num_heads, source),
        max_positions=max_positions,
        rms_norm_eps=_number(raw, "rms_norm_eps", source, default=1e-6),
        rope=rope,
        tie_embeddings=_flag(raw, "tie_word_embeddings", source),
        qkv_bias=attention_bias or architecture == "qwen2",
        output_bias=attention_bias,
        mlp_bias=_flag(raw, "mlp_bias", source) and architecture == "llama",
        qk_norm=architecture == "qwen3",
        windows=_windows(raw, architecture, num_layers, source),
        bos_token_id=_first(token_ids(raw, "bos_token_id", source)),
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
    """A token id field: absent, null, one id or a list of ids."""
    value = raw.get(key)
    values = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(token, int) and not isinstance(token, bool) and token >= 0 for token in values):
        raise BrokenModel(f"{source}: {key} must be a token id or a list of them, found {_shown(value)}")
    return tuple(values)


def _architecture(raw: Json, source: str) -> str:
    names = raw.get("architectures") or []
    supported = ", ".join(ARCHITECTURES)
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise BrokenModel(f"{source}: architectures must be a list of names, found {_shown(names)}")
    if len(names) == 1 and names[0] in ARCHITECTURES:
        return ARCHITECTURES[names[0]]
    if not names:
        model_type = raw.get("model_type")
        if model_type in ARCHITECTURES.values():
            return str(model_type)
        if model_type is None:
            raise BrokenModel(f"{source}: the key architectures is missing, so the model cannot be recognised")
        names = [_shown(model_type)]
    raise UnsupportedModel(f"{source}: architecture {', '.join(names)} is not supported; supported: {supported}")


def _refuse_foreign_options(raw: Json, source: str) -> None:
    activation = raw.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise UnsupportedModel(f"{source}: hidden_act {activation!r} is not supported; supported: silu")
    for key, neutral in NEUTRAL.items():
        if raw.get(key, neutral) not in (None, neutral):
            detail = " (use the unquantised model, or a GGUF file)" if "_config" in key else ""
            raise UnsupportedModel(f"{source}: the option {key} is not supported{detail}")


def _head_dim(raw: Json, architecture: str, hidden_size: int, num_heads: int, source: str) -> int:
    if raw.get("head_dim") is not None:
        return _integer(raw, "head_dim", source)
    if architecture == "qwen3":
        return QWEN3_HEAD_DIM
    if hidden_size % num_heads:
        raise BrokenModel(
            f"{source}: hidden_size ({hidden_size}) is not a multiple of num_attention_heads ({num_heads})"
        )
    return hidden_size // num_heads


def _rope(raw: Json, max_positions: int, source: str) -> RopeConfig:
    """Both spellings: rope_theta beside rope_scaling, and transformers 5's rope_parameters that hold everything."""
    given = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    if not isinstance(given, dict) or any(isinstance(value, dict) for value in given.values()):
        raise UnsupportedModel(f"{source}: rope_parameters that differ between layers are not supported")
    kind = given.get("rope_type", given.get("type", "default"))
    if kind not in ROPE_KINDS:
        supported = ", ".join(ROPE_KINDS)
        raise UnsupportedModel(f"{source}: RoPE scaling {kind!r} is not supported; supported: {supported}")
    if given.get("partial_rotary_factor") not in (None, 1.0):
        raise UnsupportedModel(f"{source}: the option partial_rotary_factor is not supported")
    theta = _number({"rope_theta": raw.get("rope_theta")} | given, "rope_theta", source, default=10_000.0)
    if kind == "default":
        return RopeConfig(theta=theta)
    factor = 0.0 if kind == "yarn" else _number(given, "factor", source)
    if kind == "linear":
        return RopeConfig(theta=theta, kind=kind, factor=factor)
    key = "original_max_position_embeddings"
    original = _integer({key: raw.get(key, given.get(key))}, key, source, default=max_positions)
    if kind == "yarn":
        return _yarn(given, theta, original, max_positions, source)
    low, high = _number(given, "low_freq_factor", source), _number(given, "high_freq_factor", source)
    if high <= low:
        raise BrokenModel(f"{source}: high_freq_factor ({high}) must be above low_freq_factor ({low})")
    return RopeConfig(
        theta=theta,
        kind=kind,
        factor=factor,
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_positions=original,
    )


def _yarn(given: Json, theta: float, original: int, max_positions: int, source: str) -> RopeConfig:
    factor = _number(given, "factor", source, default=max_positions / original)
    fast, slow = _number(given, "beta_fast", source, default=32.0), _number(given, "beta_slow", source, default=1.0)
    if theta <= 1:
        raise BrokenModel(f"{source}: rope_theta must be above 1 for yarn, found {theta}")

    def attention(multiplier: float) -> float:
        return 0.1 * multiplier * math.log(factor) + 1.0 if factor > 1 else 1.0

    scales = [given.get(key) for key in ("mscale", "mscale_all_dim")]
    usual = attention(1.0)
    if all(scales):
        usual = attention(_number(given, "mscale", source)) / attention(_number(given, "mscale_all_dim", source))
    return RopeConfig(
        theta=theta,
        kind="yarn",
        factor=factor,
        original_max_positions=original,
        beta_fast=fast,
        beta_slow=slow,
        truncate=_flag(given, "truncate", source, default=True),
        attention_factor=_number(given, "attention_factor", source, default=usual),
    )


def rope_scaling(rope: RopeConfig) -> Json:
    """What `_rope` reads, but for rope_theta, in transformers' spelling."""
    fields = {
        "linear": ("factor",),
        "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
        "yarn": ("factor", "beta_fast", "beta_slow", "truncate", "attention_factor"),
    }
    found = {"rope_type": rope.kind} | {field: getattr(rope, field) for field in fields.get(rope.kind, ())}
    if rope.kind in ("llama3", "yarn"):
        found["original_max_position_embeddings"] = rope.original_max_positions
    return found


def _windows(raw: Json, architecture: str, num_layers: int, source: str) -> tuple[int | None, ...]:
    """The sliding window of each layer, or () when every layer sees everything."""
    if architecture == "llama":
        return ()
    if architecture == "mistral":
        window = raw.get("sliding_window", MISTRAL_WINDOW)
        sliding = [window is not None] * num_layers
        if raw.get("layer_types") is not None and _layer_types(raw, num_layers, source) != sliding:
            raise UnsupportedModel(f"{source}: a Mistral model whose layer_types differ is not supported")
    else:
        window = raw.get("sliding_window", QWEN_WINDOW) if _flag(raw, "use_sliding_window", source) else None
        first = raw.get("max_window_layers", QWEN_FULL_LAYERS)
        if not isinstance(first, int):
            raise BrokenModel(f"{source}: max_window_layers must be an integer, found {first!r}")
        sliding = [window is not None and layer >= first for layer in range(num_layers)]
        if raw.get("layer_types") is not None:
            sliding = _layer_types(raw, num_layers, source)
    if not any(sliding):
        return ()
    if not isinstance(window, int) or isinstance(window, bool) or window < 1:
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


def _shown(value: Any) -> str:
    """For a message: damaged files hold values of any size."""
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]} ..."


def _flag(raw: Json, key: str, source: str, default: bool = False) -> bool:
    """A string would be true whatever it says."""
    value = raw.get(key)
    if value is not None and not isinstance(value, bool):
        raise BrokenModel(f"{source}: {key} must be true or false without quotation marks, found {_shown(value)}")
    return default if value is None else value


def _first(values: tuple[int, ...]) -> int | None:
    return values[0] if values else None


def _integer(raw: Json, key: str, source: str, default: int | None = None, largest: int = 2**31 - 1) -> int:
    value = raw.get(key)
    if value is None and default is not None:
        return default
    if value is None:
        raise BrokenModel(f"{source}: the key {key} is missing")
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= largest:
        raise BrokenModel(f"{source}: {key} must be a positive integer up to {largest}, found {_shown(value)}")
    return value


def _number(raw: Json, key: str, source: str, default: float | None = None) -> float:
    value = raw.get(key)
    if value is None and default is not None:
        return default
    if value is None:
        raise BrokenModel(f"{source}: the key {key} is missing")
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value <= sys.float_info.max:
        raise BrokenModel(f"{source}: {key} must be a positive number, found {_shown(value)}")
    return float(value)
