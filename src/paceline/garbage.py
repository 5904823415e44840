"""When Python looks for garbage: not in the midst of a step, nor of a recording."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_collection() -> Iterator[None]:
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


def expect_objects(count: int) -> None:
    """So many new objects at a time are no sign of garbage. Else a large batch has the collector run after each step,
    and from time to time through all there is, which takes as long as many steps."""
    young, *older = gc.get_threshold()
    if 0 < young < count:
        gc.set_threshold(count, *older)
