"""Command R7B and A (Cohere2): both halves read one norm, which subtracts the mean; positions in layers with a window
only, pairs side by side."""

from __future__ import annotations

from paceline.files.json_fields import JsonFields
from paceline.models.families import gguf_keys, hf
from paceline.models.families.family import Family
from paceline.models.families.smollm3 import without_positions
from paceline.models.spec import PARALLEL, ModelConfig

PERIOD = 4  # layers: the last of each has no window


def from_hf(fields: JsonFields, model: ModelConfig) -> ModelConfig:
    bias = fields.flag("attention_bias")
    slides = hf.sliding_layers(fields, model.num_layers)
    if slides is None:
        slides = hf.periodic(model.num_layers, fields.integer("sliding_window_pattern", PERIOD))
    model = model.with_layers(qkv_bias=bias, output_bias=bias)
    window = fields.values.get("sliding_window", 4096)
    return cohere(fields, model, slides, window, fields.number("logit_scale", 0.0625))


def from_gguf(fields: JsonFields, model: ModelConfig) -> ModelConfig:
    slides = gguf_keys.sliding_layers(fields, model.num_layers, PERIOD)
    return cohere(fields, model, slides, fields.integer("attention.sliding_window"), fields.number("logit_scale"))


def cohere(
    fields: JsonFields, model: ModelConfig, slides: list[bool], window: object, logit_scale: float
) -> ModelConfig:
    model = hf.with_windows(fields, model.with_layers(norms=PARALLEL), slides, window)
    model = without_positions(model, [not one for one in slides])
    return model.replaced(mean_centred=True, logit_scale=logit_scale)


FAMILY = Family(
    name="cohere2",
    classes=("Cohere2ForCausalLM",),
    defaults={"tie_word_embeddings": True},
    honours=("logit_scale", "layer_norm_eps"),
    from_hf=from_hf,
    gguf="cohere2",
    from_gguf=from_gguf,
    has_neighbours=True,
    gguf_has_neighbours=True,
)
