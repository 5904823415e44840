"""Three dtypes, each chosen separately: of stored weights, of the computation, and of the K/V cache.

A checkpoint is read as `StoredWeight`s: numbers, or the blocks of codes of a GGUF file, unchanged. Kernels pack them
once (`Kernels.pack`) into the layout they read best, which is a `StoredWeight` again.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.models.gguf_blocks import LAYOUTS


class WeightKind(enum.IntEnum):
    """The values are native/products.h's `Kind`. Names of the kinds made of blocks are GGUF's, as are their bytes."""

    FLOAT32 = 0
    BFLOAT16 = 1
    FLOAT16 = 2
    FLOAT64 = 3
    Q4_0 = 4
    Q4_1 = 5
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    Q4_K = 9
    Q5_K = 10
    Q6_K = 11

    @property
    def is_blocks(self) -> bool:
        return self in BLOCKS

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the stored data: numbers, or the bytes of blocks."""
        return torch.uint8 if self.is_blocks else _DTYPES[self]

    @property
    def bytes_per_weight(self) -> float:
        return BLOCKS[self].bytes / BLOCKS[self].weights if self.is_blocks else self.dtype.itemsize

    @property
    def label(self) -> str:
        """As users write it: bfloat16, q4_1."""
        return self.name.lower()

    @staticmethod
    def of(dtype: torch.dtype) -> WeightKind:
        return _KINDS[dtype]


_DTYPES = {
    WeightKind.FLOAT32: torch.float32,
    WeightKind.BFLOAT16: torch.bfloat16,
    WeightKind.FLOAT16: torch.float16,
    WeightKind.FLOAT64: torch.float64,
}
_KINDS = {dtype: kind for kind, dtype in _DTYPES.items()}


@dataclass(frozen=True)
class StoredWeight:
    kind: WeightKind
    data: Tensor  # numbers; (N, bytes of a row) of blocks; or the layout of the kernels that packed them
    shape: tuple[int, ...]  # of the weight this stands for, (N, K) or (N,)

    @staticmethod
    def of(values: Tensor | StoredWeight) -> StoredWeight:
        """A plain tensor is stored as it is."""
        if isinstance(values, StoredWeight):
            return values
        values = values.detach()
        return StoredWeight(WeightKind.of(values.dtype), values, tuple(values.shape))

    @staticmethod
    def of_blocks(kind: WeightKind, data: Tensor) -> StoredWeight:
        """`data`: (N, bytes of a row)."""
        return StoredWeight(kind, data, (data.shape[0], BLOCKS[kind].weights_in(data.shape[1])))

    @property
    def nbytes(self) -> int:
        return self.data.nbytes

    def numbers(self) -> Tensor:
        """The weight's numbers: as stored, or what its blocks stand for, in fp32."""
        return BLOCKS[self.kind].expand(self.data) if self.kind.is_blocks else self.data

    def to(self, kind: WeightKind | None, device: torch.device) -> StoredWeight:
        """As numbers of this kind; None: stored as it is."""
        if kind is None:
            return StoredWeight(self.kind, self.data.to(device), self.shape)
        return StoredWeight.of(self.numbers().to(device=device, dtype=kind.dtype))


def joined(parts: Sequence[StoredWeight]) -> StoredWeight:
    """The rows of several weights of one kind, one after the other."""
    if len(parts) == 1:
        return parts[0]
    kind, width = parts[0].kind, parts[0].shape[1]
    return StoredWeight(kind, torch.cat([part.data for part in parts]), (sum(part.shape[0] for part in parts), width))


def in_one_kind(weight: Tensor | StoredWeight | Sequence[StoredWeight]) -> StoredWeight:
    """For kernels that read numbers only: blocks expanded, the rows of several weights joined."""
    parts = [weight] if isinstance(weight, Tensor | StoredWeight) else weight
    stored = [StoredWeight.of(part) for part in parts]
    if len({part.kind for part in stored}) > 1 or stored[0].kind.is_blocks:
        stored = [part.to(WeightKind.FLOAT32, part.data.device) for part in stored]
    return joined(stored)


@dataclass(frozen=True)
class Linear:
    """A weight as its kernels read it, and its bias."""

    weight: StoredWeight
    bias: Tensor | None  # (N,)

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)


@dataclass(frozen=True)
class Dtypes:
    stored: WeightKind | None  # of weights; None: each as its file has it. Kernels may widen them (`Kernels.pack`)
    compute: torch.dtype  # of activations
    cache: torch.dtype  # of K and V

    @property
    def numbers(self) -> torch.dtype:
        """Of weights that are stored as plain numbers."""
        return self.compute if self.stored is None else self.stored.dtype

    @staticmethod
    def of(stored: torch.dtype | None, device: torch.device) -> Dtypes:
        """A CPU computes in fp32, a GPU in the dtype of its weights; the cache has the dtype of the computation."""
        compute = torch.float32 if stored is None or device.type == "cpu" else stored
        return Dtypes(None if stored is None else WeightKind.of(stored), compute, compute)


BLOCKS = {WeightKind[name]: layout for name, layout in LAYOUTS.items()}
