"""The shape of a model, as every stack of layers reads it: declared once, by its family (`families/`). No torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

HEAD, WHOLE = QK_NORMS = ("head", "whole")
PRE, SANDWICH, POST, PARALLEL = NORMS = ("pre", "sandwich", "post", "parallel")
SILU, GELU_TANH = ACTIVATIONS = ("silu", "gelu_tanh")  # numbered as in native/elementwise.h


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary embedding: `kind` is default, linear, llama3, yarn or longrope."""

    theta: float = 10_000.0
    kind: str = "default"
    factor: float = 1.0
    dims: int | None = None  # dimensions of a head that are rotated; None: all, 0: the layer knows no positions
    low_freq_factor: float = 1.0  # this and the next: llama3 only
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192
    beta_fast: float = 32.0  # this and the next two: yarn only
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0  # factor of cos and sin: yarn and longrope only
    divisors: tuple[float, ...] = ()  # of the frequencies: longrope only


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """The shape of one layer: attention, then a gated MLP."""

    heads: int
    kv_heads: int
    head_dim: int
    inner: int  # width of the MLP
    rope: RopeConfig = RopeConfig()
    scale: float = 0.0  # of attention's scores; 0: 1 / sqrt(head_dim)
    softcap: float = 0.0  # c: a score s becomes c tanh(s / c); 0: none
    window: int | None = None  # positions that a row sees; None: all before it
    qk_norm: str | None = None  # RMSNorm of q and k before they are rotated: of each head, or of the whole projection
    norms: str = PRE  # x + f(norm(x)); sandwich: x + norm(f(norm(x))); post: x + norm(f(x));
    # parallel: x + attention(norm(x)) + mlp(norm(x)), of one norm
    activation: str = SILU
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False

    def __post_init__(self) -> None:
        if not self.scale:
            object.__setattr__(self, "scale", 1 / math.sqrt(self.head_dim))

    @property
    def q_size(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.kv_heads * self.head_dim


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A model: its layers, and what surrounds them. One decoder serves every family through these fields."""

    architecture: str  # name of the family
    vocab_size: int
    hidden_size: int
    max_positions: int
    layers: tuple[LayerSpec, ...]
    rms_norm_eps: float = 1e-5
    mean_centred: bool = False  # norms of the residual stream subtract the mean first (LayerNorm without a bias)
    embed_scale: float = 1.0
    stream_scale: float = 1.0  # the model's residual stream is this times ours: see families/granite.py
    logit_scale: float = 1.0
    logit_softcap: float = 0.0  # as LayerSpec.softcap
    tie_embeddings: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def layer(self) -> LayerSpec:
        """Return the first layer, whose sizes are those of every layer here."""
        return self.layers[0]

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Return the window of each layer; () where all layers see all positions."""
        windows = tuple(layer.window for layer in self.layers)
        return windows if any(windows) else ()

    def with_layers(self, **changes: Any) -> ModelConfig:
        """Return the model with fields of all layers changed."""
        return replace(self, layers=tuple(replace(layer, **changes) for layer in self.layers))

    def replaced(self, **changes: Any) -> ModelConfig:
        return replace(self, **changes)

    def drafter_layers(self, architecture: str, layers: int, *, qk_norm: bool) -> ModelConfig:
        """Return layers of Llama's kind with the sizes of this model, as drafters for it have them."""
        whole, rope = [one for one in self.layers if one.window is None] or self.layers, RopeConfig()
        rope = next((one.rope for one in whole if one.rope.dims != 0), rope)
        if rope.kind == "longrope" or rope.dims is not None:
            rope = RopeConfig(theta=rope.theta)
        sizes = LayerSpec(
            heads=self.layer.heads,
            kv_heads=self.layer.kv_heads,
            head_dim=self.layer.head_dim,
            inner=self.layer.inner,
            rope=rope,
            qk_norm=HEAD if qk_norm else None,
        )
        return ModelConfig(
            architecture=architecture,
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            max_positions=self.max_positions,
            layers=(sizes,) * layers,
            rms_norm_eps=self.rms_norm_eps * self.stream_scale**2,
            tie_embeddings=self.tie_embeddings,
            bos_token_id=self.bos_token_id,
            eos_token_ids=self.eos_token_ids,
        )

    def of_depth(self, layers: int) -> ModelConfig:
        """Return the model with this number of layers, each like the first."""
        return replace(self, layers=(self.layer,) * layers)


def uniform(
    *,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    intermediate_size: int,
    qk_norm: bool = False,
    rope: RopeConfig | None = None,
    qkv_bias: bool = False,
    output_bias: bool = False,
    mlp_bias: bool = False,
    **model: Any,
) -> ModelConfig:
    """Return a model of equal layers, of the kind of Llama's; `model`: the other fields of a ModelConfig."""
    layer = LayerSpec(
        heads=num_heads,
        kv_heads=num_kv_heads,
        head_dim=head_dim,
        inner=intermediate_size,
        rope=rope or RopeConfig(),
        qk_norm=HEAD if qk_norm else None,
        qkv_bias=qkv_bias,
        output_bias=output_bias,
        mlp_bias=mlp_bias,
    )
    return ModelConfig(layers=(layer,) * num_layers, **model)
