"""The frozen target in plain torch: hidden states of packed rows, for training only.

Rows are packed: several sequences share one, each with its own positions, and attention stays inside a sequence. One
compiled function serves every layer, so that compiling takes seconds whatever the depth.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from paceline.models.load.loader import load_config, load_weights
from paceline.models.rope import rope_tables
from paceline.models.spec import ModelConfig

Rotary = tuple[Tensor, Tensor]  # cos and sin, (B, N, head_dim / 2)


class Hidden(NamedTuple):
    taps: Tensor  # (B, L, T, H) residual stream entering the tapped layers
    final: Tensor  # (B, L, H) after the final norm: the head's input


class LayerWeights(NamedTuple):
    input_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    output: Tensor
    output_bias: Tensor | None
    mlp_norm: Tensor
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None


class FrozenTarget:
    def __init__(self, path: Path, device: torch.device, dtype: torch.dtype, *, compiled: bool = False) -> None:
        self.path, self.device, self.dtype = path, device, dtype
        self.config: ModelConfig = load_config(path)
        config, weights = self.config, load_weights(path, self.config)

        def tensor(name: str) -> Tensor:
            return weights[name].numbers().to(device=device, dtype=dtype)

        self.embedding = tensor("model.embed_tokens.weight")
        self.head = self.embedding if config.tie_embeddings else tensor("lm_head.weight")
        self.norm = tensor("model.norm.weight")
        self.layers = [layer_weights(weights, tensor, index) for index in range(config.num_layers)]
        tables = rope_tables(config.rope, config.head_dim, min(config.max_positions, 1 << 15), device)
        self._tables: Rotary = tables
        self._compiled = torch.compile(run_layer, dynamic=False) if compiled else run_layer

    @torch.no_grad()
    def __call__(
        self, tokens: Tensor, segments: Tensor, positions: Tensor, taps: tuple[int, ...], *, compiled: bool = True
    ) -> Hidden:
        """(B, L) each; `segments` number the sequences of a row. `compiled`: False for shapes that occur once."""
        config, layer = self.config, self._compiled if compiled else run_layer
        rotary = self.rotary(positions)
        masks = {window: self._mask(segments, window) for window in set(config.windows or (None,))}
        hidden = self.embedding[tokens]
        tapped = []
        for index, weights in enumerate(self.layers):
            if index in taps:
                tapped.append((index, hidden))
            mask = masks[config.window(index)]
            hidden = layer(hidden, rotary, mask, weights, config.num_kv_heads, config.rms_norm_eps)
        if config.num_layers in taps:
            tapped.append((config.num_layers, hidden))
        found = dict(tapped)
        stacked = torch.stack([found[tap] for tap in taps], 2) if taps else hidden[:, :, None, :0]
        return Hidden(stacked, rms_norm(hidden, self.norm, config.rms_norm_eps))

    def rotary(self, positions: Tensor) -> Rotary:
        cos, sin = self._tables
        return cos[positions], sin[positions]

    def _mask(self, segments: Tensor, window: int | None) -> Tensor:
        """(B, 1, L, L), added to the scores: causal, inside one sequence."""
        at = torch.arange(segments.shape[1], device=segments.device)
        seen = (segments[:, :, None] == segments[:, None, :]) & (at[:, None] >= at)
        if window is not None:
            seen &= at[:, None] - at < window
        return additive(seen[:, None], self.dtype)


PARTS = {  # fields of LayerWeights, and the names of their parts in a checkpoint
    "input_norm": ("input_layernorm",),
    "mlp_norm": ("post_attention_layernorm",),
    "q_norm": ("self_attn.q_norm",),
    "k_norm": ("self_attn.k_norm",),
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "output": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}


def layer_weights(known: Container[str], tensor: Callable[[str], Tensor], index: int) -> LayerWeights:
    """Of a layer, by the `known` names of a checkpoint; parts that are one product are joined."""

    def joined(field: str, kind: str) -> Any:
        names = [f"model.layers.{index}.{part}.{kind}" for part in PARTS[field]]
        return torch.cat([tensor(name) for name in names]) if names[0] in known else None

    biases = [field for field in LayerWeights._fields if field.endswith("_bias")]
    found = {field: joined(field, "weight") for field in PARTS}
    return LayerWeights(**found, **{field: joined(field.removesuffix("_bias"), "bias") for field in biases})


def run_layer(x: Tensor, rotary: Rotary, mask: Tensor, w: LayerWeights, kv_heads: int, eps: float) -> Tensor:
    """One decoder layer over (B, L, H)."""
    head_dim = 2 * rotary[0].shape[-1]
    q_size = w.qkv.shape[0] - 2 * kv_heads * head_dim
    qkv = F.linear(rms_norm(x, w.input_norm, eps), w.qkv, w.qkv_bias)
    q, k, v = (heads(part, head_dim) for part in torch.split(qkv, [q_size, *[kv_heads * head_dim] * 2], -1))
    if w.q_norm is not None and w.k_norm is not None:
        q, k = rms_norm(q, w.q_norm, eps), rms_norm(k, w.k_norm, eps)
    mixed = attention(rotated(q, rotary), rotated(k, rotary), v, mask)
    x = x + F.linear(mixed, w.output, w.output_bias)
    gate, up = F.linear(rms_norm(x, w.mlp_norm, eps), w.gate_up, w.gate_up_bias).chunk(2, -1)
    return x + F.linear(F.silu(gate) * up, w.down, w.down_bias)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


def heads(x: Tensor, head_dim: int) -> Tensor:
    """(B, N, heads * d) -> (B, heads, N, d)"""
    return x.view(*x.shape[:-1], -1, head_dim).transpose(1, 2)


def rotated(x: Tensor, rotary: Rotary) -> Tensor:
    """(B, heads, N, d)"""
    cos, sin = rotary[0][:, None], rotary[1][:, None]
    first, second = x.float().chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """(B, heads, N, d) each, of which k and v may have fewer heads -> (B, N, heads * d)"""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=1 / math.sqrt(q.shape[-1]))
    return mixed.transpose(1, 2).flatten(2)


def additive(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where seen, else -inf: converted once, not in every layer."""
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, -math.inf)


def positions_of(segments: Tensor) -> Tensor:
    """(B, L): a token's place in its own sequence, from the row's segment numbers."""
    at = torch.arange(segments.shape[1], device=segments.device).expand_as(segments)
    starts = torch.ones_like(segments, dtype=torch.bool)
    starts[:, 1:] = segments[:, 1:] != segments[:, :-1]
    return at - torch.where(starts, at, 0).cummax(1).values
