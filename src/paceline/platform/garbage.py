"""When Python collects garbage (not during a step, nor during a capture), and when free memory goes back."""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress


class NoCollection:
    """Use `with`; not within itself."""

    def __enter__(self) -> None:
        self._before = gc.isenabled()
        gc.disable()

    def __exit__(self, *problem: object) -> None:
        if self._before:
            gc.enable()


@contextmanager
def no_collection() -> Iterator[None]:
    with NoCollection():
        yield


def expect_objects(count: int) -> None:
    """Raise the collector's threshold above `count` new objects. Else, with a large batch, the collector runs after
    each step, and from time to time over all objects, which takes as long as many steps."""
    young, *older = gc.get_threshold()
    if 0 < young < count:
        gc.set_threshold(count, *older)


def trim_heap() -> None:
    """Give free pages back: tensors of changing sizes leave holes in glibc's heap, which would grow for hours."""
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):  # another C library
            ctypes.CDLL(None).malloc_trim(0)
