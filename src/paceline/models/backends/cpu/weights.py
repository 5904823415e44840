"""Weights of the native kernels: panels of a few columns each, in parts of one kind."""

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
    """A product or a part of one: weights of several kinds are multiplied one after the other (`next`)."""

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
    views: tuple[ProductView, ...]  # pointers into the tensors; each also points to the next view

    @staticmethod
    def of(parts: Sequence[StoredWeight], bias: Tensor | None, rounds: bool) -> PackedWeight:
        outputs, inputs = joined_shape(parts)
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
        return joined_shape(self.parts)

    @property
    def view(self) -> ProductView:
        return self.views[0]

    @property
    def kinds(self) -> set[WeightKind]:
        return {part.kind for part in self.parts}

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts) + (0 if self.bias is None else self.bias.nbytes)


def joined_shape(parts: Sequence[StoredWeight]) -> tuple[int, int]:
    return sum(part.shape[0] for part in parts), parts[0].shape[1]


@dataclass(frozen=True)
class PackedRows:
    """An embedding in a packed weight, indexed by token ids like a tensor (V, H)."""

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
    """Return the view of an embedding; numbers in rows use the fields of a product."""
    if isinstance(embedding, PackedRows):
        return embedding.weight.view
    outputs, inputs = embedding.shape
    return ProductView(kind=WeightKind.of(embedding.dtype), panels=embedding.data_ptr(), inputs=inputs, outputs=outputs)


def runs_of_a_kind(weights: Sequence[Tensor | StoredWeight]) -> list[list[StoredWeight]]:
    """Group neighbours of one kind. A kind that these kernels cannot read becomes blocks of equal numbers if it can,
    and else fp32."""
    return [list(run) for _, run in itertools.groupby(map(_readable, weights), lambda part: part.kind)]


def _readable(weight: Tensor | StoredWeight) -> StoredWeight:
    stored = StoredWeight.of(weight)
    stored = as_blocks(stored) or stored
    return stored.to(None if stored.kind in NATIVE_KINDS else WeightKind.FLOAT32, CPU)
