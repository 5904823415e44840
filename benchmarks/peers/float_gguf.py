"""A writer of a model folder as a GGUF file in float32, so that llama.cpp computes with the others' weights.

No vocabulary goes with it: peers are given token ids and give token ids back.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from paceline.errors import UnsupportedModel
from paceline.files.gguf import import_gguf
from paceline.models.load.convert import WRITTEN
from paceline.models.load.gguf_model import LAYER_NAMES, TOP_NAMES
from paceline.models.load.loader import load_config, load_weights
from paceline.models.spec import ModelConfig

LAYER_OF = {ours: theirs for theirs, ours in LAYER_NAMES.items()}
TOP_OF = {ours: theirs for theirs, ours in TOP_NAMES.items()}


def write_float_gguf(folder: Path, path: Path) -> None:
    config = load_config(folder)
    if config.architecture not in WRITTEN or config.layer.rope.kind != "default" or config.windows:
        raise UnsupportedModel(
            f"{folder} cannot be written as GGUF here: only {', '.join(WRITTEN)} without RoPE scaling or sliding "
            "windows; name a GGUF file made by llama.cpp with --gguf"
        )
    partial = path.with_suffix(".partial")
    writer = import_gguf().GGUFWriter(partial, config.architecture)
    _write_config(writer, config)
    for name, weight in load_weights(folder, config).items():
        writer.add_tensor(gguf_name(name), gguf_values(name, weight.numbers(), config))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    partial.rename(path)


def _write_config(writer: Any, config: ModelConfig) -> None:
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_positions)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.layer.inner)
    writer.add_head_count(config.layer.heads)
    writer.add_head_count_kv(config.layer.kv_heads)
    writer.add_key_length(config.layer.head_dim)
    writer.add_value_length(config.layer.head_dim)
    writer.add_rope_dimension_count(config.layer.head_dim)
    writer.add_rope_freq_base(config.layer.rope.theta)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("none")


def gguf_name(name: str) -> str:
    if name in TOP_OF:
        return TOP_OF[name]
    _, _, layer, rest = name.split(".", 3)  # model.layers.3.mlp.up_proj.weight
    part, _, kind = rest.rpartition(".")
    return f"blk.{layer}.{LAYER_OF[part]}.{kind}"


def gguf_values(name: str, tensor: torch.Tensor, config: ModelConfig) -> npt.NDArray[np.float32]:
    values = tensor.to(torch.float32).numpy()
    if config.architecture == "llama" and ".q_proj." in name:
        return interleave(values, config.layer.heads)
    if config.architecture == "llama" and ".k_proj." in name:
        return interleave(values, config.layer.kv_heads)
    return values


def interleave(values: npt.NDArray[np.float32], num_heads: int) -> npt.NDArray[np.float32]:
    """Rows of each head from (x0 x1 ... y0 y1 ...) to (x0 y0 x1 y1 ...), as llama.cpp's rotary kernel wants them."""
    half = values.shape[0] // num_heads // 2
    halves = values.reshape(num_heads, 2, half, *values.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)
