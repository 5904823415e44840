"""A file of prompts and answers, one JSON object a line, that `paceline train --data` reads. Off by default.

A chat is written as its messages, a completion as its text. Tool calls and empty answers are left out, since `train`
cannot read them. Where requests have domains, a line names the answer's. The file is readable by its owner alone, and
only appended to.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from pathlib import Path
from typing import Any

from paceline.errors import InvalidParameter

log = logging.getLogger("paceline.server")
ROLES = ("system", "user", "assistant")
MOST_RECORD = 64 << 20  # bytes of a record that is looked for at the end of a file
BEGINNINGS = (b'{"messages": ', b'{"text": ')  # of the records that are written here
Messages = SequenceOf[Mapping[str, Any]]


class Capture:
    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = -1
        try:
            self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
            self._cut_torn_record()
        except OSError as error:
            raise InvalidParameter("capture", f"{path} cannot be written: {error.strerror}; name a file") from error

    def chat(self, answer: str, domain: str, messages: Messages) -> None:
        plain = [{"role": each["role"], "content": each.get("content")} for each in messages]
        readable = all(each["role"] in ROLES and each["content"] for each in plain)
        if readable and answer.strip() and not any("tool_calls" in each for each in messages):
            self._write({"messages": [*plain, {"role": "assistant", "content": answer}]}, domain)

    def text(self, prompt: str, answer: str, domain: str) -> None:
        if answer.strip():
            self._write({"text": prompt + answer}, domain)

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _write(self, example: dict[str, Any], domain: str) -> None:
        """Append a line, whole or not at all; servers may share a file. A full disk costs no request its answer."""
        if self._file < 0:
            return
        if domain:  # of several
            example["domain"] = domain
        record = (json.dumps(example, ensure_ascii=False) + "\n").encode("utf-8", "replace")
        try:
            with _locked(self._file):
                before, written = os.fstat(self._file).st_size, 0
                try:
                    while written < len(record):
                        written += os.write(self._file, record[written:])
                except OSError:
                    os.ftruncate(self._file, before)
                    raise
        except OSError as error:
            log.error("nothing more is captured: %s cannot be written: %s", self.path, error.strerror)
            self.close()

    def _cut_torn_record(self) -> None:
        """Cut off a last record without its end, which a killed server may leave; complete one that lacks its line end.
        Text of another form stays as it is."""
        with _locked(self._file):
            size = os.fstat(self._file).st_size
            tail = os.pread(self._file, MOST_RECORD, max(size - MOST_RECORD, 0)).rpartition(b"\n")[2]
            if not tail:
                return
            try:
                json.loads(tail)
            except ValueError:
                if any(tail.startswith(each) or each.startswith(tail) for each in BEGINNINGS):
                    os.ftruncate(self._file, size - len(tail))
                    log.warning("%s: its last record was not complete and is cut off", self.path)
                    return
            os.write(self._file, b"\n")


@contextlib.contextmanager
def _locked(file: int) -> Iterator[None]:
    """Keep other servers from writing to the file; where it cannot be locked, they may."""
    with contextlib.suppress(ImportError, OSError):
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX)
    try:
        yield
    finally:
        with contextlib.suppress(ImportError, OSError):
            import fcntl

            fcntl.flock(file, fcntl.LOCK_UN)
