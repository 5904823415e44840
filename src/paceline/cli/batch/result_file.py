"""The file of results: one JSON line each, appended by one write, so that a killed run leaves whole lines.

At most the last line can be torn (the disk was full, the machine went down): it is dropped when the file is opened
again. No line occurs twice, since a lock keeps a second run out and every line carries the id of its request.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from paceline.errors import InvalidParameter, PacelineError

START = b'{"id": "'  # beginning of every line; a torn line that begins otherwise is another program's


class ResultFile:
    def __init__(self, path: Path, ids: Sequence[str]) -> None:
        """`ids`: of all requests, in the order of the prompts."""
        self.path, self._order = path, ids
        self.done: dict[str, bytes] = {}  # lines by id, in the order of the file
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        except OSError as error:
            raise InvalidParameter("out", f"cannot write {path}: {error.strerror}") from None
        try:
            self._lock()
            self._read()
        except BaseException:
            os.close(self._file)
            raise

    def __enter__(self) -> ResultFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        os.close(self._file)

    def _lock(self) -> None:
        if not stat.S_ISREG(os.fstat(self._file).st_mode):
            raise InvalidParameter("out", f"{self.path} is not a regular file, which a later run could go on with")
        with contextlib.suppress(ImportError, OSError):  # locks are not on every platform, nor on every file system
            import fcntl

            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise InvalidParameter("out", f"another run is writing to {self.path}; wait for its end") from None

    def _read(self) -> None:
        content = self.path.read_bytes()
        *whole, torn = content.split(b"\n")
        known = set(self._order)
        for number, line in enumerate(whole, start=1):
            name = _id(line)
            if name is None:
                raise InvalidParameter("out", f"line {number} of {self.path} is no result; choose another file")
            if name not in known:
                problem = f"line {number} of {self.path} answers another prompt or has other settings"
                raise InvalidParameter("out", f"{problem}; choose another file, or remove this one")
            self.done[name] = line
        if not (torn.startswith(START) or START.startswith(torn)):
            raise InvalidParameter("out", f"the end of {self.path} is no result; choose another file")
        if torn:
            os.ftruncate(self._file, len(content) - len(torn))

    def append(self, result: dict[str, Any]) -> None:
        # A lone surrogate has no UTF-8; replaced by a backslash and its number, it is JSON's own escape.
        line = json.dumps(result, ensure_ascii=False).encode(errors="backslashreplace")
        size = os.fstat(self._file).st_size
        try:
            _write_all(self._file, line + b"\n")
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, size)
            problem = f"cannot write {self.path}: {error.strerror}; {len(self.done)} answers are in it"
            raise PacelineError(f"{problem}, and the same command goes on from there") from None
        self.done[result["id"]] = line

    def sort(self) -> None:
        """Sort the lines, which were written when each answer ended, into the order of the prompts."""
        wanted = [name for name in self._order if name in self.done]
        if list(self.done) == wanted:
            return
        target = self.path.resolve()
        draft = target.with_name(f".{target.name}.sorted")
        try:
            draft.write_bytes(b"".join(self.done[name] + b"\n" for name in wanted))
            draft.chmod(stat.S_IMODE(os.fstat(self._file).st_mode))
            draft.replace(target)
        except OSError:  # no room for a second copy: only the order is lost
            draft.unlink(missing_ok=True)


def _id(line: bytes) -> str | None:
    try:
        result = json.loads(line)
    except ValueError:
        return None
    name = result.get("id") if isinstance(result, dict) else None
    return name if isinstance(name, str) else None


def _write_all(file: int, data: bytes) -> None:
    while data:
        data = data[os.write(file, data) :]
