"""Seed-OSS: Llama with biases of q, k and v, and of the output apart."""

from __future__ import annotations

from paceline.files.json_fields import JsonFields
from paceline.models.families.family import Family
from paceline.models.spec import ModelConfig


def from_hf(fields: JsonFields, model: ModelConfig) -> ModelConfig:
    return model.with_layers(
        qkv_bias=fields.flag("attention_bias", True),
        output_bias=fields.flag("attention_out_bias"),
        mlp_bias=fields.flag("mlp_bias"),
    )


FAMILY = Family(
    name="seed_oss",
    classes=("SeedOssForCausalLM",),
    defaults={"head_dim": 128},
    from_hf=from_hf,
    gguf="seed_oss",
    gguf_names={"post_attention_norm": "post_attention_layernorm"},
)
