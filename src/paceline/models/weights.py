"""Three dtypes, each chosen separately: of stored weights, of the computation, and of the K/V cache.

A checkpoint is read as `StoredWeight`s. Kernels pack them once (`Kernels.pack`) into the layout they read best, which
is a `StoredWeight` again.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


class WeightKind(enum.IntEnum):
    """The values are native/products.h's `Kind`; it computes with the first two and leaves the others to be widened."""

    FLOAT32 = 0
    BFLOAT16 = 1
    FLOAT16 = 2
    FLOAT64 = 3

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the stored numbers."""
        return _DTYPES[self]

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
    data: Tensor  # the stored numbers, in a layout of the kind's or of the kernels that packed them
    scales: Tensor | None  # of kinds that store blocks of codes; None for numbers
    shape: tuple[int, ...]  # of the weight this stands for, (N, K) or (N,)

    @staticmethod
    def of(values: Tensor | StoredWeight) -> StoredWeight:
        """A plain tensor is stored as it is."""
        if isinstance(values, StoredWeight):
            return values
        values = values.detach()
        return StoredWeight(WeightKind.of(values.dtype), values, None, tuple(values.shape))

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + (0 if self.scales is None else self.scales.nbytes)

    def to(self, kind: WeightKind, device: torch.device) -> StoredWeight:
        return StoredWeight.of(self.data.to(device=device, dtype=kind.dtype))


def joined(parts: Sequence[StoredWeight]) -> StoredWeight:
    """The rows of several weights of one kind, one after the other."""
    return parts[0] if len(parts) == 1 else StoredWeight.of(torch.cat([part.data for part in parts]))


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
    stored: WeightKind  # of weights; kernels may have to widen them (`Kernels.pack`)
    compute: torch.dtype  # of activations
    cache: torch.dtype  # of K and V

    @staticmethod
    def of(stored: torch.dtype, device: torch.device) -> Dtypes:
        """A CPU computes in fp32, a GPU in the dtype of its weights; the cache has the dtype of the computation."""
        compute = torch.float32 if device.type == "cpu" else stored
        return Dtypes(WeightKind.of(stored), compute, compute)
