"""Mistral Small 3.1 and later, Devstral, and Ministral 3: the text of a multimodal model.

Ministral 3 scales queries by 1 + beta ln(1 + floor(position / length)) behind its original length. Up to this length
the factor is 1, and the model is served up to there.
"""

from __future__ import annotations

from paceline.files.json_fields import JsonFields
from paceline.models.families import hf
from paceline.models.families.family import Family
from paceline.models.spec import ModelConfig


def from_hf(fields: JsonFields, model: ModelConfig) -> ModelConfig:
    window = fields.values.get("sliding_window")
    if window is not None:
        model = model.with_layers(window=hf.checked_window(fields, window))
    rope = fields.section("rope_parameters").values or fields.section("rope_scaling").values
    return unscaled(model) if rope.get("llama_4_scaling_beta") else model


def from_gguf(fields: JsonFields, model: ModelConfig) -> ModelConfig:
    return unscaled(model) if fields.values.get("attention.temperature_scale") else model


def unscaled(model: ModelConfig) -> ModelConfig:
    """Return the model with the positions whose queries are not scaled."""
    return model.replaced(max_positions=min(model.max_positions, model.layer.rope.original_max_positions))


FAMILY = Family(
    name="mistral3",
    classes=("Ministral3ForCausalLM",),
    wrappers=("Mistral3ForConditionalGeneration",),
    model_types=("ministral3",),
    honours=("attention.temperature_scale", "rope.scaling.yarn_log_multiplier"),
    from_hf=from_hf,
    gguf="mistral3",
    from_gguf=from_gguf,
    gguf_has_neighbours=True,
)
