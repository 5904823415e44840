"""Folders and files that appear whole: they are built beside their place under another name and renamed when complete.

A folder that is being built holds MARKER, locked by its writer. The next writer removes leftovers of killed ones, whose
MARKER is not locked. A user's folder has no MARKER. Where files cannot be locked, leftovers go after STALE_SECONDS.
"""

from __future__ import annotations

import contextlib
import enum
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from paceline.errors import InvalidParameter, PacelineError

PREFIX = "paceline-partial-"
MARKER = ".paceline-partial"
STALE_SECONDS = 24 * 3600


class Lock(enum.Enum):
    TAKEN = "taken"  # until the file is closed or the process ends
    HELD = "held by another process"
    UNAVAILABLE = "files cannot be locked here"  # on Windows and some network disks


def lock_file(file: IO[str], *, wait: bool = False) -> Lock:
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return Lock.HELD
    except (ImportError, OSError):
        return Lock.UNAVAILABLE
    return Lock.TAKEN


@contextlib.contextmanager
def disk_errors(refusal: Callable[[OSError], PacelineError]) -> Iterator[None]:
    """Raise `refusal` of an error of the disk in the block."""
    try:
        yield
    except BrokenPipeError:  # the terminal is closed
        raise
    except OSError as error:
        raise refusal(error) from error


@contextlib.contextmanager
def build_folder(target: Path, is_complete: Callable[[Path], bool] = lambda folder: False) -> Iterator[Path]:
    """Yield an empty folder that becomes `target` when the block ends and is removed when it raises. A target that
    another writer has completed meanwhile stays."""
    target.parent.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(target.parent)
    staging = target.parent / f"{PREFIX}{secrets.token_hex(4)}"
    staging.mkdir()
    try:
        with (staging / MARKER).open("w") as marker:
            lock_file(marker)
            yield staging
        _flush_to_disk(staging)
        (staging / MARKER).unlink()
        try:
            staging.rename(target)
        except OSError:
            if not is_complete(target):
                raise
    finally:
        shutil.rmtree(staging, ignore_errors=True)  # absent if it became the target


def refuse_existing(out: Path) -> None:
    with disk_errors(lambda error: _unwritable(out, error)), contextlib.suppress(FileNotFoundError):
        out.lstat()  # a broken link exists too
        raise InvalidParameter("out", f"{out} exists already; name a new folder")


@contextlib.contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Build the folder that a user named with --out; what is wrong with it is an error of this parameter."""
    refuse_existing(out)
    with disk_errors(lambda error: _unwritable(out, error)), build_folder(out) as staging:
        yield staging


@contextlib.contextmanager
def replace_file(path: Path) -> Iterator[Path]:
    """Yield the path of a file to write; it replaces `path` when the block ends and is removed when it raises."""
    staging = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        yield staging
        with staging.open("r+b") as file:
            os.fsync(file.fileno())
        staging.replace(path)
    finally:
        staging.unlink(missing_ok=True)


def replace_text(path: Path, text: str) -> None:
    with replace_file(path) as staging:
        staging.write_text(text, encoding="utf-8")


def _remove_leftovers(parent: Path) -> None:
    for marker in parent.glob(f"{PREFIX}*/{MARKER}"):
        with contextlib.suppress(OSError), marker.open("r+") as file:
            lock = lock_file(file)
            is_stale = lock is Lock.UNAVAILABLE and time.time() - marker.parent.stat().st_mtime > STALE_SECONDS
            if lock is Lock.TAKEN or is_stale:
                shutil.rmtree(marker.parent, ignore_errors=True)


def _flush_to_disk(folder: Path) -> None:
    """Write the files out before the rename: after a power cut the target is absent or whole."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("r+b") as file:
                os.fsync(file.fileno())


def _unwritable(out: Path, error: OSError) -> InvalidParameter:
    return InvalidParameter("out", f"{out} cannot be written ({error.strerror or error}); name a folder that can")
