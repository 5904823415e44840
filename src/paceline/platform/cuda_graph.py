"""CUDA graphs: work captured once and replayed, one launch instead of one for each kernel.

The graphs of one recorder share memory, so one is replayed at a time, and its result is valid until the next replay.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import torch

from paceline.platform.garbage import no_collection

log = logging.getLogger("paceline")


class CompileCounter:
    """A count of the Triton kernels that are compiled, or loaded from the compile cache, from `start` on."""

    def __init__(self) -> None:
        self.count = 0

    def start(self) -> None:
        try:
            from triton import knobs
        except ImportError:  # nothing can be compiled
            return
        before, counter = knobs.runtime.jit_post_compile_hook, weakref.ref(self)

        def compiled(**about: Any) -> bool | None:
            if (own := counter()) is not None:
                own.count += 1
            return None if before is None else before(**about)

        knobs.runtime.jit_post_compile_hook = compiled


class CudaGraph:
    """A captured graph and its result."""

    def __init__(self, graph: Any, result: Any) -> None:
        self.replay: Callable[[], None] = graph.replay
        self.result = result  # written again by each replay


def warn_uncaptured(work: str, problem: RuntimeError) -> None:
    """Report work that could not be captured."""
    reason = str(problem).partition("\n")[0]
    log.warning("%s cannot be captured, and runs kernel by kernel: %s", work, reason)


class GraphRecorder:
    def __init__(self) -> None:
        self._alive: WeakSet[CudaGraph] = WeakSet()
        self._pool, self._stream = None, None  # type: tuple[Any, Any]

    @no_collection()
    def capture(self, work: Callable[[], Any]) -> CudaGraph:
        """Capture the launches of `work`, whose kernels have run before and so are compiled. Raises RuntimeError.

        `torch.cuda.graph` would empty the allocator's caches first, which takes longer than the capture.
        No garbage is collected during it: to destroy a dead graph is not permitted then and ends the capture, and to
        destroy a recorder's last graph would free the memory that the next one is captured in.
        """
        if not self._alive:
            self._pool = torch.cuda.graph_pool_handle()  # freed with the last graph that was captured in it
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
        captured = CudaGraph(graph, result)
        self._alive.add(captured)
        return captured
