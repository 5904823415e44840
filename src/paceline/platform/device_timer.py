"""Seconds of launched work on its device, measured without waiting for it."""

from __future__ import annotations

import time
from types import TracebackType

import torch


class Stopwatch:
    """Context manager around launches; `seconds` is read once the launched work is known to be finished."""

    def __init__(self, on_cuda: bool) -> None:
        self._events = [torch.cuda.Event(enable_timing=True) for _ in "ab"] if on_cuda else None  # type: ignore[no-untyped-call]
        self._begun = self._ended = 0.0

    def __enter__(self) -> Stopwatch:
        self._begun = time.perf_counter()
        if self._events is not None:
            self._events[0].record()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended = time.perf_counter()
        if self._events is not None:
            self._events[1].record()

    @property
    def seconds(self) -> float:
        if self._events is None:
            return self._ended - self._begun
        return 1e-3 * float(self._events[0].elapsed_time(self._events[1]))
