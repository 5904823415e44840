"""Gemma 3: Gemma 2 with norms of q and k in place of soft caps, five layers with a window to one without, and a rotary
base of its own for each kind. The text of the multimodal sizes (4B and more) is the same model."""

from __future__ import annotations

import math
from dataclasses import replace

from paceline.errors import UnsupportedModel
from paceline.files.json_fields import JsonFields
from paceline.models.families import gguf_keys, hf
from paceline.models.families.family import Family
from paceline.models.families.gemma2 import GGUF_NAMES, HONOURS, NAMES, gemma, gguf_scale
from paceline.models.spec import HEAD, ModelConfig, RopeConfig

LOCAL_THETA = 10_000.0
LAYERS_OF_LARGEST = 62
PERIOD = 6  # layers: the last of each has no window
DEFAULTS = {
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
    "rope_theta": 1_000_000.0,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
}


def from_hf(fields: JsonFields, model: ModelConfig) -> ModelConfig:
    if fields.values.get("use_bidirectional_attention"):
        raise UnsupportedModel(f"{fields.source}: the option use_bidirectional_attention is not supported")
    model = gemma(model, 1 / math.sqrt(fields.number("query_pre_attn_scalar", 256)))
    bias = fields.flag("attention_bias")
    model = model.with_layers(softcap=fields.amount("attn_logit_softcapping"), qkv_bias=bias, output_bias=bias)
    slides = hf.sliding_layers(fields, model.num_layers)
    if slides is None:
        slides = hf.periodic(model.num_layers, fields.integer("sliding_window_pattern", PERIOD))
    local = hf.rope(fields, "sliding_attention") if hf.has_rope_by_layer(fields) else None
    local = local or RopeConfig(theta=fields.number("rope_local_base_freq", LOCAL_THETA))
    model = local_and_global(fields, model, slides, fields.values.get("sliding_window", 4096), local)
    return model.replaced(logit_softcap=fields.amount("final_logit_softcapping"))


def from_gguf(fields: JsonFields, model: ModelConfig) -> ModelConfig:
    model = gemma(model, gguf_scale(model, LAYERS_OF_LARGEST))
    window = fields.integer("attention.sliding_window", 0, least=0)
    slides = gguf_keys.sliding_layers(fields, model.num_layers, PERIOD) if window else [False] * model.num_layers
    local = RopeConfig(theta=fields.number("rope.freq_base_swa", LOCAL_THETA))
    model = local_and_global(fields, model, slides, window or None, local)
    return model.replaced(logit_softcap=fields.amount("final_logit_softcapping"))


def local_and_global(
    fields: JsonFields, model: ModelConfig, slides: list[bool], window: object, local: RopeConfig
) -> ModelConfig:
    model = hf.with_windows(fields, model.with_layers(qk_norm=HEAD), slides, window)
    layers = (replace(one, rope=local) if slides[at] else one for at, one in enumerate(model.layers))
    return model.replaced(layers=tuple(layers))


FAMILY = Family(
    name="gemma3",
    classes=("Gemma3ForCausalLM",),
    wrappers=("Gemma3ForConditionalGeneration",),
    model_types=("gemma3_text",),
    defaults=DEFAULTS,
    honours=(*HONOURS, "rope_by_layer"),
    from_hf=from_hf,
    gguf="gemma3",
    from_gguf=from_gguf,
    names=NAMES,
    gguf_names=GGUF_NAMES,
    norms_less_one=True,
)
