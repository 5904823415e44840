"""Options of a trainee (--set): dataclasses whose numbers have a range, checked by name before anything is trained."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import Field, field, fields
from types import MappingProxyType
from typing import Any

from paceline.errors import InvalidParameter

MOST_WEIGHT = 1000.0  # of a loss
MOST_TOKENS = 1 << 31


def between(least: float, most: float, default: float) -> Any:
    """A field that takes numbers of the default's type from `least` to `most`."""
    return field(default=default, metadata={"least": least, "most": most})


def options_of(kind: Any, sizes: Mapping[str, Any], fixed: Mapping[str, Any] = MappingProxyType({})) -> Any:
    """`fixed`: what the method does not leave open."""
    known = {field.name: field for field in fields(kind) if field.name not in fixed}
    for name, value in sizes.items():
        if name not in known:
            raise InvalidParameter(name, f"means nothing to this method; it has {', '.join(sorted(known))}")
        _check(known[name], value)
    return kind(**sizes, **fixed)


def _check(option: Field[Any], value: Any) -> None:
    if type(option.default) is bool:
        if type(value) is not bool:
            raise InvalidParameter(option.name, f"must be true or false, got {value!r}")
        return
    whole, (least, most) = type(option.default) is int, (option.metadata[end] for end in ("least", "most"))
    numbers = (int,) if whole else (int, float)
    if type(value) not in numbers or not least <= value <= most:
        kind = "whole number" if whole else "number"
        raise InvalidParameter(option.name, f"must be a {kind} from {least} to {most}, got {value!r}")
