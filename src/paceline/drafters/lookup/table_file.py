"""The table of successors that `paceline warm` wrote for a model: one file in the cache folder.

One line of JSON (kind, format, model, its digest, vocabulary, answers, contexts, checksum), then the entries. The file
is replaced as a whole, so a reader sees the old one or the new one. `recycling` reads it and never writes it.
"""

from __future__ import annotations

import json
import logging
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from paceline.drafters.base import digest
from paceline.drafters.lookup.successors import ANY, ENTRY, Entries
from paceline.errors import CacheFolderError, PacelineError
from paceline.files.folders import disk_errors, replace_file
from paceline.files.regular import read_bytes
from paceline.models.load.hub import cache_home

log = logging.getLogger("paceline")
KIND, FORMAT, ENDING = "paceline successors", 1, ".successors"
SAMPLE = 64  # rows of an embedding that identify a model
MOST_BYTES = 256 << 20  # of a file that is read
REMEDY = "paceline warm makes it anew"


@dataclass(frozen=True)
class TableFile:
    """A table on disk, and the model that it is of."""

    model: str  # as `warm` was given it
    digest: str
    vocab_size: int
    answers: int  # from which it was filled
    entries: Entries

    def write(self, path: Path) -> None:
        payload = self.entries.tobytes()
        header = {**self._header(), "crc32": zlib.crc32(payload)}
        with disk_errors(lambda error: CacheFolderError(f"{path} cannot be written ({error.strerror or error})")):
            path.parent.mkdir(parents=True, exist_ok=True)
            with replace_file(path) as staging:
                staging.write_bytes(json.dumps(header).encode() + b"\n" + payload)

    def _header(self) -> dict[str, object]:
        names = ("model", "digest", "vocab_size", "answers")
        return {"kind": KIND, "format": FORMAT, **{name: getattr(self, name) for name in names}}

    @staticmethod
    def read(path: Path) -> TableFile:
        """Return the table of a file; ValueError: it is none, or a damaged one."""
        line, _, payload = read_bytes(path, MOST_BYTES).partition(b"\n")
        header = json.loads(line)
        if not isinstance(header, dict) or header.get("kind") != KIND or header.get("format") != FORMAT:
            raise ValueError("no table of this version")
        if header.get("crc32") != zlib.crc32(payload) or len(payload) % ENTRY.itemsize:
            raise ValueError("damaged")
        entries = np.frombuffer(payload, ENTRY).copy()
        table = TableFile(header["model"], header["digest"], header["vocab_size"], header["answers"], entries)
        if type(table.vocab_size) is not int or type(table.answers) is not int or not isinstance(table.model, str):
            raise ValueError("damaged")
        for name, least in (("before", ANY), ("last", 0), ("ids", -1)):
            values = entries[name]
            if values.size and not least <= values.min() <= values.max() < table.vocab_size:
                raise ValueError("damaged")
        return table


def model_digest(embedding: Tensor) -> str:
    """Return the digest of a model with this embedding (V, H), from rows of it, as it is stored."""
    return digest([embedding[torch.arange(SAMPLE) * len(embedding) // SAMPLE]])


def table_path(embedding: Tensor) -> Path:
    """Return the place of the table of the model with this embedding (V, H)."""
    return cache_home() / "successors" / f"{model_digest(embedding)}{ENDING}"


def known_table(embedding: Tensor) -> TableFile | None:
    """Return the table of the model with this embedding. One that cannot be used is logged and ignored."""
    try:
        path = table_path(embedding)
        table = TableFile.read(path)
        if (table.digest, table.vocab_size) != (model_digest(embedding), len(embedding)):
            raise ValueError("of another model")
    except (FileNotFoundError, CacheFolderError):
        return None
    except (ValueError, LookupError, TypeError, RecursionError, PacelineError) as problem:
        log.warning("the table of successors %s is ignored (%s); %s", path, problem, REMEDY)
        return None
    return table


def stored_tables() -> Iterator[tuple[Path, TableFile | None]]:
    """Yield the files of all models, with None for one that cannot be used."""
    for path in sorted((cache_home() / "successors").glob(f"*{ENDING}")):
        try:
            yield path, TableFile.read(path)
        except (OSError, ValueError, LookupError, TypeError, RecursionError, PacelineError):
            yield path, None
