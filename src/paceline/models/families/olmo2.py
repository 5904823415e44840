"""OLMo 2 and 3: norms of what is added to the stream, none before; q and k normed whole; windows in OLMo 3, whose other
layers alone scale their rotation."""

from __future__ import annotations

from dataclasses import replace

from paceline.files.json_fields import JsonFields
from paceline.models.families import gguf_keys, hf
from paceline.models.families.family import OUTPUT_NORMS, Family
from paceline.models.spec import POST, WHOLE, ModelConfig, RopeConfig

PERIOD = 4  # layers: the last of each has no window


def from_hf(fields: JsonFields, model: ModelConfig) -> ModelConfig:
    bias = fields.flag("attention_bias")
    model = model.with_layers(norms=POST, qk_norm=WHOLE, qkv_bias=bias, output_bias=bias)
    window = fields.values.get("sliding_window")
    if window is None:
        return model
    slides = hf.sliding_layers(fields, model.num_layers) or hf.periodic(model.num_layers, PERIOD)
    plain = RopeConfig(theta=model.layer.rope.theta)
    local = hf.rope(fields, "sliding_attention") if hf.has_rope_by_layer(fields) else plain
    return windowed(fields, model, slides, window, local)


def from_gguf(fields: JsonFields, model: ModelConfig) -> ModelConfig:
    model = model.with_layers(norms=POST, qk_norm=WHOLE)
    window = fields.integer("attention.sliding_window", 0, least=0)
    if not window:
        return model
    local = RopeConfig(theta=fields.number("rope.freq_base_swa", model.layer.rope.theta))
    return windowed(fields, model, gguf_keys.sliding_layers(fields, model.num_layers, PERIOD), window, local)


def windowed(
    fields: JsonFields, model: ModelConfig, slides: list[bool], window: object, local: RopeConfig
) -> ModelConfig:
    model = hf.with_windows(fields, model, slides, window)
    layers = (replace(one, rope=local) if slides[at] else one for at, one in enumerate(model.layers))
    return model.replaced(layers=tuple(layers))


FAMILY = Family(
    name="olmo2",
    classes=("Olmo2ForCausalLM", "Olmo3ForCausalLM"),
    model_types=("olmo3",),
    honours=("rope_by_layer",),
    from_hf=from_hf,
    gguf="olmo2",
    from_gguf=from_gguf,
    names=OUTPUT_NORMS,
    gguf_names={"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"},
)
