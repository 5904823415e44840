"""Llama 2 and 3, and models that were published under its name: SmolLM2, R1's distillations."""

from __future__ import annotations

from paceline.files.json_fields import JsonFields
from paceline.models.families.family import Family
from paceline.models.spec import ModelConfig


def from_hf(fields: JsonFields, model: ModelConfig) -> ModelConfig:
    bias = fields.flag("attention_bias")
    return model.with_layers(qkv_bias=bias, output_bias=bias, mlp_bias=fields.flag("mlp_bias"))


FAMILY = Family(
    name="llama",
    classes=("LlamaForCausalLM",),
    from_hf=from_hf,
    gguf="llama",
    gguf_has_neighbours=True,
)
