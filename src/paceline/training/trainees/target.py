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
from paceline.models.spec import GELU_TANH, PARALLEL, LayerSpec, ModelConfig, RopeConfig

Rotary = tuple[Tensor, Tensor]  # cos and sin, (B, N, head_dim / 2)


class Hidden(NamedTuple):
    taps: Tensor  # (B, L, T, H) residual stream entering the tapped layers
    final: Tensor  # (B, L, H) after the final norm: the head's input


class LayerWeights(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    output: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor
    input_norm: Tensor | None = None  # None: the layer's input is given, or is the residual stream
    attention_norm: Tensor | None = None  # as in `kernels.Layer`
    mlp_norm: Tensor | None = None
    down_norm: Tensor | None = None
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
    "attention_norm": "self_attn.output_norm",
    "down_norm": "mlp.output_norm",
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
    spec: LayerSpec | None = None,
    centred: bool = False,
    inputs: Tensor | None = None,
    keys: tuple[Tensor, ...] = (),
    values: tuple[Tensor, ...] = (),
) -> tuple[Tensor, Tensor, Tensor]:
    """Run a layer over (B, N, H); return its output and its own K and V.

    Products are computed in `dtype`. q, k and v are made from `inputs`, or from the normed x. `keys` and `values`
    are those of positions before x; `mask` is (B, 1, N, earlier positions + N). `spec`: of a target's layer; None for
    a drafter's, which is of Llama's kind.
    """
    head_dim = 2 * rotary[0].shape[-1]

    def normed(x: Tensor, weight: Tensor | None) -> Tensor:
        return x if weight is None else rms_norm(x, weight, eps, centred)

    if inputs is None:
        inputs = normed(x, w.input_norm).to(dtype)
    q, k, v = (linear(inputs, *one) for one in ((w.q, w.q_bias), (w.k, w.k_bias), (w.v, w.v_bias)))
    q, k = (head_norm(one, norm, head_dim, eps) for one, norm in ((q, w.q_norm), (k, w.k_norm)))
    k, v = rotated(k, rotary), heads(v, head_dim)
    mixed = attention(rotated(q, rotary), torch.cat((*keys, k), 2), torch.cat((*values, v), 2), mask, spec)
    added = normed(linear(mixed, w.output, w.output_bias), w.attention_norm)
    x = x + added
    if spec is None or spec.norms != PARALLEL:
        inputs = normed(x, w.mlp_norm).to(dtype)
    gate = linear(inputs, w.gate, w.gate_bias)
    gate = F.gelu(gate, approximate="tanh") if spec is not None and spec.activation == GELU_TANH else F.silu(gate)
    gated = gate * linear(inputs, w.up, w.up_bias)
    return x + normed(linear(gated, w.down, w.down_bias), w.down_norm), k, v


class FrozenTarget:
    def __init__(self, path: Path, device: torch.device, dtype: torch.dtype, *, compiled: bool = False) -> None:
        self.path, self.device, self.dtype = path, device, dtype
        self.config: ModelConfig = load_config(path)
        config, weights = self.config, load_weights(path, self.config)

        def tensor(name: str) -> Any:
            return weights[name].numbers().to(device=device, dtype=dtype) if name in weights else None

        self.embedding: Tensor = tensor("model.embed_tokens.weight")
        self.head: Tensor = self.embedding if config.tie_embeddings else tensor("lm_head.weight")
        self.stored_head = self.head
        if config.logit_scale != 1.0:
            self.head = self.head * config.logit_scale
        self.norm: Tensor = tensor("model.norm.weight")
        self.layers = [layer_weights(tensor, f"model.layers.{index}") for index in range(config.num_layers)]
        length, head_dim = min(config.max_positions, 1 << 15), config.layer.head_dim
        ropes = {config.drafter_layers(config.architecture, 1, qk_norm=False).layer.rope}
        self._drafters_rope = next(iter(ropes))
        ropes |= {layer.rope for layer in config.layers}
        self._tables: dict[RopeConfig, Rotary] = {rope: rope_tables(rope, head_dim, length, device) for rope in ropes}
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
        rotary = {rope: (cos[positions], sin[positions]) for rope, (cos, sin) in self._tables.items()}
        masks = {window: self._mask(segments, window) for window in set(config.windows or (None,))}
        hidden = self.embed(tokens)
        tapped = []
        for index, weights in enumerate(self.layers):
            if index in taps:
                tapped.append((index, hidden * config.stream_scale))
            spec = config.layers[index]
            hidden, _, _ = layer(
                *(hidden, rotary[spec.rope], masks[spec.window], weights, config.rms_norm_eps, self.dtype),
                spec=spec,
                centred=config.mean_centred,
            )
        if config.num_layers in taps:
            tapped.append((config.num_layers, hidden * config.stream_scale))
        by_layer = dict(tapped)
        stacked = torch.stack([by_layer[tap] for tap in taps], 2) if taps else hidden[:, :, None, :0]
        return Hidden(stacked, rms_norm(hidden, self.norm, config.rms_norm_eps, config.mean_centred))

    def embed(self, tokens: Tensor) -> Tensor:
        """Return the input of the target's first layer."""
        embedded = self.embedding[tokens]
        return embedded if self.config.embed_scale == 1.0 else embedded * self.config.embed_scale

    def rotary(self, positions: Tensor) -> Rotary:
        """Return the rotation of a drafter's layers."""
        cos, sin = self._tables[self._drafters_rope]
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


def rms_norm(x: Tensor, weight: Tensor, eps: float, centred: bool = False) -> Tensor:
    wide = x.float()
    if centred:
        wide = wide - wide.mean(-1, keepdim=True)
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * weight.to(x.dtype)


def heads(x: Tensor, head_dim: int) -> Tensor:
    """Split (B, N, heads * d) into (B, heads, N, d)."""
    return x.view(*x.shape[:-1], -1, head_dim).transpose(1, 2)


def head_norm(x: Tensor, norm: Tensor | None, head_dim: int, eps: float) -> Tensor:
    """Split (B, N, heads * d) into heads, normed each or, by a norm of all of them, as one."""
    if norm is not None and len(norm) != head_dim:
        return heads(rms_norm(x, norm, eps), head_dim)
    return heads(x, head_dim) if norm is None else rms_norm(heads(x, head_dim), norm, eps)


def rotated(x: Tensor, rotary: Rotary) -> Tensor:
    """Apply rotary positions to (B, heads, N, d)."""
    cos, sin = rotary[0][:, None], rotary[1][:, None]
    first, second = x.float().chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, spec: LayerSpec | None = None) -> Tensor:
    """Attend with (B, heads, N, d) each, of which k and v may have fewer heads -> (B, N, heads * d)."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scale = 1 / math.sqrt(q.shape[-1]) if spec is None else spec.scale
    if spec is not None and spec.softcap:
        scores = spec.softcap * torch.tanh(q @ k.transpose(-1, -2) * (scale / spec.softcap)) + mask
        mixed = scores.softmax(-1, torch.float32).to(v.dtype) @ v
    else:
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
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
