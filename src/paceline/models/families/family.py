"""The declaration of a model family: how its config, its tensors and its GGUF file differ from Llama's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline.files.json_fields import JsonFields
from paceline.models.spec import ModelConfig

Change = Callable[[JsonFields, ModelConfig], ModelConfig]

QKV: dict[str, tuple[str, ...]] = {"self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")}
GATE_UP: dict[str, tuple[str, ...]] = {"mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj")}
OUTPUT_NORMS = {  # this package's names of norms of a half's output, and those of most families
    "self_attn.output_norm": "post_attention_layernorm",
    "mlp.output_norm": "post_feedforward_layernorm",
}


def unchanged(fields: JsonFields, model: ModelConfig) -> ModelConfig:
    return model


@dataclass(frozen=True, kw_only=True)
class Family:
    """All names of tensors are those of a layer's, without `model.layers.N` and without `.weight`."""

    name: str
    classes: tuple[str, ...]  # in `architectures` of config.json
    wrappers: tuple[str, ...] = ()  # multimodal classes whose `text_config` is of this family
    model_types: tuple[str, ...] = ()  # beside `name`, in a config without `architectures` or a `text_config`
    defaults: Mapping[str, Any] = field(default_factory=dict)  # of keys that published configs leave out
    honours: tuple[str, ...] = ()  # keys that other families refuse; see hf.NEUTRAL and gguf_keys.NEUTRAL
    from_hf: Change = unchanged  # a config of Llama's keys -> the family's
    gguf: str | None = None  # `general.architecture`
    from_gguf: Change = unchanged
    names: Mapping[str, str] = field(default_factory=dict)  # ours -> Hugging Face's, where they differ
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # Hugging Face's -> ours, one behind the other
    gguf_names: Mapping[str, str] = field(default_factory=dict)  # llama.cpp's -> Hugging Face's, where they differ
    has_neighbours: bool = False  # rotary pairs are neighbours in a folder; else dimensions i and half + i
    gguf_has_neighbours: bool = False  # the same of a GGUF file
    norms_less_one: bool = False  # norms of a folder are stored less 1 (never in GGUF)

    @property
    def is_plain(self) -> bool:
        """Return whether a folder holds the decoder's tensors as they are."""
        return not (self.names or self.fused or self.has_neighbours or self.norms_less_one or self.wrappers)
