"""Mistral 7B and Small before 3.1: Llama with a sliding window in every layer."""

from __future__ import annotations

from paceline.errors import UnsupportedModel
from paceline.files.json_fields import JsonFields
from paceline.models.families import hf
from paceline.models.families.family import Family
from paceline.models.spec import ModelConfig

WINDOW = 4096  # transformers' default when the key is absent


def from_hf(fields: JsonFields, model: ModelConfig) -> ModelConfig:
    window = fields.values.get("sliding_window", WINDOW)
    sliding = hf.sliding_layers(fields, model.num_layers)
    if sliding is not None and sliding != [window is not None] * model.num_layers:
        raise UnsupportedModel(f"{fields.source}: a Mistral model whose layer_types differ is not supported")
    return model if window is None else model.with_layers(window=hf.checked_window(fields, window))


FAMILY = Family(name="mistral", classes=("MistralForCausalLM",), from_hf=from_hf)
