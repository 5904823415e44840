"""Weights as the native kernels read them: panels of a few columns each, in parts of one kind."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Sequence
from ctypes import c_int64, c_void_p
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.models.quant.code_blocks import as_blocks
from paceline.models.weights import StoredWeight, WeightKind

CPU = torch.device("cpu")
NATIVE_KINDS = {kind for kind in WeightKind if kind is not WeightKind.FLOAT64 and not kind.has_scales}


class ProductView(ctypes.Structure):
    """A product, or a part of one: weights of several kinds are multiplied one after the other (`next`)."""

    _fields_ = (
        ("kind", c_int64),
        *((name, c_void_p) for name in ("panels", "bias")),
        *((name, c_int64) for name in ("inputs", "outputs", "stride", "rounds")),
        ("next", c_void_p),
    )


@dataclass(frozen=True)
class PackedWeight:
    """The parts' data are panels of a few columns each, zero beyond the last; the bias is fp32."""

    parts: tuple[StoredWeight, ...]
    bias: Tensor | None
    views: tuple[ProductView, ...]  # point into the tensors, which are kept alive here, and each to the next

    @staticmethod
    def of(parts: Sequence[StoredWeight], bias: Tensor | None, rounds: bool) -> PackedWeight:
        outputs, inputs = _joined_shape(parts)
        views: list[ProductView] = []
        end = outputs
        for part in reversed(parts):
            end -= part.shape[0]
            views.insert(
                0,
                ProductView(
                    kind=part.kind,
                    panels=part.data.data_ptr(),
                    bias=None if bias is None else bias[end:].data_ptr(),
                    inputs=inputs,
                    outputs=part.shape[0],
                    stride=outputs,
                    rounds=rounds and part.kind.is_blocks,
                    next=ctypes.addressof(views[0]) if views else None,
                ),
            )
        return PackedWeight(tuple(parts), bias, tuple(views))

    @property
    def shape(self) -> tuple[int, int]:
        return _joined_shape(self.parts)

    @property
    def view(self) -> ProductView:
        return self.views[0]

    @property
    def kinds(self) -> set[WeightKind]:
        return {part.kind for part in self.parts}

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts) + (0 if self.bias is None else self.bias.nbytes)


def _joined_shape(parts: Sequence[StoredWeight]) -> tuple[int, int]:
    return sum(part.shape[0] for part in parts), parts[0].shape[1]


@dataclass(frozen=True)
class PackedRows:
    """An embedding that is read from a packed weight: indexed by token ids, as a tensor (V, H) is."""

    weight: PackedWeight
    gather: Callable[[PackedWeight, Tensor], Tensor]
    dtype = torch.float32
    device = CPU

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self.weight.shape)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, ids: Tensor | int) -> Tensor:
        return self.gather(self.weight, torch.as_tensor(ids))


def rows_view(embedding: Tensor | PackedRows) -> ProductView:
    """Numbers in rows are described as a product is."""
    if isinstance(embedding, PackedRows):
        return embedding.weight.view
    outputs, inputs = embedding.shape
    return ProductView(kind=WeightKind.of(embedding.dtype), panels=embedding.data_ptr(), inputs=inputs, outputs=outputs)


def runs_of_a_kind(weights: Sequence[Tensor | StoredWeight]) -> list[list[StoredWeight]]:
    """Neighbours of one kind together; kinds that these kernels cannot read become blocks of the same numbers where
    there are any, and else fp32."""
    return [list(run) for _, run in itertools.groupby(map(_readable, weights), lambda part: part.kind)]


def _readable(weight: Tensor | StoredWeight) -> StoredWeight:
    stored = StoredWeight.of(weight)
    stored = as_blocks(stored) or stored
    return stored.to(None if stored.kind in NATIVE_KINDS else WeightKind.FLOAT32, CPU)
