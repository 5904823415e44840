"""Tiny random models of every supported architecture, written by transformers, with logits sharp enough to tell."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}  # whole blocks of 32, as quantised weights have
COMMON: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
TINY: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "llama3-untied": ("Llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": False, "head_dim": 16}),
    "llama-linear-bias": (
        "Llama",
        {
            "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0},
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
    "llama-yarn": ("Llama", {"rope_parameters": YARN, "num_hidden_layers": 2}),
    "mistral-window": ("Mistral", {"sliding_window": 16, "head_dim": 24}),
    "qwen2": ("Qwen2", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 32, "num_key_value_heads": 3}),
}


def save_tiny(name: str, folder: Path, dtype: torch.dtype = torch.float32, **more: Any) -> Any:
    """Write the model to `folder` with a small tokenizer, and return it for use as an oracle."""
    family, changes = TINY[name]
    config = getattr(transformers, f"{family}Config")(**{**COMMON, **changes, **more})
    torch.manual_seed(5)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.mul_(10.0)  # transformers' initial 0.02 leaves the logits flat
            elif "norm" in parameter_name:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(std=0.3)
    model.to(dtype).eval()
    model.save_pretrained(folder)
    write_tokenizer(folder, config.vocab_size)
    return model


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocab = {f"w{token}": token for token in range(vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
