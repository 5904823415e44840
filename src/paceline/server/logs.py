"""Log lines of both processes: text, or one JSON object a line."""

from __future__ import annotations

import json
import logging
import sys

OWN = "paceline"


class JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        entry = {"time": self.formatTime(record), "level": record.levelname, "message": record.getMessage()}
        return json.dumps(entry | getattr(record, "fields", {}))


def set_up_logs(*, as_json: bool, text: str, levels: dict[str, int]) -> None:
    """Send the loggers' lines to stderr. `text`: the format of lines that are no JSON; `levels`: by logger."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if as_json else logging.Formatter(text))
    for name, level in levels.items():
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level)


def log_level() -> int:
    return logging.getLogger(OWN).getEffectiveLevel()


def logs_json() -> bool:
    return any(isinstance(handler.formatter, JsonFormatter) for handler in logging.getLogger(OWN).handlers)
