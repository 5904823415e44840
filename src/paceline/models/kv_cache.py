"""The tensors behind the block ids: one (K, V) pair per layer, drafters' layers after the target's.

A slot is block_id * block_size + offset. The cache knows nothing of sequences; `engine.block_manager` owns the ids.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
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

    def compact(self, nodes: Tensor, path: Tensor) -> None:
        """Move accepted paths to where block tables expect them, in every layer; on a device without the host.

        `nodes` (T, 1 + N): a row of `path`, then the slots of its nodes. `path` (B, D): the nodes accepted at each
        depth, -1 beyond; each moves to the slot of the node whose number is its depth.
        """
        kernel = _kernel() if path.is_cuda else None
        for storage in self._storage:
            (kernel or _compact)(storage, nodes, path)

    def rehearse(self) -> None:
        """A path that leads nowhere: the kernel gets compiled before anybody waits for it."""
        device = self._storage[0].device
        self.compact(torch.zeros(1, 2, dtype=torch.int64, device=device), torch.full((1, 1), -1, device=device))

    @staticmethod
    def bytes_per_block(specs: Sequence[KVSpec], block_size: int, dtype: torch.dtype) -> int:
        return sum(2 * block_size * spec.num_kv_heads * spec.head_dim * dtype.itemsize for spec in specs)


def _compact(storage: Tensor, nodes: Tensor, path: Tensor) -> None:
    """Slots moved from and to may be the same: gather first, then scatter."""
    path, slots = path[nodes[:, 0]], nodes[:, 1:]
    moved = path > torch.arange(path.shape[1], device=path.device)
    source, target = slots.gather(1, path.clamp_min(0))[moved], slots[:, : path.shape[1]][moved]
    if len(source):
        storage[:, :, target] = storage[:, :, source]


@functools.cache
def _kernel() -> Callable[[Tensor, Tensor, Tensor], None] | None:
    try:
        from paceline.models.triton.compact import compact
    except ImportError:  # no Triton here
        return None
    return compact
