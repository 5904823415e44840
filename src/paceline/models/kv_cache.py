"""The tensors behind the block ids: one (K, V) pair per layer, drafters' layers after the target's.

A slot is block_id * block_size + offset. The cache knows nothing of sequences; `engine.block_manager` owns the ids.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class KVSpec:
    """The shape of one layer's cache."""

    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class LayerCache:
    k: Tensor  # (num_slots, num_kv_heads, head_dim)
    v: Tensor


class KVCache:
    def __init__(
        self, specs: Sequence[KVSpec], *, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self.layers: list[LayerCache] = []
        self._storage: list[Tensor] = []  # (L, 2, num_slots, num_kv_heads, head_dim): layers of one shape together
        for spec, same in itertools.groupby(specs):
            shape = (len(list(same)), 2, num_blocks * block_size, spec.num_kv_heads, spec.head_dim)
            # Unwritten pages cost nothing on CPU: empty() maps them lazily.
            self._storage.append(torch.empty(shape, dtype=dtype, device=device))
            self.layers += [LayerCache(pair[0], pair[1]) for pair in self._storage[-1]]

    def move(self, source: Tensor, target: Tensor) -> None:
        """Copy slots `source` to `target` in every layer. They may overlap: gather first, then scatter."""
        for storage in self._storage:
            storage[:, :, target] = storage[:, :, source]

    @staticmethod
    def bytes_per_block(specs: Sequence[KVSpec], block_size: int, dtype: torch.dtype) -> int:
        return sum(2 * block_size * spec.num_kv_heads * spec.head_dim * dtype.itemsize for spec in specs)
