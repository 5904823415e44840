"""GLM-4 0414, dense: norms around both halves, half of each head rotated, pairs side by side."""

from __future__ import annotations

from paceline.files.json_fields import JsonFields
from paceline.models.families.family import GATE_UP, Family
from paceline.models.spec import SANDWICH, ModelConfig


def from_hf(fields: JsonFields, model: ModelConfig) -> ModelConfig:
    return model.with_layers(norms=SANDWICH, qkv_bias=fields.flag("attention_bias"))


def from_gguf(fields: JsonFields, model: ModelConfig) -> ModelConfig:
    return model.with_layers(norms=SANDWICH)


FAMILY = Family(
    name="glm4",
    classes=("Glm4ForCausalLM",),
    defaults={"partial_rotary_factor": 0.5, "head_dim": 128},
    honours=("partial_rotary_factor", "rope.dimension_count"),
    from_hf=from_hf,
    gguf="glm4",
    from_gguf=from_gguf,
    names={"self_attn.output_norm": "post_self_attn_layernorm", "mlp.output_norm": "post_mlp_layernorm"},
    fused=GATE_UP,
    gguf_names={
        "post_attention_norm": "post_self_attn_layernorm",
        "post_ffw_norm": "post_mlp_layernorm",
        "ffn_up": "mlp.gate_up_proj",
    },
    has_neighbours=True,
    gguf_has_neighbours=True,
)
