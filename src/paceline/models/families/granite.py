"""Granite 3 and 4, dense: Llama with factors of embeddings, attention, residual stream and logits.

With x for the stream and m for the factor of what is added to it, y = x / m obeys y + f(norm(y)), as in Llama: a norm
does not see the factor, but for its epsilon, which becomes epsilon / m^2. So the kernels run y, and taps are m y.
"""

from __future__ import annotations

from paceline.files.json_fields import JsonFields
from paceline.models.families.family import Family
from paceline.models.families.llama import from_hf as llama_from_hf
from paceline.models.spec import ModelConfig


def from_hf(fields: JsonFields, model: ModelConfig) -> ModelConfig:
    return scaled(
        llama_from_hf(fields, model),
        embeddings=fields.number("embedding_multiplier", 1.0),
        stream=fields.number("residual_multiplier", 1.0),
        scores=fields.number("attention_multiplier", 1.0),
        logits=1 / fields.number("logits_scaling", 1.0),
    )


def from_gguf(fields: JsonFields, model: ModelConfig) -> ModelConfig:
    return scaled(
        model,
        embeddings=fields.number("embedding_scale", 1.0),
        stream=fields.number("residual_scale", 1.0),
        scores=fields.number("attention.scale", model.layer.scale),
        logits=1 / fields.number("logit_scale"),
    )


def scaled(model: ModelConfig, *, embeddings: float, stream: float, scores: float, logits: float) -> ModelConfig:
    return model.with_layers(scale=scores).replaced(
        embed_scale=embeddings / stream,
        stream_scale=stream,
        rms_norm_eps=model.rms_norm_eps / stream**2,
        logit_scale=logits,
    )


FAMILY = Family(
    name="granite",
    classes=("GraniteForCausalLM",),
    honours=(
        *("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling"),
        *("logit_scale", "embedding_scale", "residual_scale", "attention.scale"),
    ),
    from_hf=from_hf,
    gguf="granite",
    from_gguf=from_gguf,
    gguf_has_neighbours=True,
)
