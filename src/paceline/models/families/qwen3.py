"""Qwen 3, dense: norms of each head of q and k."""

from __future__ import annotations

from paceline.files.json_fields import JsonFields
from paceline.models.families.family import Family
from paceline.models.families.qwen2 import windowed
from paceline.models.spec import HEAD, ModelConfig


def from_hf(fields: JsonFields, model: ModelConfig) -> ModelConfig:
    bias = fields.flag("attention_bias")
    return windowed(fields, model.with_layers(qk_norm=HEAD, qkv_bias=bias, output_bias=bias))


FAMILY = Family(name="qwen3", classes=("Qwen3ForCausalLM",), defaults={"head_dim": 128}, from_hf=from_hf, gguf="qwen3")
