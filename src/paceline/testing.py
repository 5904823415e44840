"""Toy models with known distributions, for tests of the cache and of verification.

`HashModel` is a target whose next-token logits are a hash of the whole context *as read back through the cache*: any
error in block tables, slots, compaction, sharing or rollback changes every later token.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence as SequenceOf

import numpy as np
import torch
from torch import Tensor

from paceline.models.decoder import Model
from paceline.models.kv_cache import KVCache, KVSpec, LayerCache
from paceline.models.plan import ModelOutput, PassPlan
from paceline.models.spec import ModelConfig, uniform

HIDDEN = 4


def toy_config(vocab_size: int = 11, max_positions: int = 256, eos_token_ids: tuple[int, ...] = ()) -> ModelConfig:
    return uniform(
        architecture="llama",
        vocab_size=vocab_size,
        hidden_size=HIDDEN,
        intermediate_size=4,
        num_layers=2,
        num_heads=1,
        num_kv_heads=1,
        head_dim=2,
        max_positions=max_positions,
        eos_token_ids=eos_token_ids,
    )


def context_logits(context: SequenceOf[int], vocab_size: int, salt: str = "") -> list[float]:
    """Return the logits of `HashModel` after `context`: normal noise seeded by a hash of every token."""
    return [float(x) for x in _noise(context, salt).normal(scale=2.0, size=vocab_size)]


def context_hidden(context: SequenceOf[int], tap: int) -> list[float]:
    return [float(x) for x in _noise(context, f"tap {tap}").normal(size=HIDDEN)]


def _noise(context: SequenceOf[int], salt: str) -> np.random.Generator:
    digest = hashlib.blake2b(repr((list(context), salt)).encode(), digest_size=8).digest()
    return np.random.default_rng(int.from_bytes(digest, "little"))


class HashModel:
    """Two layers that each store (token, position) in K and V; both must agree when read back."""

    def __init__(self, config: ModelConfig | None = None) -> None:
        self.config = config or toy_config()
        self.kv_specs = (KVSpec(num_kv_heads=1, head_dim=1),) * 2
        self.device = torch.device("cpu")
        self.cache_dtype = torch.float64
        self.torch_threads: int | None = None
        self.pass_bytes = 0
        self.num_passes = 0
        self.rows_per_pass: list[int] = []

    def prepare(self, *_: object) -> bool:
        return False

    def pass_chain(self, *_: object) -> None:
        return None

    def forward(
        self,
        tokens: Tensor,
        plan: PassPlan,
        caches: SequenceOf[LayerCache],
        logit_rows: Tensor,
        taps: SequenceOf[int] = (),
    ) -> ModelOutput:
        self.num_passes += 1
        self.rows_per_pass.append(len(tokens))
        for token, position, slot in zip(tokens.tolist(), plan.positions.tolist(), plan.slots.tolist(), strict=True):
            if slot >= 0:
                for cache in caches:
                    cache.k[slot], cache.v[slot] = token, position
        contexts = [read_context(plan, caches, row) for row in range(len(tokens))]
        for context, token in zip(contexts, tokens.tolist(), strict=True):
            assert context[-1] == token, "a row does not see itself last"
        logits = [context_logits(contexts[row], self.config.vocab_size) for row in logit_rows.tolist()]
        hidden = [[context_hidden(context, tap) for tap in taps] for context in contexts] if taps else None
        return ModelOutput(
            torch.tensor(logits, dtype=torch.float32).view(len(logits), self.config.vocab_size),
            None if hidden is None else torch.tensor(hidden),
        )


def read_context(plan: PassPlan, caches: SequenceOf[LayerCache], row: int) -> list[int]:
    """Read the tokens that a row sees from the cache, as a kernel does."""
    table = plan.block_tables[int(plan.sequence[row])].tolist()
    slots = [
        table[at // plan.block_size] * plan.block_size + at % plan.block_size for at in range(int(plan.prefix[row]))
    ]
    slots += plan.path[row, : int(plan.reach[row] - plan.prefix[row])].tolist()
    assert len(slots) == int(plan.positions[row]) + 1
    assert min(slots) >= 0, "a row reads a slot it does not own"
    for cache in caches:
        assert cache.v[slots].flatten().tolist() == list(range(len(slots))), "positions are not in order"
    first, *others = [cache.k[slots].flatten().tolist() for cache in caches]
    assert all(other == first for other in others), "layers disagree"
    return [int(token) for token in first]


def logits_of(model: Model, tokens: SequenceOf[int], chunks: SequenceOf[int], block_size: int = 4) -> Tensor:
    """Return (T, V) logits after every token of one sequence, computed in these chunks, over shuffled blocks."""
    assert sum(chunks) == len(tokens)
    num_blocks = -(-len(tokens) // block_size)
    table = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(0)).to(torch.int32)
    cache = KVCache(
        model.kv_specs, num_blocks=num_blocks, block_size=block_size, dtype=model.cache_dtype, device=model.device
    )
    logits, first = [], 0
    for count in chunks:
        positions = torch.arange(first, first + count, dtype=torch.int32)
        plan = PassPlan.in_order(
            positions,
            table[positions // block_size] * block_size + positions % block_size,
            torch.zeros_like(positions),
            table[None],
            block_size,
            first + count,
        )
        rows = torch.tensor(tokens[first : first + count])
        logits.append(model.forward(rows, plan, cache.layers, torch.arange(count)).logits)
        first += count
    return torch.cat(logits)
