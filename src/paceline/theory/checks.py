"""Checks of numbers that a formula takes; errors name the field."""

from __future__ import annotations

import math
from collections.abc import Sequence

from paceline.errors import InvalidParameter


def probability(field: str, value: float) -> float:
    if not 0 <= value <= 1:  # also refuses NaN
        raise InvalidParameter(field, f"must lie between 0 and 1, got {value}")
    return float(value)


def probabilities(field: str, values: Sequence[float]) -> list[float]:
    return [probability(field, value) for value in values]


def cost(field: str, value: float) -> float:
    if not (math.isfinite(value) and value >= 0):
        raise InvalidParameter(field, f"must be a finite number of 0 or more, got {value}")
    return float(value)


def positive(field: str, value: float) -> float:
    if not (math.isfinite(value) and value > 0):
        raise InvalidParameter(field, f"must be a finite number above 0, got {value}")
    return float(value)


def count(field: str, value: int, least: int = 0) -> int:
    if value < least:
        raise InvalidParameter(field, f"must be at least {least}, got {value}")
    return value
