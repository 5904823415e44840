"""Copies between arrays of the host and a CUDA device: pinned buffers used in turn, each reused once its copy is done.

The device waits for these copies between passes, so the runtime is called directly: through torch they take twice as
long.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import torch
from torch import Tensor

TURNS = 3  # buffers: two may be filled while the device reads another
TO_DEVICE, TO_HOST = 1, 2  # cudaMemcpyKind


class Buffer:
    """Pinned memory of one turn, and the event of its last copy."""

    def __init__(self, turn: int, size: int, device: torch.device) -> None:
        self.turn, self.pinned = turn, torch.zeros(size, dtype=torch.int32, pin_memory=device.type == "cuda")
        self.ints: np.ndarray[Any, np.dtype[np.int32]] = self.pinned.numpy()
        self.address = self.pinned.data_ptr()
        self.over: Any = None  # event behind its last copy; None on a CPU
        if device.type == "cuda":
            self.over = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self.over.record()  # torch creates the event at its first record


class Staging:
    """Pinned buffers used in turn."""

    def __init__(self, device: torch.device, turns: int = TURNS) -> None:
        self._device, self._turn = device, 0
        self._buffers: list[Buffer | None] = [None] * turns
        self._unmarked: Buffer | None = None  # its event is still to be recorded
        self._runtime = Runtime.of(device) if device.type == "cuda" else None

    def buffer(self, size: int) -> Buffer:
        """Return a buffer of at least `size` ints, with no copy under way."""
        self.mark()
        turn = self._turn = (self._turn + 1) % len(self._buffers)
        buffer = self._buffers[turn]
        if buffer is not None and buffer.over is not None:
            buffer.over.synchronize()
        if buffer is None or len(buffer.ints) < size:
            buffer = self._buffers[turn] = Buffer(turn, 1 << max(size - 1, 0).bit_length(), self._device)
        return buffer

    def send(self, buffer: Buffer, to: Tensor, size: int) -> None:
        """Copy the buffer's first `size` ints, in stream order."""
        if self._runtime is None:
            to[:size].copy_(buffer.pinned[:size], non_blocking=True)
        else:
            self._runtime.copy(to.data_ptr(), buffer.address, 4 * size, TO_DEVICE)
        self._unmarked = buffer

    def fetch(self, of: Tensor) -> Buffer:
        """Return a buffer that will hold an int32 tensor, until its turn comes again."""
        buffer = self.buffer(len(of))
        if self._runtime is None:
            buffer.pinned[: len(of)].copy_(of, non_blocking=True)
        else:
            self._runtime.copy(buffer.address, of.data_ptr(), of.nbytes, TO_HOST)
        self._unmarked = buffer
        self.mark()
        return buffer

    def mark(self) -> None:
        """Record the event of the last copy: microseconds of the host, to be spent once the device is busy."""
        buffer, self._unmarked = self._unmarked, None
        if buffer is None or buffer.over is None:
            return
        if self._runtime is None:
            buffer.over.record()
        else:
            self._runtime.record(buffer.over.cuda_event)


class Runtime:
    """The CUDA runtime that torch has loaded, on the current stream."""

    def __init__(self, library: Any, device: int) -> None:
        self._library, self._device = library, device

    @staticmethod
    def of(device: torch.device) -> Runtime | None:
        """Load the library; None where it is not found."""
        try:
            library = ctypes.CDLL(f"libcudart.so.{(torch.version.cuda or '').partition('.')[0]}")
        except OSError:
            return None
        pointer = ctypes.c_void_p
        library.cudaMemcpyAsync.argtypes = [pointer, pointer, ctypes.c_size_t, ctypes.c_int, pointer]
        library.cudaEventRecord.argtypes = [pointer, pointer]
        return Runtime(library, torch.cuda.current_device() if device.index is None else device.index)

    def copy(self, to: int, of: int, size: int, kind: int) -> None:
        self._check(self._library.cudaMemcpyAsync(to, of, size, kind, self._stream))

    def record(self, event: int) -> None:
        self._check(self._library.cudaEventRecord(event, self._stream))

    @property
    def _stream(self) -> int:
        return torch._C._cuda_getCurrentRawStream(self._device)

    def _check(self, failed: int) -> None:
        if failed:
            raise RuntimeError(f"a copy to or from the device failed: CUDA error {failed}")
