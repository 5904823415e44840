"""Phi-3, Phi-4 and Phi-4-mini: fused products, a part of each head rotated, frequencies of its own for long contexts.

The divisors of the frequencies are those of the model's whole context, whatever the length of a prompt, as in vLLM: a
row's bits may not depend on its pass.
"""

from __future__ import annotations

from paceline.files.json_fields import JsonFields
from paceline.models.families import hf
from paceline.models.families.family import GATE_UP, QKV, Family
from paceline.models.spec import ModelConfig


def from_hf(fields: JsonFields, model: ModelConfig) -> ModelConfig:
    window = fields.values.get("sliding_window")
    return model if window is None else model.with_layers(window=hf.checked_window(fields, window))


def from_gguf(fields: JsonFields, model: ModelConfig) -> ModelConfig:
    window = fields.integer("attention.sliding_window", 0, least=0)
    return model.with_layers(window=window or None)


FAMILY = Family(
    name="phi3",
    classes=("Phi3ForCausalLM",),
    honours=("partial_rotary_factor", "longrope", "rope.dimension_count"),
    from_hf=from_hf,
    gguf="phi3",
    from_gguf=from_gguf,
    fused=QKV | GATE_UP,
    gguf_names={"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
)
