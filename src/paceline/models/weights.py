"""Three dtypes, each chosen separately: of stored weights, of the computation, and of the K/V cache.

A checkpoint is read as `StoredWeight`s: numbers, the blocks of a GGUF file, or codes beside their scales, as quantised
Hugging Face checkpoints have them. Kernels pack them once (`Kernels.pack`) into their own layout, which is a
`StoredWeight` again.

Codes with scales, G groups of K / G neighbouring columns each:
- FP8: e4m3, one scale for each row (N, 1), which multiplies the row's sum of products: codes enter products exactly.
- INT8, INT4: (code - zero) * scale, or code * scale + offset, in fp32, then rounded once to the computation's dtype. So
  a product has the bits of one with the weights expanded beforehand.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.errors import InvalidParameter
from paceline.models.quant.gguf_blocks import LAYOUTS


class WeightKind(enum.IntEnum):
    """Kinds of stored weights, numbered as `Kind` of native/products.h; blocks have the names and bytes of GGUF."""

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
    FP8 = 12  # from here on: codes beside their scales; no native kernel reads them
    INT8 = 13
    INT4 = 14

    @property
    def is_blocks(self) -> bool:
        return self in BLOCKS

    @property
    def has_scales(self) -> bool:
        return self in _CODES

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the stored data: numbers, codes, or the bytes of blocks."""
        return torch.uint8 if self.is_blocks else _CODES.get(self) or _DTYPES[self]

    @property
    def bytes_per_weight(self) -> float:
        """Return the bytes of a weight, without the scales of codes."""
        if self is WeightKind.INT4:
            return 0.5
        return BLOCKS[self].bytes / BLOCKS[self].weights if self.is_blocks else self.dtype.itemsize

    @property
    def label(self) -> str:
        """Return the kind as users write it: bfloat16, q4_1."""
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
_CODES = {WeightKind.FP8: torch.float8_e4m3fn, WeightKind.INT8: torch.int8, WeightKind.INT4: torch.uint8}
MIDDLE = {WeightKind.INT8: 0, WeightKind.INT4: 8}  # the code of the number 0 in a weight without zeros and offsets


@dataclass(frozen=True)
class StoredWeight:
    kind: WeightKind
    data: Tensor  # numbers; codes; (N, bytes of a row) of blocks; or the layout of the kernels that packed them
    shape: tuple[int, ...]  # shape of the weight this stands for, (N, K) or (N,)
    scales: Tensor | None = None  # (N, G) floats, of codes only
    zeros: Tensor | None = None  # (N, G) int16, the code that stands for 0; None: the middle code
    offsets: Tensor | None = None  # (N, G) floats, added; not beside zeros

    @staticmethod
    def of(values: Tensor | StoredWeight) -> StoredWeight:
        """Wrap a tensor of numbers; a StoredWeight is itself."""
        if isinstance(values, StoredWeight):
            return values
        values = values.detach()
        return StoredWeight(WeightKind.of(values.dtype), values, tuple(values.shape))

    @staticmethod
    def of_blocks(kind: WeightKind, data: Tensor) -> StoredWeight:
        """Wrap blocks. `data`: (N, bytes of a row)."""
        return StoredWeight(kind, data, (data.shape[0], BLOCKS[kind].weights_in(data.shape[1])))

    @staticmethod
    def of_codes(
        kind: WeightKind, data: Tensor, scales: Tensor, *, zeros: Tensor | None = None, offsets: Tensor | None = None
    ) -> StoredWeight:
        """Wrap codes. `data`: (N, K) float8_e4m3fn; (N, K) int8; or (N, K / 2) uint8, INT4 codes 0..15, of which byte j
        has column 2 j in its low four bits and column 2 j + 1 in the high ones. `scales`: (N, G); FP8 may have one.

        Without zeros and offsets the middle code (0 of INT8, 8 of INT4) stands for 0.
        """
        rows, columns = data.shape
        if kind is WeightKind.FP8:
            scales = scales.float().reshape(-1, 1).expand(rows, 1)
        assert zeros is None or offsets is None, "a zero point or an offset"
        shape = rows, 2 * columns if kind is WeightKind.INT4 else columns
        scales = scales.contiguous()
        zeros = None if zeros is None else zeros.to(torch.int16).contiguous()
        return StoredWeight(kind, data, shape, scales, zeros, offsets)

    def rows(self, chosen: slice | Tensor) -> StoredWeight:
        """Return some rows, in the order chosen; of any kind, since a row is stored apart from others."""
        data, *others = (None if part is None else part[chosen] for part in self.parts)
        assert data is not None
        return StoredWeight(self.kind, data, (len(data), *self.shape[1:]), *others)

    @property
    def parts(self) -> tuple[Tensor | None, ...]:
        return self.data, self.scales, self.zeros, self.offsets

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts if part is not None)

    def numbers(self) -> Tensor:
        """Return the weight's numbers: as stored, or those of its blocks or codes in fp32."""
        if self.kind.is_blocks:
            return BLOCKS[self.kind].expand(self.data)
        return self.data if self.scales is None else self._expanded(self.scales)

    def _expanded(self, scales: Tensor) -> Tensor:
        codes = self.data
        if self.kind is WeightKind.INT4:
            codes = torch.stack([codes & 15, codes >> 4], -1)
        grouped = codes.to(torch.float32).view(len(codes), scales.shape[1], -1)
        if self.zeros is not None:
            grouped -= self.zeros[:, :, None]
        elif self.offsets is None:
            grouped -= MIDDLE.get(self.kind, 0)
        grouped *= scales[:, :, None]
        if self.offsets is not None:
            grouped += self.offsets[:, :, None]
        return grouped.view(self.shape)

    def to(self, kind: WeightKind | None, device: torch.device) -> StoredWeight:
        """Convert to numbers of a kind and move to a device; None: of its own kind."""
        if kind is None:
            data, *others = (None if part is None else part.to(device) for part in self.parts)
            assert data is not None
            return StoredWeight(self.kind, data, self.shape, *others)
        numbers = self.numbers().to(device=device, dtype=kind.dtype)
        if kind is WeightKind.FLOAT16 and self.kind is not kind and not torch.isfinite(numbers).all():
            raise InvalidParameter("dtype", "float16 is too narrow for this model's weights; use bfloat16 or float32")
        return StoredWeight.of(numbers)


def joined(parts: Sequence[StoredWeight]) -> StoredWeight:
    """Concatenate the rows of weights of one kind; groups of codes have one size."""
    if len(parts) == 1:
        return parts[0]
    data, *others = (
        None if column[0] is None else torch.cat(column) for column in zip(*(p.parts for p in parts), strict=True)
    )
    assert data is not None
    return StoredWeight(parts[0].kind, data, (sum(part.shape[0] for part in parts), parts[0].shape[1]), *others)


def alike(parts: Sequence[StoredWeight]) -> bool:
    """Return whether weights can be joined: one kind; groups of one size, scales of one dtype, zeros of all or none."""
    return len({(p.kind, *(None if o is None else (o.shape[1], o.dtype) for o in p.parts[1:])) for p in parts}) == 1


def in_one_kind(weight: Tensor | StoredWeight | Sequence[StoredWeight]) -> StoredWeight:
    """Expand blocks and codes to numbers and concatenate the rows of several weights."""
    parts = [weight] if isinstance(weight, Tensor | StoredWeight) else weight
    stored = [StoredWeight.of(part) for part in parts]
    if len({part.kind for part in stored}) > 1 or stored[0].kind.is_blocks or stored[0].kind.has_scales:
        device = stored[0].data.device
        wide = WeightKind.FLOAT32 if device.type == "cpu" else WeightKind.BFLOAT16  # the computation's dtype
        stored = [part.to(wide, device) for part in stored]
    return joined(stored)


@dataclass(frozen=True)
class Linear:
    """A weight as its kernels read it, and its bias."""

    weight: StoredWeight
    bias: Tensor | None  # (N,)

    @property
    def kinds(self) -> set[WeightKind]:
        return {self.weight.kind}

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)


@dataclass(frozen=True)
class Dtypes:
    stored: WeightKind | None  # kind of weights; None: their file's (`kept`). Kernels may widen them
    compute: torch.dtype  # dtype of activations
    cache: torch.dtype  # dtype of K and V

    @property
    def numbers(self) -> torch.dtype:
        """Return the dtypes of weights that are stored as numbers."""
        return self.compute if self.stored is None else self.stored.dtype

    def kept(self, kind: WeightKind) -> WeightKind | None:
        """Return the kind that a weight of the file becomes; None: its own. On a GPU all numbers have one dtype."""
        if self.stored is not None or self.compute is torch.float32 or kind.is_blocks or kind.has_scales:
            return self.stored
        return WeightKind.of(self.compute)

    @staticmethod
    def of(stored: torch.dtype | None, device: torch.device, cache: torch.dtype | None = None) -> Dtypes:
        """Choose the dtypes: a CPU computes in fp32, a GPU in the dtype of its weights or bf16, and the cache has the
        dtype of the computation unless another is given."""
        compute = torch.float32 if device.type == "cpu" else stored or torch.bfloat16
        return Dtypes(None if stored is None else WeightKind.of(stored), compute, cache or compute)


BLOCKS = {WeightKind[name]: layout for name, layout in LAYOUTS.items()}
