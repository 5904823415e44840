"""Tensors of a file, read, never mapped: a file that is cut or rewritten while it is open ends in an error, not in a
signal.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from io import FileIO
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from paceline.errors import BrokenModel
from paceline.files.regular import open_regular

SPARE_BYTES = 1 << 20, 64 << 20  # bytes of tensors whose memory is used again; embeddings, which come once, are larger
SPARE_TENSORS = 3  # tensors whose memory may be used again: the parts of a product are read together
Bytes = npt.NDArray[np.uint8]


class _FileState(NamedTuple):
    """Size and time of a file, which change when it is written to."""

    st_size: int
    modified_ns: int


class FileReader:
    """One open file. Several threads may read it; what is read is of the file as it was opened, or an error."""

    def __init__(self, path: Path) -> None:
        self.path, self._file = path, open_regular(path)
        weakref.finalize(self, self._file.close)
        self._state = _state(self._file)
        self.size = self._state.st_size
        self._spare: list[Bytes] = []
        self._lock = threading.Lock()

    def read(self, offset: int, count: int) -> Bytes:
        with self._lock:
            return self._read(offset, self._memory(count))

    def _read(self, offset: int, data: Bytes) -> Bytes:
        rest = memoryview(data.data)
        try:
            self._file.seek(offset)
            while rest and (got := self._file.readinto(rest)):
                rest = rest[got:]
            unchanged = not rest and _state(self._file) == self._state
        except OSError as error:
            raise BrokenModel(f"{self.path} cannot be read: {error}") from error
        if not unchanged:
            raise BrokenModel(f"{self.path} changed while it was read; wait until it is written, then load it again")
        return data

    def _memory(self, count: int) -> Bytes:
        """Return memory for a tensor; for a large one that of an earlier tensor which nothing refers to any more. Fresh
        pages take three times as long as the reading."""
        if not SPARE_BYTES[0] <= count <= SPARE_BYTES[1]:
            return np.empty(count, np.uint8)
        for at in range(len(self._spare)):
            if len(self._spare[at]) >= count and _references(self._spare, at) == ALONE:
                return self._spare[at][:count]
        self._spare = [*self._spare[-SPARE_TENSORS + 1 :], np.empty(count, np.uint8)]
        return self._spare[-1][:count]


def _references(arrays: list[Bytes], at: int) -> int:
    """Return the number of references to an array of a list, those of this call included."""
    return sys.getrefcount(arrays[at])


ALONE = _references([np.empty(1, np.uint8)], 0)  # references to an array that only its list refers to


def _state(file: FileIO) -> _FileState:
    status = os.fstat(file.fileno())
    return _FileState(status.st_size, status.st_mtime_ns)
