"""EXAONE 4: norms of what is added to the stream, norms of each head of q and k; where some layers have a window, the
others have no positions."""

from __future__ import annotations

from paceline.files.json_fields import JsonFields
from paceline.models.families import gguf_keys, hf
from paceline.models.families.family import OUTPUT_NORMS, Family
from paceline.models.families.smollm3 import without_positions
from paceline.models.spec import HEAD, POST, ModelConfig

PERIOD = 4  # layers: the last of each has no window


def from_hf(fields: JsonFields, model: ModelConfig) -> ModelConfig:
    window = fields.values.get("sliding_window")
    slides = hf.sliding_layers(fields, model.num_layers)
    if slides is None:
        slides = hf.periodic(model.num_layers, fields.integer("sliding_window_pattern", PERIOD))
    return exaone(fields, model, slides, window)


def from_gguf(fields: JsonFields, model: ModelConfig) -> ModelConfig:
    window = fields.integer("attention.sliding_window", 0, least=0)
    return exaone(fields, model, gguf_keys.sliding_layers(fields, model.num_layers, PERIOD), window or None)


def exaone(fields: JsonFields, model: ModelConfig, slides: list[bool], window: object) -> ModelConfig:
    model = model.with_layers(norms=POST, qk_norm=HEAD)
    if window is None:
        return model
    model = hf.with_windows(fields, model, slides, window)
    return without_positions(model, [not one for one in slides])


FAMILY = Family(
    name="exaone4",
    classes=("Exaone4ForCausalLM",),
    from_hf=from_hf,
    gguf="exaone4",
    from_gguf=from_gguf,
    names=OUTPUT_NORMS,
    gguf_names={"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"},
)
