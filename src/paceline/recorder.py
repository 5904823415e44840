"""Work of a CUDA device recorded as a graph and replayed: one launch instead of one for each kernel.

Recordings of one recorder share memory, so one is replayed at a time, and what it gave is over with the next.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import torch

from paceline.garbage import no_collection


class Recording:
    def __init__(self, graph: Any, result: Any) -> None:
        self.replay: Callable[[], None] = graph.replay
        self.result = result  # each replay writes it again


class Recorder:
    def __init__(self) -> None:
        self._alive: WeakSet[Recording] = WeakSet()
        self._pool, self._stream = None, None  # type: tuple[Any, Any]

    @no_collection()
    def record(self, work: Callable[[], Any]) -> Recording:
        """Of what `work` launches; its kernels have run before, so that they are compiled. RuntimeError: it cannot be.

        Without `torch.cuda.graph`, which empties the allocator's caches first: that takes longer than recording.
        Nor is garbage collected meanwhile: a graph found in it would be destroyed, which is not permitted while another
        is recorded and ends that; the last of a recorder's would take the memory with it that the next is recorded in.
        """
        if not self._alive:
            self._pool = torch.cuda.graph_pool_handle()  # it ends with the last graph that was recorded in it
        self._stream = self._stream or torch.cuda.Stream()  # type: ignore[no-untyped-call]
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                result = work()
            finally:
                graph.capture_end()
        torch.cuda.current_stream().wait_stream(self._stream)
        recording = Recording(graph, result)
        self._alive.add(recording)
        return recording
