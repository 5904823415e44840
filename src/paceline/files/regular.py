"""Files of a model, which may be a stranger's: regular files only, bounded in size. Without numpy, since settings are
checked by what is read here.
"""

from __future__ import annotations

import os
import stat
from io import FileIO
from pathlib import Path

from paceline.errors import BrokenModel

MOST_TEXT = 64 << 20  # bytes of a JSON file or a template; the largest known are 20 MB


def open_regular(path: Path) -> FileIO:
    """Open a regular file to read it. A pipe would wait for a writer, and a device has no end."""
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    except FileNotFoundError:
        raise
    except OSError as error:
        raise BrokenModel(f"{path} cannot be read ({error.strerror}); check its permissions") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise BrokenModel(f"{path} is no file but a folder, a pipe or a device; download it again")
    return FileIO(descriptor, "rb")


def read_bytes(path: Path, most: int) -> bytes:
    """Return the bytes of a file; without the file raise FileNotFoundError."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise BrokenModel(f"{path} has {size} bytes, and such a file has at most {most}; download it again")
        try:
            return file.read(most)
        except OSError as error:
            raise BrokenModel(f"{path} cannot be read: {error}") from error


def read_text(path: Path, most: int = MOST_TEXT) -> str:
    """Return the text of a file; without the file raise FileNotFoundError."""
    try:
        return read_bytes(path, most).decode()
    except ValueError as error:
        raise BrokenModel(f"{path} cannot be read: {error}") from error
