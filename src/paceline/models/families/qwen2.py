"""Qwen 2 and 2.5: biases of q, k and v; sliding windows in the upper layers, if any. MiMo-7B has these
layers, and a head for multi-token prediction that drafts (drafters/mtp)."""

from __future__ import annotations

from paceline.errors import BrokenModel
from paceline.files.json_fields import JsonFields
from paceline.models.families import hf
from paceline.models.families.family import Family
from paceline.models.spec import ModelConfig

WINDOW, FULL_LAYERS = 4096, 28  # transformers' defaults


def from_hf(fields: JsonFields, model: ModelConfig) -> ModelConfig:
    return windowed(fields, model.with_layers(qkv_bias=True))


def windowed(fields: JsonFields, model: ModelConfig) -> ModelConfig:
    """Return the model with the windows of its upper layers."""
    window = fields.values.get("sliding_window", WINDOW) if fields.flag("use_sliding_window") else None
    first = fields.values.get("max_window_layers", FULL_LAYERS)
    if not isinstance(first, int):
        raise BrokenModel(f"{fields.source}: max_window_layers must be an integer, found {first!r}")
    slides = hf.sliding_layers(fields, model.num_layers)
    if slides is None:
        slides = [window is not None and layer >= first for layer in range(model.num_layers)]
    return hf.with_windows(fields, model, slides, window)


FAMILY = Family(
    name="qwen2",
    classes=("Qwen2ForCausalLM", "MiMoForCausalLM"),
    model_types=("mimo",),
    from_hf=from_hf,
    gguf="qwen2",
)
