"""GGUF files: metadata, tensor table, and tensors dequantised to floats.

The header is parsed here (the gguf package takes seconds per vocabulary) and checked against the file's size, so a
truncated file is refused before anything is computed from it. The gguf package dequantises; `import_gguf` alone imports
it.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.errors import BrokenModel, PacelineError, UnsupportedModel

SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
MAX_DIMS = 4


@dataclass(frozen=True)
class TensorInfo:
    """The place of a tensor. `shape` has rows first, as torch; a file has them last."""

    shape: tuple[int, ...]
    type_id: int
    offset: int  # from the file's start
    nbytes: int


class GGUFFile:
    """One open file: `metadata` by key, `tensors` by name, `read(name)` for the values."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._gguf = import_gguf()
        if path.is_file() and not path.stat().st_size:
            raise BrokenModel(f"{path} is empty: the download did not finish; download it again")
        try:
            with path.open("rb") as file:
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise BrokenModel(f"{path} cannot be read: {error}") from error
        try:
            self._parse()
        except (struct.error, IndexError, UnicodeDecodeError, OverflowError, RecursionError) as error:
            raise BrokenModel(f"{path} is truncated or damaged: its header ends early; download it again") from error

    def _parse(self) -> None:
        cursor = _Cursor(self._data)
        if bytes(self._data[:4]) != b"GGUF":
            raise BrokenModel(f"{self.path} is not a GGUF file: it does not start with GGUF")
        cursor.position = 4
        (version,) = cursor.unpack("I")
        if version not in (2, 3):
            raise UnsupportedModel(f"{self.path} is GGUF version {version}; supported: 2 and 3, little-endian")
        num_tensors, num_fields = cursor.unpack("QQ")
        self.metadata: dict[str, Any] = {}
        for _ in range(num_fields):
            key = cursor.string()
            (kind,) = cursor.unpack("I")
            self.metadata[key] = cursor.value(kind)
        table = [self._tensor_entry(cursor) for _ in range(num_tensors)]
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise BrokenModel(f"{self.path}: general.alignment must be a positive integer, found {alignment!r}")
        start = -(-cursor.position // alignment) * alignment
        self.tensors: dict[str, TensorInfo] = {}
        for name, shape, kind, at in table:
            if name in self.tensors or at % alignment:
                what = "there twice" if name in self.tensors else f"at {at}, no multiple of {alignment}"
                raise BrokenModel(f"{self.path} is damaged: tensor {name} is {what}; download it again")
            self.tensors[name] = self._place(name, shape, kind, start + at)

    @staticmethod
    def _tensor_entry(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
        name = cursor.string()
        (num_dims,) = cursor.unpack("I")
        if num_dims > MAX_DIMS:
            raise IndexError(f"{name} has {num_dims} dimensions")
        shape = tuple(reversed(cursor.unpack(f"{num_dims}Q")))
        kind, offset = cursor.unpack("IQ")
        return name, shape, kind, offset

    def _place(self, name: str, shape: tuple[int, ...], kind: int, offset: int) -> TensorInfo:
        try:
            block, block_bytes = self._gguf.GGML_QUANT_SIZES[self._gguf.GGMLQuantizationType(kind)]
        except (ValueError, KeyError) as error:
            raise UnsupportedModel(f"{self.path}: tensor {name} has an unknown quantisation (type {kind})") from error
        nbytes = prod(shape) // block * block_bytes
        if not shape or shape[-1] % block or offset + nbytes > len(self._data):
            raise BrokenModel(
                f"{self.path} is truncated or damaged: tensor {name} should end at byte {offset + nbytes}, "
                f"the file has {len(self._data)}; download it again"
            )
        return TensorInfo(shape=shape, type_id=kind, offset=offset, nbytes=nbytes)

    def type_name(self, name: str) -> str:
        """Return the name of the tensor's type: F16, Q4_K, ..."""
        return str(self._gguf.GGMLQuantizationType(self.tensors[name].type_id).name)

    def raw(self, name: str) -> npt.NDArray[np.uint8]:
        """Return the tensor's bytes, not copied: (..., bytes of a row)."""
        info = self.tensors[name]
        data = np.frombuffer(self._data, np.uint8, info.nbytes, info.offset)
        return data.reshape(*info.shape[:-1], -1)

    def read(self, name: str) -> npt.NDArray[Any]:
        """Return the tensor's values: float16 and float32 not copied, all others dequantised to float32."""
        info = self.tensors[name]
        kind = self._gguf.GGMLQuantizationType(info.type_id)
        types = self._gguf.GGMLQuantizationType
        if kind in (types.F32, types.F16):
            dtype = np.dtype("<f4" if kind == types.F32 else "<f2")
            return np.frombuffer(self._data, dtype, prod(info.shape), info.offset).reshape(info.shape)
        raw = self.raw(name)
        try:
            values: npt.NDArray[Any] = self._gguf.quants.dequantize(raw, kind)
        except NotImplementedError as error:
            raise UnsupportedModel(
                f"{self.path}: tensor {name} is stored as {kind.name}, which the gguf package cannot dequantise"
            ) from error
        return values.reshape(info.shape)


class _Cursor:
    """A position in the header; every read moves it and raises struct.error or IndexError at the file's end."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.position = 0

    def unpack(self, layout: str) -> tuple[Any, ...]:
        values = struct.unpack_from("<" + layout, self.data, self.position)
        self.position += struct.calcsize("<" + layout)
        return values

    def string(self) -> str:
        (length,) = self.unpack("Q")
        end = self.position + length
        if end > len(self.data):
            raise IndexError("string runs past the end of the file")
        text = self.data[self.position : end].decode("utf-8")
        self.position = end
        return text

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.string()
        if kind != ARRAY:
            return self.unpack(_scalar(kind))[0]
        item_kind, length = self.unpack("IQ")
        if length > len(self.data):
            raise IndexError("array runs past the end of the file")
        if item_kind in (STRING, ARRAY):
            read: Callable[[], Any] = self.string if item_kind == STRING else lambda: self.value(ARRAY)
            return [read() for _ in range(length)]
        return list(self.unpack(f"{length}{_scalar(item_kind)}"))


def _scalar(kind: int) -> str:
    if kind not in SCALARS:
        raise IndexError(f"unknown value type {kind}")
    return SCALARS[kind]


def import_gguf() -> Any:
    """Import the gguf package, or raise an error that says how to get it."""
    try:
        import gguf
        import gguf.quants
    except ImportError as error:
        raise PacelineError("GGUF files need the gguf package: pip install gguf") from error
    return gguf
