"""A folder that is written as a whole: beside its place, under another name, and renamed once nothing is missing.

MARKER, locked by its writer, tells the leftover of a killed writer from a user's folder and from one that is being
written. Where locks do not work leftovers stay, and block nothing.
"""

from __future__ import annotations

import contextlib
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from paceline.errors import InvalidParameter

PREFIX = "paceline-partial-"
MARKER = ".paceline-partial"


def refuse_existing(out: Path) -> None:
    with _disk_errors(out), contextlib.suppress(FileNotFoundError):
        out.lstat()  # a broken link exists too
        raise InvalidParameter("out", f"{out} exists already; name a new folder")


@contextlib.contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A folder to fill. It becomes `out` when the block ends, and is removed when the block raises."""
    refuse_existing(out)
    with _disk_errors(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        for marker in out.parent.glob(f"{PREFIX}*/{MARKER}"):
            _remove_leftover(marker)
        staging = out.parent / f"{PREFIX}{secrets.token_hex(4)}"
        staging.mkdir()
        try:
            with (staging / MARKER).open("w") as marker_file:
                _lock(marker_file)
                yield staging
            (staging / MARKER).unlink()
            staging.rename(out)
        finally:
            shutil.rmtree(staging, ignore_errors=True)  # absent if it became `out`


def _remove_leftover(marker: Path) -> None:
    with contextlib.suppress(OSError), marker.open("r+") as file:
        if _lock(file):
            shutil.rmtree(marker.parent, ignore_errors=True)


def _lock(file: IO[str]) -> bool:
    """Whether it was free. The system frees it when the process ends."""
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (ImportError, OSError):  # Windows; held by another process, or a file system without locks
        return False
    return True


@contextlib.contextmanager
def _disk_errors(out: Path) -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:  # of the terminal, not of the disk
        raise
    except OSError as error:
        raise InvalidParameter(
            "out", f"{out} cannot be written ({error.strerror or error}); name a folder that can"
        ) from error
