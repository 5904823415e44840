"""Garbage collection, held back during steps and captures, and the return of free memory to the system."""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress


class NoCollection:
    """Context manager that holds the collector back; it does not nest."""

    def __enter__(self) -> None:
        self._was_enabled = gc.isenabled()
        gc.disable()

    def __exit__(self, *problem: object) -> None:
        if self._was_enabled:
            gc.enable()


@contextmanager
def no_collection() -> Iterator[None]:
    with NoCollection():
        yield


def expect_objects(count: int) -> None:
    """Raise the collector's threshold above `count` new objects: else it would run after each step of a large batch,
    and sometimes run a full collection, which takes as long as many steps."""
    young, *older = gc.get_threshold()
    if 0 < young < count:
        gc.set_threshold(count, *older)


def trim_heap() -> None:
    """Return free pages: tensors of changing sizes fragment glibc's heap, which would grow for hours."""
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):  # another C library
            ctypes.CDLL(None).malloc_trim(0)
