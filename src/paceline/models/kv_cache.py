"""The tensors behind the block ids: one (K, V) pair per layer, drafters' layers after the target's.

A slot is block_id * block_size + offset; `slots_of` computes the slots of positions. The cache knows nothing of
sequences; `engine.block_manager` owns the ids.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.platform.triton import require_triton

Ints = np.ndarray[Any, np.dtype[np.int64]]


def slots_of(tables: Any, owner: Any, position: Any, block_size: int) -> Any:
    """Compute the cache slots of positions from the block tables (S, W), by each position's row of them."""
    block = position // block_size
    return tables.reshape(-1).take(owner * tables.shape[1] + block) * block_size + position % block_size


@dataclass(frozen=True, kw_only=True)
class KVSpec:
    """The shape of one layer's cache."""

    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class LayerCache:
    """K and V of one layer."""

    k: Tensor  # (num_slots, num_kv_heads, head_dim)
    v: Tensor
    k_scale: Tensor | None = None  # (num_slots, num_kv_heads), fp32: factors of codes in int8; None: numbers are stored
    v_scale: Tensor | None = None

    def write(self, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Store K and V (M, num_kv_heads, head_dim), rounded to the cache's dtype."""
        for numbers, stored, scales in ((k, self.k, self.k_scale), (v, self.v, self.v_scale)):
            if scales is None:
                stored.index_copy_(0, slots, numbers.to(stored.dtype))
                continue
            codes, scale = _to_codes(numbers)
            stored.index_copy_(0, slots, codes)
            scales.index_copy_(0, slots, scale)

    def read(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Return K and V of slots as numbers (*slots, num_kv_heads, head_dim)."""
        if self.k_scale is None or self.v_scale is None:
            return self.k[slots], self.v[slots]
        return self.k[slots] * self.k_scale[slots][..., None], self.v[slots] * self.v_scale[slots][..., None]


def _to_codes(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Return int8 codes and the scale of each head, as native/cache.h computes them."""
    scale = numbers.float().abs().amax(-1) / 127
    divides = scale.isfinite() & (scale >= torch.finfo(torch.float32).tiny)
    codes = (numbers / torch.where(divides, scale, 1)[..., None]).round()
    scale = torch.where(scale.isfinite(), torch.where(divides, scale, 0), torch.nan)
    return torch.where(divides[..., None], codes, 0).to(torch.int8), scale


class KVCache:
    """K and V of all layers, in blocks."""

    def __init__(
        self, specs: Sequence[KVSpec], *, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self.layers: list[LayerCache] = []
        # (L, 2, num_slots, num_kv_heads, head_dim): layers of one shape together, then their scales without head_dim
        self._storage: list[Tensor] = []
        for spec, same in itertools.groupby(specs):
            shape = (len(list(same)), 2, num_blocks * block_size, spec.num_kv_heads, spec.head_dim)
            # Unwritten pages cost nothing on CPU: empty() maps them lazily.
            numbers = torch.empty(shape, dtype=dtype, device=device)
            self._storage.append(numbers)
            if dtype is not torch.int8:
                self.layers += [LayerCache(*pair) for pair in numbers]
                continue
            scales = torch.empty(shape[:-1], device=device)
            self._storage.append(scales)
            self.layers += [LayerCache(*pair, *factors) for pair, factors in zip(numbers, scales, strict=True)]

    def compact(self, nodes: Tensor, path: Tensor) -> None:
        """Move the K/V of accepted paths to the slots of their positions, in every layer; on a GPU without the host.

        `nodes` (T, 1 + N): a row of `path`, then the slots of its nodes. `path` (B, D): the nodes accepted at each
        depth, -1 beyond; each moves to the slot of the node whose number is its depth.
        """
        kernel = _kernel() if path.is_cuda else None
        if kernel is not None:
            for storage in self._storage:
                kernel(storage, nodes, path)
            return
        source, target = _moves(nodes.cpu().numpy(), path.cpu().numpy())
        for storage in self._storage if len(source) else ():
            storage[:, :, target] = storage[:, :, source]  # some slots may be both: gather first, then scatter

    def warmup(self) -> None:
        """Compile the kernel with an empty path, before a step waits for it."""
        device = self._storage[0].device
        self.compact(torch.zeros(1, 2, dtype=torch.int64, device=device), torch.full((1, 1), -1, device=device))

    @staticmethod
    def bytes_per_block(specs: Sequence[KVSpec], block_size: int, dtype: torch.dtype) -> int:
        scale = torch.float32.itemsize if dtype is torch.int8 else 0
        return sum(2 * block_size * spec.num_kv_heads * (spec.head_dim * dtype.itemsize + scale) for spec in specs)


def _moves(nodes: Ints, path: Ints) -> tuple[Tensor, Tensor]:
    """Return the slots of accepted nodes that are not at their position yet, and the slots of those positions."""
    path, slots = path[nodes[:, 0]], nodes[:, 1:]
    tree, depth = np.nonzero(path > np.arange(path.shape[1]))
    return torch.from_numpy(slots[tree, path[tree, depth]]), torch.from_numpy(slots[tree, depth])


@functools.cache
def _kernel() -> Callable[[Tensor, Tensor, Tensor], None] | None:
    try:
        require_triton()
        from paceline.models.backends.cuda.compact import compact
    except ImportError:  # no Triton that works here
        return None
    return compact
