"""Blocks of codes in a Hugging Face folder: BLOCK_WEIGHTS, a safetensors file of bytes whose metadata name their kinds.

A tensor (N, bytes of a row) of dtype U8 is the blocks of a (N, K) weight; `__metadata__` maps its name to a kind of
GGUF's. The file has a name of its own, so that software that does not know the format finds no weights to misread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from torch import Tensor

from paceline.errors import BrokenModel, UnsupportedModel
from paceline.files.safetensors_writer import Header, write_tensors
from paceline.models.weights import BLOCKS, StoredWeight, WeightKind

BLOCK_WEIGHTS = "blocks.safetensors"
DTYPES = {WeightKind.FLOAT32: "F32", WeightKind.BFLOAT16: "BF16", WeightKind.FLOAT16: "F16"}

Entry = tuple[str, WeightKind, tuple[int, ...]]  # name, kind and shape of a weight


def block_shape(stored: tuple[int, ...], kind: str, source: str) -> tuple[WeightKind, tuple[int, ...]]:
    """Return the kind of a name, and the shape of the weight that bytes of a shape stand for."""
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
    entries = list(entries)
    headers = {
        name: Header("U8", (shape[0], BLOCKS[kind].row_bytes(shape[1])))
        if kind.is_blocks
        else Header(DTYPES[kind], shape)
        for name, kind, shape in entries
    }

    def data(name: str, kind: WeightKind) -> Tensor:
        stored = weight(name)
        return stored.data if kind.is_blocks else stored.to(kind, stored.data.device).data

    kinds = {name: kind.name for name, kind, _ in entries if kind.is_blocks}
    write_tensors(path, headers, (data(name, kind) for name, kind, _ in entries), written, kinds)
