"""GGUF files: metadata, tensor table, and tensors dequantised to floats.

The header is parsed here (the gguf package takes seconds per vocabulary) and checked against the file's size, so a
truncated file is refused before anything is computed from it. The gguf package dequantises; `import_gguf` alone imports
it.
"""

from __future__ import annotations

import struct
import weakref
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.errors import BrokenModel, PacelineError, UnsupportedModel, short_repr
from paceline.files.reader import FileReader

SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
MAX_DIMS = 4
FIRST_BYTES = 8 << 20  # bytes read at first; holds the header of most vocabularies
MOST_HEADER_BYTES = 1 << 30  # a header that goes on behind them is damaged
LENGTH = struct.Struct("<Q")  # of a text


@dataclass(frozen=True)
class TensorInfo:
    """The place of a tensor. `shape` has rows first, as torch; a file has them last."""

    shape: tuple[int, ...]
    type_id: int
    offset: int  # from the file's start
    nbytes: int


class GGUFFile:
    """One open file: `metadata` by key, `tensors` by name, `read(name)` for the values.

    Bytes are read, never mapped (`reader`), and the memory of a tensor is free once its reader drops it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._gguf = import_gguf()
        try:
            self._reader = FileReader(path)
        except FileNotFoundError as error:
            raise BrokenModel(f"{path} cannot be read: {error}") from error
        self.size = self._reader.size
        if not self.size:
            raise BrokenModel(f"{path} is empty: the download did not finish; download it again")
        length = FIRST_BYTES
        while not self._parse(self._bytes(0, min(length, self.size)).tobytes()):
            length *= 4

    def _parse(self, header: bytes) -> bool:
        """Read metadata and the table of tensors; False if the header is longer than these bytes."""
        try:
            self._parse_header(_Cursor(header, self.size))
        except (struct.error, IndexError, UnicodeDecodeError, OverflowError, RecursionError) as error:
            if isinstance(error, struct.error | _TooFew) and len(header) < min(self.size, MOST_HEADER_BYTES):
                return False
            raise BrokenModel(
                f"{self.path} is truncated or damaged: its header ends early; download it again"
            ) from error
        return True

    def _parse_header(self, cursor: _Cursor) -> None:
        if cursor.data[:4] != b"GGUF":
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
            if key in self.metadata:
                raise BrokenModel(
                    f"{self.path} is damaged: the key {short_repr(key)} is there twice; download it again"
                )
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
        if not shape or not nbytes or shape[-1] % block or offset + nbytes > self.size:
            raise BrokenModel(
                f"{self.path} is truncated or damaged: tensor {name} should end at byte {offset + nbytes}, "
                f"the file has {self.size}; download it again"
            )
        return TensorInfo(shape=shape, type_id=kind, offset=offset, nbytes=nbytes)

    def type_name(self, name: str) -> str:
        """Return the name of the tensor's type: F16, Q4_K, ..."""
        return str(self._gguf.GGMLQuantizationType(self.tensors[name].type_id).name)

    def raw(self, name: str) -> npt.NDArray[np.uint8]:
        """Return the tensor's bytes: (..., bytes of a row)."""
        info = self.tensors[name]
        return self._bytes(info.offset, info.nbytes).reshape(*info.shape[:-1], -1)

    def read(self, name: str) -> npt.NDArray[Any]:
        """Return the tensor's values: float16 and float32 as they are, all others dequantised to float32."""
        info = self.tensors[name]
        kind = self._gguf.GGMLQuantizationType(info.type_id)
        types = self._gguf.GGMLQuantizationType
        if kind in (types.F32, types.F16):
            return self.raw(name).view("<f4" if kind == types.F32 else "<f2").reshape(info.shape)
        try:
            values: npt.NDArray[Any] = self._gguf.quants.dequantize(self.raw(name), kind)
        except NotImplementedError as error:
            raise UnsupportedModel(
                f"{self.path}: tensor {name} is stored as {kind.name}, which the gguf package cannot dequantise"
            ) from error
        return values.reshape(info.shape)

    def _bytes(self, offset: int, count: int) -> npt.NDArray[np.uint8]:
        return self._reader.read(offset, count)


_open_files: weakref.WeakValueDictionary[tuple[object, ...], GGUFFile] = weakref.WeakValueDictionary()


def open_gguf(path: Path) -> GGUFFile:
    """Return the file; while a caller holds it, others who open the same file get the same object: parsing a
    vocabulary takes a third of a second."""
    try:
        status = path.stat()
    except OSError:
        return GGUFFile(path)
    key = path, status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
    file = _open_files.get(key)
    if file is None:
        file = _open_files[key] = GGUFFile(path)
    return file


class _TooFew(IndexError):
    """The header goes on behind the bytes that were read."""


class _Cursor:
    """A position in the header; every read moves it and raises struct.error or IndexError at the end of the data."""

    def __init__(self, data: bytes, file_size: int) -> None:
        self.data, self.file_size = data, file_size
        self.position = 0

    def unpack(self, layout: str) -> tuple[Any, ...]:
        values = struct.unpack_from("<" + layout, self.data, self.position)
        self.position += struct.calcsize("<" + layout)
        return values

    def string(self) -> str:
        return self.strings(1)[0]

    def strings(self, count: int) -> list[str]:
        data, at, texts = self.data, self.position, []
        length_at = LENGTH.unpack_from
        for _ in range(count):
            (length,) = length_at(data, at)
            start, at = at + LENGTH.size, at + LENGTH.size + length
            if at > len(data):
                raise _TooFew("a text goes on") if at <= self.file_size else IndexError("a text ends behind the file")
            texts.append(str(data[start:at], "utf-8"))
        self.position = at
        return texts

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.string()
        if kind != ARRAY:
            return self.unpack(_scalar(kind))[0]
        item_kind, length = self.unpack("IQ")
        if length > self.file_size:
            raise IndexError("array runs past the end of the file")
        if item_kind == STRING:
            return self.strings(length)
        if item_kind == ARRAY:
            return [self.value(ARRAY) for _ in range(length)]
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
