"""A safetensors file, written one tensor at a time: a length, a JSON header of that length, the data in its order."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterable, Mapping
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

DTYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "U8": torch.uint8,
    "I32": torch.int32,
    "I64": torch.int64,
}


class Header(NamedTuple):
    dtype: str  # spelling of safetensors: F32, I8, F8_E4M3
    shape: tuple[int, ...]


def write_tensors(
    path: Path,
    headers: Mapping[str, Header],
    tensors: Iterable[Tensor],
    written: Callable[[int, int], None],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write `tensors`, which come in the order of `headers`; `written` is called with the bytes so far and in all."""
    header: dict[str, object] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    end = 0
    for name, (dtype, shape) in headers.items():
        start, end = end, end + prod(shape) * DTYPES[dtype].itemsize
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    done = 0
    with path.open("wb") as out:
        out.write(struct.pack("<Q", len(encoded)) + encoded)
        for (name, (dtype, shape)), data in zip(headers.items(), tensors, strict=True):
            assert (data.dtype, tuple(data.shape)) == (DTYPES[dtype], shape), name
            done += out.write(data.contiguous().view(-1).view(torch.uint8).numpy().data)
            written(done, end)
