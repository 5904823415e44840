"""A file of prompts and answers, one JSON object a line, that `paceline train --data` reads. Off by default.

A chat is written as its messages, a completion as its text. Tool calls and empty answers are left out, since `train`
cannot read them. Where requests have domains, a line names the answer's. The file is readable by its owner alone, and
only appended to.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from pathlib import Path
from typing import Any

from paceline.errors import InvalidParameter

log = logging.getLogger("paceline.server")
ROLES = ("system", "user", "assistant")
Messages = SequenceOf[Mapping[str, Any]]


class Capture:
    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = -1
        try:
            self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
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
        """Append a line in one write, so that servers may share a file. A full disk costs no request its answer."""
        if self._file < 0:
            return
        if domain:  # of several
            example["domain"] = domain
        try:
            os.write(self._file, (json.dumps(example, ensure_ascii=False) + "\n").encode("utf-8", "replace"))
        except OSError as error:
            log.error("nothing more is captured: %s cannot be written: %s", self.path, error.strerror)
            self.close()
