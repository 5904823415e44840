"""A GGUF file as a Hugging Face model: its config, and its tensors under their Hugging Face names."""

from __future__ import annotations

import re

import torch

from paceline.errors import BrokenModel, UnsupportedModel
from paceline.files.gguf import GGUFFile
from paceline.models.families import FAMILIES, by_gguf, gguf_keys, nearest
from paceline.models.families.gguf_keys import LONG_DIVISORS, ROPE_DIVISORS, SHORT_DIVISORS
from paceline.models.quant.block_file import checked_blocks
from paceline.models.spec import ModelConfig
from paceline.models.weights import BLOCKS, StoredWeight, WeightKind
from paceline.text.gguf_vocab import check_tokenizer_fields

TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
KINDS = {"F32": WeightKind.FLOAT32, "F16": WeightKind.FLOAT16, "BF16": WeightKind.BFLOAT16} | {
    kind.name: kind for kind in BLOCKS
}
LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


def gguf_config(file: GGUFFile) -> ModelConfig:
    source, architecture = str(file.path), file.metadata.get("general.architecture")
    family = by_gguf(architecture)
    if family is None:
        known = [family.gguf for family in FAMILIES if family.gguf]
        raise UnsupportedModel(
            f"{source}: architecture {architecture!r} is not supported; supported in GGUF: {', '.join(known)}"
            f"{nearest(str(architecture), known)}"
        )
    check_tokenizer_fields(file.metadata, source)
    return gguf_keys.read(file, family)


def gguf_names(file: GGUFFile) -> dict[str, str]:
    """Map Hugging Face names to names in the file; an unknown tensor keeps its name, which the loader refuses."""
    family = by_gguf(file.metadata.get("general.architecture"))
    layer_names = LAYER_NAMES | (dict(family.gguf_names) if family else {})
    names: dict[str, str] = {}
    for name in file.tensors:
        if name in (ROPE_DIVISORS, LONG_DIVISORS, SHORT_DIVISORS):  # read by gguf_config
            continue
        match = LAYER_TENSOR.fullmatch(name)
        hf_name = TOP_NAMES.get(name, name)
        if match and match[2] in layer_names:
            hf_name = f"model.layers.{match[1]}.{layer_names[match[2]]}.{match[3]}"
        if hf_name in names:
            raise BrokenModel(
                f"{file.path}: tensors {names[hf_name]} and {name} are one and the same; keep one of them"
            )
        names[hf_name] = name
    return names


def gguf_kind(file: GGUFFile, name: str) -> WeightKind:
    """Return the kind that a tensor has in memory: its own, or fp32 for blocks that no kernel reads."""
    return KINDS.get(file.type_name(name), WeightKind.FLOAT32)


def gguf_weight(file: GGUFFile, name: str) -> StoredWeight:
    kind = gguf_kind(file, name) if len(file.tensors[name].shape) == 2 else WeightKind.FLOAT32
    if not kind.is_blocks and kind is not WeightKind.BFLOAT16:
        return StoredWeight.of(torch.from_numpy(file.read(name)))
    data = torch.from_numpy(file.raw(name))
    if kind is WeightKind.BFLOAT16:
        return StoredWeight.of(data.view(torch.bfloat16))
    return checked_blocks(kind, data, f"{file.path}: tensor {name}")
