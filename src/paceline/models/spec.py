"""The shape of a model, as the decoder needs it: read from a config.json or a GGUF file. No torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary embedding: `kind` is default, linear, llama3 or yarn. The fields after `factor` belong to the last two."""

    theta: float = 10_000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192
    beta_fast: float = 32.0  # this and the fields below: yarn only
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0  # factor of cos and sin


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Sizes and options of a model; one decoder serves every architecture through these fields."""

    architecture: str  # llama | mistral | qwen2 | qwen3
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    rms_norm_eps: float = 1e-5
    rope: RopeConfig = RopeConfig()
    tie_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    windows: tuple[int | None, ...] = ()  # sliding window of each layer; empty = full attention everywhere
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def window(self, layer: int) -> int | None:
        return self.windows[layer] if self.windows else None

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim
