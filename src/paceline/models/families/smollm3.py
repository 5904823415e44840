"""SmolLM3: Llama with every fourth layer without positions."""

from __future__ import annotations

from dataclasses import replace

from paceline.errors import BrokenModel
from paceline.files.json_fields import JsonFields
from paceline.models.families import hf
from paceline.models.families.family import Family
from paceline.models.families.llama import from_hf as llama_from_hf
from paceline.models.spec import ModelConfig

INTERVAL = 4  # layers: the last of each has no positions


def from_hf(fields: JsonFields, model: ModelConfig) -> ModelConfig:
    has_rope = fields.values.get("no_rope_layers")  # 1: the layer has positions
    if has_rope is None:
        has_rope = hf.periodic(model.num_layers, fields.integer("no_rope_layer_interval", INTERVAL))
    if not isinstance(has_rope, list) or len(has_rope) != model.num_layers:
        raise BrokenModel(f"{fields.source}: no_rope_layers must have an entry for all {model.num_layers} layers")
    model = without_positions(llama_from_hf(fields, model), [not one for one in has_rope])
    window = fields.values.get("sliding_window") if fields.flag("use_sliding_window") else None
    slides = hf.sliding_layers(fields, model.num_layers) or [False] * model.num_layers
    return hf.with_windows(fields, model, slides if window is not None else [False] * model.num_layers, window)


def from_gguf(fields: JsonFields, model: ModelConfig) -> ModelConfig:
    return without_positions(model, [not one for one in hf.periodic(model.num_layers, INTERVAL)])


def without_positions(model: ModelConfig, chosen: list[bool]) -> ModelConfig:
    """Return the model without positions in the chosen layers."""
    return model.replaced(
        layers=tuple(
            replace(one, rope=replace(one.rope, dims=0)) if chosen[at] else one for at, one in enumerate(model.layers)
        )
    )


FAMILY = Family(
    name="smollm3",
    classes=("SmolLM3ForCausalLM",),
    defaults={"rope_theta": 2_000_000.0, "tie_word_embeddings": True},
    honours=("no_rope_layers",),
    from_hf=from_hf,
    gguf="smollm3",
    from_gguf=from_gguf,
    gguf_has_neighbours=True,
)
