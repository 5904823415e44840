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
SLIDING = ["sliding_attention", "full_attention", "sliding_attention"]
FULL = ["full_attention"] * 3
GEMMA = {"head_dim": 24, "query_pre_attn_scalar": 30, "sliding_window": 16}
TWO_ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
    "full_attention": {"rope_type": "linear", "rope_theta": 50000.0, "factor": 2.0},
}
MINISTRAL = YARN | {"original_max_position_embeddings": 128, "factor": 2.0, "mscale": 1.0, "mscale_all_dim": 1.0}
MINISTRAL |= {"llama_4_scaling_beta": 0.1, "max_position_embeddings": 256}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0 + i / 10 for i in range(6)],
    "long_factor": [2.0 + i for i in range(6)],
    "original_max_position_embeddings": 32,
}
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
    "gemma2": ("Gemma2", GEMMA | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 6.0}),
    "gemma3": ("Gemma3", GEMMA | {"layer_types": SLIDING, "rope_parameters": TWO_ROPES}),
    "ministral3": ("Ministral3", {"head_dim": 16, "rope_parameters": MINISTRAL, "sliding_window": 40}),
    "phi3": ("Phi3", {"sliding_window": 40}),
    "phi4-mini": (
        "Phi3",
        {"rope_parameters": LONGROPE, "original_max_position_embeddings": 32, "hidden_size": 96},
    ),
    "granite": (
        "Granite",
        {"embedding_multiplier": 6.0, "residual_multiplier": 0.3, "attention_multiplier": 0.2, "logits_scaling": 0.125},
    ),
    "smollm3": ("SmolLM3", {"no_rope_layers": [1, 1, 1, 0], "num_hidden_layers": 4}),
    "olmo2": ("Olmo2", {"tie_word_embeddings": False}),
    "olmo3": ("Olmo3", {"sliding_window": 16, "layer_types": SLIDING, "rope_parameters": TWO_ROPES}),
    "glm4": ("Glm4", {"head_dim": 16, "attention_bias": True}),
    "cohere2": ("Cohere2", {"head_dim": 16, "logit_scale": 1.5, "sliding_window": 16, "layer_types": SLIDING}),
    "exaone4": ("Exaone4", {"sliding_window": 16, "layer_types": SLIDING}),
    "exaone4-full": ("Exaone4", {"sliding_window": None, "layer_types": FULL}),
    "seed-oss": ("SeedOss", {"head_dim": 16, "attention_out_bias": True}),
    "ernie": ("Ernie4_5", {"head_dim": 16}),
}
IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}  # some families' own are outside the vocabulary
CLASSES = {"Gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM")}  # whose config is not named as its model
LESS_ONE = ("Gemma2", "Gemma3")  # families that store norms less 1


def save_tiny(name: str, folder: Path, dtype: torch.dtype = torch.float32, **more: Any) -> Any:
    """Write the model to `folder` with a small tokenizer, and return it for use as an oracle."""
    family, changes = TINY[name]
    kinds = CLASSES.get(family, (f"{family}Config", f"{family}ForCausalLM"))
    config = getattr(transformers, kinds[0])(**{**COMMON, **IDS, **changes, **more})
    config._attn_implementation = "eager"  # the one that caps scores
    torch.manual_seed(5)
    model = getattr(transformers, kinds[1])(config)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.mul_(10.0)  # transformers' initial 0.02 leaves the logits flat
            elif "norm" in parameter_name:
                parameter.uniform_(0.5, 1.5).sub_(float(family in LESS_ONE))
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
