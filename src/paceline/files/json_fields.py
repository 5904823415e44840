"""Typed fields of a JSON object that was read from a model's file: every error names the file and the key.

A key that is absent or null has its default; without a default it is an error. A text is never a flag: "false" is
refused, not true.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from paceline.errors import BrokenModel, UnsupportedModel, short_repr
from paceline.files.regular import read_text

Json = dict[str, Any]
MAX_INT = 2**31 - 1


def read_json(path: Path, default: Json | None = None, hint: Callable[[Path], str] = lambda folder: "") -> Json:
    """Return the object in a file. Without the file return `default`, else raise an error that ends in the hint for the
    folder."""
    try:
        value = json.loads(read_text(path))
    except FileNotFoundError as error:
        if default is not None:
            return default
        raise BrokenModel(f"{path.parent} holds no {path.name}{hint(path.parent)}") from error
    except RecursionError as error:
        raise BrokenModel(f"{path} cannot be read: it is nested too deeply for a model's file") from error
    except (OSError, ValueError) as error:
        raise BrokenModel(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise BrokenModel(f"{path} must hold a JSON object")
    return value


class JsonFields:
    """The fields of one object. `label` is how messages spell a key, such as "{} of quantization_config"."""

    def __init__(self, values: Json, source: str, label: str = "{}") -> None:
        self.values, self.source, self.label = values, source, label

    def wrong(self, key: str, expected: str) -> BrokenModel:
        name, value = self.label.format(key), short_repr(self.values.get(key))
        return BrokenModel(f"{self.source}: {name} must be {expected}, found {value}")

    def integer(self, key: str, default: int | None = None, *, least: int = 1, most: int = MAX_INT) -> int:
        value = self._value(key, default)
        if type(value) is not int or not least <= value <= most:
            kind = "a positive integer up to" if least == 1 else f"an integer from {least} to"
            raise self.wrong(key, f"{kind} {most}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._value(key, default)
        if type(value) not in (int, float) or not 0 < value <= sys.float_info.max:
            raise self.wrong(key, "a positive number")
        return float(value)

    def amount(self, key: str) -> float:
        """Return a number from 0; 0 where there is none."""
        return 0.0 if self.values.get(key) in (None, 0) else self.number(key)

    def flag(self, key: str, default: bool = False) -> bool:
        value = self._value(key, default)
        if type(value) is not bool:
            raise self.wrong(key, "true or false without quotation marks")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self._value(key, default)
        if not isinstance(value, str):
            raise self.wrong(key, "text")
        return value

    def names(self, key: str) -> tuple[str, ...]:
        value = self._value(key, ())
        if not isinstance(value, (list, tuple)) or not all(isinstance(name, str) for name in value):
            raise self.wrong(key, "a list of names")
        return tuple(value)

    def integers(self, key: str, expected: str) -> tuple[int, ...]:
        """Return an integer or a list of integers from 0; () where there are none."""
        value = self._value(key, ())
        values = value if isinstance(value, (list, tuple)) else (value,)
        if not all(type(one) is int and one >= 0 for one in values):
            raise self.wrong(key, expected)
        return tuple(values)

    def section(self, key: str) -> JsonFields:
        """Return the object under a key; it is empty where there is none."""
        value = self._value(key, {})
        if not isinstance(value, dict):
            raise self.wrong(key, "an object")
        return JsonFields(value, self.source, self.label)

    def refuse_options(self, neutral: Mapping[str, Any]) -> None:
        """Raise for the first option that is set to another value than its neutral one."""
        for key, value in neutral.items():
            if self.values.get(key) not in (None, value):
                raise UnsupportedModel(f"{self.source}: the option {self.label.format(key)} is not supported")

    def _value(self, key: str, default: Any) -> Any:
        value = self.values.get(key)
        if value is not None:
            return value
        if default is None:
            raise BrokenModel(f"{self.source}: the key {self.label.format(key)} is missing")
        return default
