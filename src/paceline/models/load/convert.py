"""A GGUF file as a Hugging Face folder: its blocks unchanged, config and tokenizer, one tensor at a time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from paceline.errors import UnsupportedModel
from paceline.files.gguf import GGUFFile
from paceline.models.families import family_of
from paceline.models.families.hf import rope_scaling
from paceline.models.load.gguf_model import gguf_config, gguf_kind, gguf_names, gguf_weight
from paceline.models.load.placement import places
from paceline.models.load.store import PullProgress
from paceline.models.quant.block_file import BLOCK_WEIGHTS, write_blocks
from paceline.models.spec import ModelConfig
from paceline.text.gguf_vocab import tokenizer_files

WRITTEN = ("llama", "qwen2", "qwen3")  # families whose config.json this file writes


def convert_gguf(file: GGUFFile, folder: Path, progress: PullProgress) -> None:
    config = gguf_config(file)
    body, tokenizer_config = tokenizer_files(file.metadata, str(file.path))
    special = {"bos_token_id": config.bos_token_id, "eos_token_id": list(config.eos_token_ids)}
    _write_json(folder / "config.json", hf_config(config))
    _write_json(folder / "generation_config.json", {key: value for key, value in special.items() if value is not None})
    _write_json(folder / "tokenizer.json", body)
    _write_json(folder / "tokenizer_config.json", tokenizer_config)
    _write_weights(file, config, folder, progress)


def hf_config(config: ModelConfig) -> dict[str, Any]:
    """Return a config.json that transformers 4 and 5 read."""
    if config.architecture not in WRITTEN:
        raise UnsupportedModel(
            f"a GGUF file of a {config.architecture} model cannot become a folder; name the file itself"
        )
    raw: dict[str, Any] = {
        "architectures": [family_of(config.architecture).classes[0]],
        "model_type": config.architecture,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.layer.inner,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.layer.heads,
        "num_key_value_heads": config.layer.kv_heads,
        "head_dim": config.layer.head_dim,
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.layer.rope.theta,
        "tie_word_embeddings": config.tie_embeddings,
        "hidden_act": "silu",
        "torch_dtype": "float32",
        "bos_token_id": config.bos_token_id,
        "eos_token_id": list(config.eos_token_ids) if len(config.eos_token_ids) > 1 else _first(config.eos_token_ids),
    }
    if config.architecture != "qwen2":
        raw["attention_bias"] = config.layer.qkv_bias
    if config.architecture == "llama":
        raw["mlp_bias"] = config.layer.mlp_bias
    if config.layer.rope.kind != "default":
        raw["rope_scaling"] = rope_scaling(config.layer.rope)
    return raw


def _write_weights(file: GGUFFile, config: ModelConfig, folder: Path, progress: PullProgress) -> None:
    names, at = gguf_names(file), places(config, in_gguf=True)
    entries = [(name, gguf_kind(file, names[name]), file.tensors[names[name]].shape) for name in sorted(names)]
    name = BLOCK_WEIGHTS if any(kind.is_blocks for _, kind, _ in entries) else "model.safetensors"
    write_blocks(
        folder / name,
        entries,
        lambda name: at[name].of(gguf_weight(file, names[name]), file.tensors[names[name]].shape[0]),
        lambda done, total: progress("converting", done, total),
    )


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=None if path.name == "tokenizer.json" else 2), encoding="utf-8")


def _first(values: tuple[int, ...]) -> int | None:
    return values[0] if values else None
