"""ERNIE 4.5, dense: Llama with rotary pairs side by side."""

from __future__ import annotations

from paceline.files.json_fields import JsonFields
from paceline.models.families.family import Family
from paceline.models.spec import ModelConfig


def from_hf(fields: JsonFields, model: ModelConfig) -> ModelConfig:
    bias = fields.flag("use_bias")
    return model.with_layers(qkv_bias=bias, output_bias=bias, mlp_bias=bias)


FAMILY = Family(
    name="ernie4_5",
    classes=("Ernie4_5ForCausalLM",),
    defaults={"rope_theta": 500_000.0, "head_dim": 128, "tie_word_embeddings": True},
    from_hf=from_hf,
    gguf="ernie4_5",
    has_neighbours=True,
    gguf_has_neighbours=True,
)
