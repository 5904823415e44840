"""Blocks of codes in a Hugging Face folder: BLOCK_WEIGHTS, a safetensors file of bytes whose metadata name their kinds.

A tensor (N, bytes of a row) of dtype U8 is the blocks of a (N, K) weight; `__metadata__` maps its name to a kind of
GGUF's. The file has a name of its own, so that software that does not know the format finds no weights to misread.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterable
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from paceline.errors import BrokenModel, UnsupportedModel
from paceline.models.weights import BLOCKS, StoredWeight, WeightKind

BLOCK_WEIGHTS = "blocks.safetensors"
DTYPES = {WeightKind.FLOAT32: "F32", WeightKind.BFLOAT16: "BF16", WeightKind.FLOAT16: "F16"}

Entry = tuple[str, WeightKind, tuple[int, ...]]  # name, kind and shape of a weight


def block_shape(stored: tuple[int, ...], kind: str, source: str) -> tuple[WeightKind, tuple[int, ...]]:
    """The kind by its name, and the shape of the weight that bytes of this shape stand for."""
    if kind not in (known.name for known in BLOCKS):
        names = ", ".join(known.name for known in BLOCKS)
        raise UnsupportedModel(f"{source} is stored as {kind}, an unknown kind of blocks; known: {names}")
    layout = BLOCKS[WeightKind[kind]]
    if len(stored) != 2 or stored[1] % layout.bytes:
        raise BrokenModel(f"{source} has rows of {stored[-1]} bytes, which are not blocks of {layout.bytes} ({kind})")
    return WeightKind[kind], (stored[0], layout.weights_in(stored[1]))


def checked_blocks(kind: WeightKind, data: Tensor, source: str) -> StoredWeight:
    if not BLOCKS[kind].scales_are_finite(data):
        raise BrokenModel(f"{source} has a scale that is not a number; the file is damaged, download it again")
    return StoredWeight.of_blocks(kind, data)


def write_blocks(
    path: Path, entries: Iterable[Entry], weight: Callable[[str], StoredWeight], written: Callable[[int, int], None]
) -> None:
    """One tensor at a time: a length, a JSON header of that length, and the data in the header's order."""
    entries = list(entries)
    metadata = {"format": "pt"} | {name: kind.name for name, kind, _ in entries if kind.is_blocks}
    header: dict[str, object] = {"__metadata__": metadata}
    ends: dict[str, int] = {}
    end = 0
    for name, kind, shape in entries:
        stored = (shape[0], BLOCKS[kind].row_bytes(shape[1])) if kind.is_blocks else shape
        start, end = end, end + prod(stored) * kind.dtype.itemsize
        dtype = "U8" if kind.is_blocks else DTYPES[kind]
        header[name], ends[name] = {"dtype": dtype, "shape": list(stored), "data_offsets": [start, end]}, end
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as out:
        out.write(struct.pack("<Q", len(encoded)) + encoded)
        for name, kind, _ in entries:
            given = weight(name)
            data = given.data if kind.is_blocks else given.to(kind, given.data.device).data
            out.write(data.contiguous().view(-1).view(torch.uint8).numpy().data)
            written(ends[name], end)
