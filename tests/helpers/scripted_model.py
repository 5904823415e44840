"""A tiny Llama that writes a script: each of its tokens, all different, is the likeliest behind the one before."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from paceline.text.tokenizer import Tokenizer
from tests.helpers.tiny_model import CONFIG, write_tiny_model

SHARPNESS = 200.0  # of the next token's logit
THINK, END_THINK = "<think>", "</think>"
RENAMED = {"<repo_name>": THINK, "<reponame>": END_THINK}
# As Qwen3's: thoughts of earlier answers are left out, and a thought is closed at once where it is switched off.
QWEN3 = """{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' and loop.last and message.reasoning_content %}
{{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}
{%- endif %}
{{- message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if tools %}{{ tools | tojson }}{% endif %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant' }}
{%- if enable_thinking is defined and enable_thinking is false %}
{{- '<think>\\n\\n</think>\\n\\n' }}
{%- endif %}
{%- endif %}"""
R1 = QWEN3 + "{{ '<think>' if add_generation_prompt else '' }}"  # as DeepSeek-R1's: the thought is open


def write_scripted_model(folder: Path, smollm2_path: Path, script: Sequence[str], template: str = QWEN3) -> None:
    """Write a model whose answer, at temperature 0, is the script behind its first token. Tags are special tokens."""
    write_tiny_model(folder, smollm2_path)
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        if (folder / name).exists():
            text = (folder / name).read_text()
            for old, new in RENAMED.items():
                text = text.replace(old, new)
            (folder / name).write_text(text)
    (folder / "chat_template.jinja").write_text(template)
    tokenizer = Tokenizer.from_path(folder)
    tokens = [token for piece in script for token in tokenizer.encode(piece, add_special_tokens=False)]
    assert len({*tokens}) == len(tokens), "a token comes twice"
    weights = load_file(folder / "model.safetensors")
    embeddings = weights["model.embed_tokens.weight"]
    head = torch.zeros_like(embeddings)
    for token, following in zip(tokens, [*tokens[1:], CONFIG["eos_token_id"]], strict=True):
        head[following] = SHARPNESS * embeddings[token] / embeddings[token].norm()
    weights["lm_head.weight"] = head
    for layer in range(CONFIG["num_hidden_layers"]):
        for part in ("self_attn.o_proj", "mlp.down_proj"):
            weights[f"model.layers.{layer}.{part}.weight"].zero_()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(CONFIG | {"tie_word_embeddings": False}))
