"""Errors of users' settings, by the field that they name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from paceline.errors import InvalidParameter


@contextmanager
def refuses(field: str) -> Iterator[None]:
    with pytest.raises(InvalidParameter) as refused:
        yield
    assert refused.value.field == field
