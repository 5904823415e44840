"""Log lines of both processes: text, or one JSON object a line."""

from __future__ import annotations

import json
import logging
import re
import sys

OWN = "paceline"


# Characters that move a terminal's cursor, end a line or turn the direction of text: a client may send them.
_CONTROLS = re.compile("[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def escaped(text: str) -> str:
    return _CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


class TextFormatter(logging.Formatter):
    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = escaped(record.message)
        return super().formatMessage(record)


class JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        entry = {"time": self.formatTime(record), "level": record.levelname, "message": record.getMessage()}
        entry |= getattr(record, "fields", {})
        return json.dumps({name: escaped(each) if isinstance(each, str) else each for name, each in entry.items()})


def set_up_logs(*, as_json: bool, text: str, levels: dict[str, int]) -> None:
    """Send the loggers' lines to stderr. `text`: the format of lines that are no JSON; `levels`: by logger."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if as_json else TextFormatter(text))
    for name, level in levels.items():
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level)


def log_level() -> int:
    return logging.getLogger(OWN).getEffectiveLevel()


def logs_json() -> bool:
    return any(isinstance(handler.formatter, JsonFormatter) for handler in logging.getLogger(OWN).handlers)
