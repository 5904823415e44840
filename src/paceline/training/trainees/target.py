"""The frozen target in plain torch, for training only, and the layer that every trainee shares with it.

Rows are packed: several sequences share one, each with its own positions, and attention stays inside a sequence. One
compiled function serves every layer, so that compiling takes seconds whatever the depth.
"""

from __future__ import annotations

import math
from collections.abc import Callable
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
    q: Tensor
    k: Tensor
    v: Tensor
    output: Tensor
    mlp_norm: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor
    input_norm: Tensor | None = None  # None: the layer's input is given
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    q_bias: Tensor | None = None
    k_bias: Tensor | None = None
    v_bias: Tensor | None = None
    output_bias: Tensor | None = None
    gate_bias: Tensor | None = None
    up_bias: Tensor | None = None
    down_bias: Tensor | None = None


NAMES = {  # fields of LayerWeights -> names in a checkpoint
    "input_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    **{part: f"self_attn.{part}_proj" for part in ("q", "k", "v")},
    "output": "self_attn.o_proj",
    **{part: f"mlp.{part}_proj" for part in ("gate", "up", "down")},
}


def layer_weights(tensor: Callable[[str], Tensor | None], prefix: str) -> LayerWeights:
    """Return the weights of a layer; `tensor` returns None for a name that the checkpoint lacks."""
    weights = {field: tensor(f"{prefix}.{name}.weight") for field, name in NAMES.items()}
    biases = [field.removesuffix("_bias") for field in LayerWeights._fields if field.endswith("_bias")]
    weights |= {f"{field}_bias": tensor(f"{prefix}.{NAMES[field]}.bias") for field in biases}
    return LayerWeights(**weights)  # type: ignore[arg-type]  # every layer has the parts without a default


def decoder_layer(
    x: Tensor,
    rotary: Rotary,
    mask: Tensor,
    w: LayerWeights,
    eps: float,
    dtype: torch.dtype,
    *,
    inputs: Tensor | None = None,
    keys: tuple[Tensor, ...] = (),
    values: tuple[Tensor, ...] = (),
) -> tuple[Tensor, Tensor, Tensor]:
    """Run a layer over (B, N, H); return its output and its own K and V.

    Products are computed in `dtype`. q, k and v are made from `inputs`, or from the normed x. `keys` and `values`
    are those of positions before x; `mask` is (B, 1, N, earlier positions + N).
    """
    head_dim = 2 * rotary[0].shape[-1]
    if inputs is None:
        assert w.input_norm is not None
        inputs = rms_norm(x, w.input_norm, eps).to(dtype)
    projections = ((w.q, w.q_bias), (w.k, w.k_bias), (w.v, w.v_bias))
    q, k, v = (heads(linear(inputs, weight, bias), head_dim) for weight, bias in projections)
    if w.q_norm is not None and w.k_norm is not None:
        q, k = rms_norm(q, w.q_norm, eps), rms_norm(k, w.k_norm, eps)
    k = rotated(k, rotary)
    mixed = attention(rotated(q, rotary), torch.cat((*keys, k), 2), torch.cat((*values, v), 2), mask)
    x = x + linear(mixed, w.output, w.output_bias)
    normed = rms_norm(x, w.mlp_norm, eps).to(dtype)
    gated = F.silu(linear(normed, w.gate, w.gate_bias)) * linear(normed, w.up, w.up_bias)
    return x + linear(gated, w.down, w.down_bias), k, v


class FrozenTarget:
    def __init__(self, path: Path, device: torch.device, dtype: torch.dtype, *, compiled: bool = False) -> None:
        self.path, self.device, self.dtype = path, device, dtype
        self.config: ModelConfig = load_config(path)
        config, weights = self.config, load_weights(path, self.config)

        def tensor(name: str) -> Any:
            return weights[name].numbers().to(device=device, dtype=dtype) if name in weights else None

        self.embedding: Tensor = tensor("model.embed_tokens.weight")
        self.head: Tensor = self.embedding if config.tie_embeddings else tensor("lm_head.weight")
        self.norm: Tensor = tensor("model.norm.weight")
        self.layers = [layer_weights(tensor, f"model.layers.{index}") for index in range(config.num_layers)]
        tables = rope_tables(config.layer.rope, config.layer.head_dim, min(config.max_positions, 1 << 15), device)
        self._tables: Rotary = tables
        self._compiled = torch.compile(decoder_layer, dynamic=False) if compiled else decoder_layer

    @staticmethod
    def for_training(path: Path, device: torch.device) -> FrozenTarget:
        on_gpu = device.type == "cuda"
        if on_gpu:
            torch.backends.cuda.enable_cudnn_sdp(False)  # its kernels with masks have been wrong before
        return FrozenTarget(path, device, torch.bfloat16 if on_gpu else torch.float32, compiled=on_gpu)

    @torch.no_grad()
    def __call__(
        self, tokens: Tensor, segments: Tensor, positions: Tensor, taps: tuple[int, ...], *, compiled: bool = True
    ) -> Hidden:
        """Return hidden states of (B, L) tokens; `segments` number the sequences of a row. `compiled`: False for shapes
        that occur once."""
        config, layer = self.config, self._compiled if compiled else decoder_layer
        rotary = self.rotary(positions)
        masks = {window: self._mask(segments, window) for window in set(config.windows or (None,))}
        hidden = self.embedding[tokens]
        tapped = []
        for index, weights in enumerate(self.layers):
            if index in taps:
                tapped.append((index, hidden))
            mask = masks[config.layers[index].window]
            hidden, _, _ = layer(hidden, rotary, mask, weights, config.rms_norm_eps, self.dtype)
        if config.num_layers in taps:
            tapped.append((config.num_layers, hidden))
        by_layer = dict(tapped)
        stacked = torch.stack([by_layer[tap] for tap in taps], 2) if taps else hidden[:, :, None, :0]
        return Hidden(stacked, rms_norm(hidden, self.norm, config.rms_norm_eps))

    def rotary(self, positions: Tensor) -> Rotary:
        cos, sin = self._tables
        return cos[positions], sin[positions]

    def _mask(self, segments: Tensor, window: int | None) -> Tensor:
        """Return a mask (B, 1, L, L) to add to the scores: causal, inside one sequence."""
        at = torch.arange(segments.shape[1], device=segments.device)
        seen = (segments[:, :, None] == segments[:, None, :]) & (at[:, None] >= at)
        if window is not None:
            seen &= at[:, None] - at < window
        return additive(seen[:, None], self.dtype)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * weight.to(x.dtype)


def heads(x: Tensor, head_dim: int) -> Tensor:
    """Split (B, N, heads * d) into (B, heads, N, d)."""
    return x.view(*x.shape[:-1], -1, head_dim).transpose(1, 2)


def rotated(x: Tensor, rotary: Rotary) -> Tensor:
    """Apply rotary positions to (B, heads, N, d)."""
    cos, sin = rotary[0][:, None], rotary[1][:, None]
    first, second = x.float().chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Attend with (B, heads, N, d) each, of which k and v may have fewer heads -> (B, N, heads * d)."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=1 / math.sqrt(q.shape[-1]))
    return mixed.transpose(1, 2).flatten(2)


def additive(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """Return 0 where seen, else -inf: converted once, not in every layer."""
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, -math.inf)


def positions_of(segments: Tensor) -> Tensor:
    """Return (B, L), a token's place in its own sequence, from the row's segment numbers."""
    at = torch.arange(segments.shape[1], device=segments.device).expand_as(segments)
    starts = torch.ones_like(segments, dtype=torch.bool)
    starts[:, 1:] = segments[:, 1:] != segments[:, :-1]
    return at - torch.where(starts, at, 0).cummax(1).values
