"""Files of prompts or of training data: text, or lines of JSON objects, each in one of several forms.

`field` names the option in errors, and `origin` the line. No torch.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from paceline.errors import InvalidParameter, short_repr

log = logging.getLogger("paceline")
JSONL = (".jsonl", ".json", ".ndjson")


def read_file(path: Path, field: str) -> tuple[str, bool]:
    """Return the text, and whether its lines are JSON."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise InvalidParameter(field, f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InvalidParameter(field, f"{path} is not UTF-8 text") from error
    # Lines are JSON if the file's name says so, or if the text begins as no ordinary prompt does.
    return text, path.suffix in JSONL or text.lstrip().startswith('{"')


def numbered_lines(text: str) -> list[tuple[int, str]]:
    """Return the lines that are not empty, with their numbers from 1."""
    lines = re.split(r"\r\n|\n|\r", text)  # not splitlines: JSON strings may hold other line ends as they are
    return [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]


def without_torn_line(path: Path, text: str) -> str:
    """Return lines of JSON without a last one that a full disk or a kill cut off, which is counted in the log."""
    whole, _, last = text.rpartition("\n")
    try:
        if last.strip():
            json.loads(last)
    except (ValueError, RecursionError):
        if whole.strip():
            log.warning("%s: 1 record was cut off at its end, and is left out", path)
            return whole
    return text


def read_object(line: str, forms: Iterable[str], field: str, origin: str) -> tuple[str, dict[str, Any]]:
    """Return the form of a line, which is its only key among `forms`, and the whole object."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidParameter(field, f"{origin} is not JSON: {error}") from error
    named = [form for form in forms if form in value] if isinstance(value, dict) else []
    if len(named) != 1:
        raise InvalidParameter(field, f"{origin} must be an object with one of {', '.join(forms)}")
    return named[0], value


def some_text(value: Any, what: str, field: str, origin: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise InvalidParameter(field, f"{origin}: {what} must be some text, got {short_repr(value)}")
    try:
        value.encode()
    except UnicodeEncodeError:  # "\\ud800" in the JSON
        raise InvalidParameter(field, f"{origin}: {what} is not valid Unicode text") from None
    return value
