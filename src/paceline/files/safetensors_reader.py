"""A safetensors file that is read: its header, which is checked against its size, and its tensors by name."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.errors import BrokenModel, short_repr
from paceline.files.reader import FileReader
from paceline.files.safetensors_writer import Header

LENGTH_BYTES = 8  # of the header's length, which the file begins with
MOST_HEADER = 100_000_000  # bytes, as in the safetensors library
METADATA = "__metadata__"
TYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
}


class SafetensorsFile:
    """One open file: `headers` and `metadata` by name, `read(name)` for a tensor."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._reader = FileReader(path)
        except FileNotFoundError as error:
            raise BrokenModel(f"{path} cannot be read ({error.strerror}); check its permissions") from error
        header = self._header()
        self.metadata: dict[str, str] = self._texts(header.pop(METADATA, {}))
        self.headers: dict[str, Header] = {}
        self._places: dict[str, tuple[int, int]] = {}
        end = 0
        for name, (dtype, shape, begin, stop) in sorted(
            ((name, self._entry(name, entry)) for name, entry in header.items()), key=lambda item: item[1][2:]
        ):
            if begin != end:
                raise self._damaged(f"tensor {short_repr(name)} begins at byte {begin}, not {end}")
            end = stop
            self.headers[name], self._places[name] = Header(dtype, shape), (begin, stop - begin)
        if self._start + end != self._reader.size:
            raise self._damaged(f"it should end at byte {self._start + end}, and has {self._reader.size}")

    def read(self, name: str) -> Tensor:
        dtype, shape = self.headers[name]
        if dtype not in TYPES:
            raise BrokenModel(f"{self.path}: tensor {name} has dtype {dtype}, which is not read")
        begin, size = self._places[name]
        if not size:
            return torch.empty(shape, dtype=TYPES[dtype])
        return torch.from_numpy(self._reader.read(self._start + begin, size)).view(TYPES[dtype]).view(shape)

    def _header(self) -> dict[str, Any]:
        size = self._reader.size
        if size < LENGTH_BYTES:
            raise self._damaged(f"it has {size} bytes")
        length = int.from_bytes(self._reader.read(0, LENGTH_BYTES).tobytes(), "little")
        if length > min(MOST_HEADER, size - LENGTH_BYTES):
            raise self._damaged(f"its header should have {length} bytes, and the file has {size}")
        self._start = LENGTH_BYTES + length
        try:
            header = json.loads(self._reader.read(LENGTH_BYTES, length).tobytes(), object_pairs_hook=self._once)
        except (ValueError, RecursionError) as error:
            raise self._damaged(f"its header is no JSON: {error}") from error
        if not isinstance(header, dict):
            raise self._damaged("its header is no JSON object")
        return header

    def _once(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if len(made) < len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise self._damaged(f"the name {short_repr(twice)} is there twice")
        return made

    def _entry(self, name: str, entry: Any) -> tuple[str, tuple[int, ...], int, int]:
        try:
            dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        except (KeyError, TypeError, ValueError) as error:
            raise self._damaged(f"the entry of {short_repr(name)} is incomplete") from error
        numbers = (*shape, begin, end) if isinstance(shape, list) else (None,)
        if not isinstance(dtype, str) or not all(type(n) is int and 0 <= n < 1 << 63 for n in numbers) or end < begin:
            raise self._damaged(f"the entry of {short_repr(name)} is wrong")
        if dtype in TYPES and prod(shape) * TYPES[dtype].itemsize != end - begin:
            raise self._damaged(f"tensor {short_repr(name)} has {end - begin} bytes, which is not its shape's size")
        return dtype, tuple(shape), begin, end

    def _texts(self, metadata: Any) -> dict[str, str]:
        if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
            raise self._damaged("its metadata are no texts")
        return metadata

    def _damaged(self, reason: str) -> BrokenModel:
        return BrokenModel(f"{self.path} is truncated or damaged ({reason}); download it again")
