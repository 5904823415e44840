"""The shape of a model (`ModelConfig`) and the settings of the engine (`EngineConfig`). Flat, frozen, no torch."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.errors import InvalidParameter

NONE = "none"  # the method that drafts nothing: plain decoding
AUTO = "auto"  # the method chosen by the policy, per request and step
MAX_K = 64  # nodes a row may draft in one step
MAX_NGRAM = 64  # tokens of a lookup's longest match: each length has a table of its own


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary embedding: `kind` is default, linear or llama3; the last four fields belong to llama3."""

    theta: float = 10_000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Everything the decoder needs to know; one decoder serves every architecture through these fields."""

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


@dataclass(frozen=True, kw_only=True)
class SpeculationConfig:
    """Which methods may draft, and their options. `k` None: the policy decides each step."""

    method: str = NONE  # an entry of the METHODS table, NONE or AUTO
    k: int | None = None
    ngram_min: int = 2  # shortest match that counts
    ngram_max: int = 5
    suffix_corpus: tuple[str, ...] = ()  # text files that seed the suffix store
    suffix_store: str | None = None  # file that keeps the suffix store between runs
    suffix_bytes: int = 200 << 20
    draft_model: str | None = None  # a smaller model with the same vocabulary
    drafter: str | None = None  # checkpoint of a drafter trained for this target; None: a packaged one; NONE: none

    def __post_init__(self) -> None:
        if self.k is not None and (type(self.k) is not int or not 1 <= self.k <= MAX_K):
            raise InvalidParameter("k", f"must be a whole number between 1 and {MAX_K}, or auto; got {self.k}")
        if self.k is not None and self.method == NONE:
            raise InvalidParameter("k", "method none drafts nothing; leave k out or choose a method")
        if not 1 <= self.ngram_max <= MAX_NGRAM:
            raise InvalidParameter("ngram_max", f"must be between 1 and {MAX_NGRAM}, got {self.ngram_max}")
        if not 1 <= self.ngram_min <= self.ngram_max:
            raise InvalidParameter("ngram_min", f"must be between 1 and ngram_max ({self.ngram_max})")


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Limits of one step and of the cache's memory."""

    block_size: int = 16  # tokens per cache block
    num_blocks: int | None = None  # None: from `kv_cache_bytes`
    kv_cache_bytes: int | None = None  # None: 2 GiB on a CPU, on a GPU what `gpu_memory_fraction` leaves for it
    gpu_memory_fraction: float = 0.9  # of the GPU's memory, weights and scratch included
    max_num_seqs: int = 64  # sequences that share a step
    max_num_batched_tokens: int = 512  # tokens of one target pass, drafted nodes included
    max_model_len: int | None = None  # None: the model's context, or what the cache can hold
    max_waiting: int = 8192  # sequences that may wait for a place; more are refused (LLM.generate waits instead)
    prefix_caching: bool = True

    def __post_init__(self) -> None:
        if not 0 < self.gpu_memory_fraction <= 1:
            raise InvalidParameter(
                "gpu_memory_fraction", f"must be above 0 and at most 1, got {self.gpu_memory_fraction}"
            )
        for field in ("block_size", "max_num_seqs", "max_num_batched_tokens", "max_waiting"):
            if getattr(self, field) < 1:
                raise InvalidParameter(field, f"must be at least 1, got {getattr(self, field)}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise InvalidParameter(
                "max_num_batched_tokens",
                f"must be at least max_num_seqs ({self.max_num_seqs}), so that every sequence advances each step",
            )
        for field in ("num_blocks", "max_model_len", "kv_cache_bytes"):
            value = getattr(self, field)
            if value is not None and value < 1:
                raise InvalidParameter(field, f"must be at least 1, got {value}")
