"""A tiny random Llama with smollm2's tokenizer, for tests that start a process."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "torch_dtype": "float32",
}


def write_tiny_model(folder: Path, smollm2_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json"):
        if (smollm2_path / name).exists():
            shutil.copy(smollm2_path / name, folder / name)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    noise, hidden, inner = torch.Generator().manual_seed(0), CONFIG["hidden_size"], CONFIG["intermediate_size"]
    shapes = {"model.embed_tokens": (CONFIG["vocab_size"], hidden)}
    for layer in range(CONFIG["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        shapes |= {
            f"{at}.self_attn.{part}_proj": (rows, hidden) for part, rows in zip("qkvo", (32, 16, 16, 32), strict=True)
        }
        shapes |= {f"{at}.mlp.{part}_proj": (inner, hidden) for part in ("gate", "up")}
        shapes |= {f"{at}.mlp.down_proj": (hidden, inner)}
    weights = {f"{name}.weight": torch.randn(shape, generator=noise) * 0.3 for name, shape in shapes.items()}
    norms = [
        f"model.layers.{layer}.{norm}" for layer in range(2) for norm in ("input_layernorm", "post_attention_layernorm")
    ]
    weights |= {f"{name}.weight": torch.ones(hidden) for name in (*norms, "model.norm")}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
