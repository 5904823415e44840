"""When Python collects garbage: not during a step, nor during a capture."""

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
    """Raise the collector's threshold above `count` new objects. Else, with a large batch, the collector runs after
    each step, and from time to time over all objects, which takes as long as many steps."""
    young, *older = gc.get_threshold()
    if 0 < young < count:
        gc.set_threshold(count, *older)
