"""Work of a CUDA device recorded as graphs and replayed: a launch or two instead of one for each kernel.

Recordings of one recorder share memory, so one is replayed at a time, and what it gave is over with the next.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import torch


class Recording:
    def __init__(self, graphs: list[Any], result: Any) -> None:
        self._graphs, self.result = graphs, result  # each replay writes it again

    def replay(self) -> None:
        for graph in self._graphs:
            graph.replay()


class Recorder:
    def __init__(self) -> None:
        self._alive: WeakSet[Recording] = WeakSet()
        self._pool, self._stream = None, None  # type: tuple[Any, Any]
        self._graphs: list[Any] = []  # of the recording under way

    def record(self, work: Callable[[], Any]) -> Recording:
        """Of what `work` launches; its kernels have run before, so that they are compiled. RuntimeError: it cannot be.

        Without `torch.cuda.graph`, which empties the allocator's caches first: that takes longer than recording.
        """
        if not self._alive:
            self._pool = torch.cuda.graph_pool_handle()  # it ends with the last graph that was recorded in it
        self._stream = self._stream or torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream), _no_collection():
            self._begin()
            try:
                result = work()
            finally:
                graphs, self._graphs = self._graphs, []
                graphs[-1].capture_end()
        torch.cuda.current_stream().wait_stream(self._stream)
        recording = Recording(graphs, result)
        self._alive.add(recording)
        return recording

    def cut(self) -> None:
        """What is recorded from here on is launched for itself: a device begins a graph when it has all of it."""
        if self._graphs:
            self._graphs[-1].capture_end()
            self._begin()

    def _begin(self) -> None:
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        self._graphs.append(graph)


@contextmanager
def _no_collection() -> Iterator[None]:
    """A graph found among garbage would be destroyed, which is not permitted meanwhile and ends the recording."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()
