"""Errors asserted by class and field: the text of messages is in project/messages.txt alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from paceline.errors import InvalidParameter


@contextmanager
def refused(field: str) -> Iterator[pytest.ExceptionInfo[InvalidParameter]]:
    """Expect the block to refuse a value of this parameter."""
    with pytest.raises(InvalidParameter) as caught:
        yield caught
    assert caught.value.field == field
