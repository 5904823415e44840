"""Gemma 2: norms around both halves, soft caps, a sliding window in every other layer.

Folders store norms less 1. The scale of attention follows `query_pre_attn_scalar`, for which a GGUF file has no key: it
is the head size, but in the largest model (27B), where it is the hidden size by the number of heads.
"""

from __future__ import annotations

import math

from paceline.files.json_fields import JsonFields
from paceline.models.families import gguf_keys, hf
from paceline.models.families.family import Family
from paceline.models.spec import GELU_TANH, SANDWICH, ModelConfig

NAMES = {
    "self_attn.output_norm": "post_attention_layernorm",
    "post_attention_layernorm": "pre_feedforward_layernorm",
    "mlp.output_norm": "post_feedforward_layernorm",
}
GGUF_NAMES = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
HONOURS = ("attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar")
LAYERS_OF_LARGEST = 46
PERIOD = 2  # layers: the last of each has no window


def from_hf(fields: JsonFields, model: ModelConfig) -> ModelConfig:
    model = gemma(model, 1 / math.sqrt(fields.number("query_pre_attn_scalar", 256)))
    bias = fields.flag("attention_bias")
    model = model.with_layers(softcap=fields.amount("attn_logit_softcapping"), qkv_bias=bias, output_bias=bias)
    slides = hf.sliding_layers(fields, model.num_layers) or hf.periodic(model.num_layers, PERIOD)
    model = hf.with_windows(fields, model, slides, fields.values.get("sliding_window", 4096))
    return model.replaced(logit_softcap=fields.amount("final_logit_softcapping"))


def from_gguf(fields: JsonFields, model: ModelConfig) -> ModelConfig:
    model = gemma(model, gguf_scale(model, LAYERS_OF_LARGEST))
    model = model.with_layers(softcap=fields.amount("attn_logit_softcapping"))
    slides = gguf_keys.sliding_layers(fields, model.num_layers, PERIOD)
    model = hf.with_windows(fields, model, slides, fields.integer("attention.sliding_window", 4096))
    return model.replaced(logit_softcap=fields.amount("final_logit_softcapping"))


def gemma(model: ModelConfig, scale: float) -> ModelConfig:
    """Return the model with what all Gemmas have."""
    model = model.with_layers(norms=SANDWICH, activation=GELU_TANH, scale=scale)
    return model.replaced(embed_scale=math.sqrt(model.hidden_size))


def gguf_scale(model: ModelConfig, layers_of_largest: int) -> float:
    largest = model.num_layers == layers_of_largest
    return 1 / math.sqrt(model.hidden_size // model.layer.heads if largest else model.layer.head_dim)


FAMILY = Family(
    name="gemma2",
    classes=("Gemma2ForCausalLM",),
    defaults={"head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True},
    honours=HONOURS,
    from_hf=from_hf,
    gguf="gemma2",
    from_gguf=from_gguf,
    names=NAMES,
    gguf_names=GGUF_NAMES,
    norms_less_one=True,
)
