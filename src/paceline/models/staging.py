"""Between arrays of the host and a CUDA device: pinned buffers, used in turn, each again once its copy is over.

A device waits for these copies between passes, so the runtime is called directly: by torch they take twice as long.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import torch
from torch import Tensor

TURNS = 2  # one is filled while the device reads the other
TO_DEVICE, TO_HOST = 1, 2  # cudaMemcpyKind


class Buffer:
    def __init__(self, turn: int, size: int, device: torch.device) -> None:
        self.turn, self.pinned = turn, torch.zeros(size, dtype=torch.int32, pin_memory=device.type == "cuda")
        self.ints: np.ndarray[Any, np.dtype[np.int32]] = self.pinned.numpy()
        self.address = self.pinned.data_ptr()
        self.over: Any = None  # an event: when its last copy is
        if device.type == "cuda":
            self.over = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self.over.record()  # which makes it


class Staging:
    def __init__(self, device: torch.device, turns: int = TURNS) -> None:
        self._device, self._turn = device, 0
        self._buffers: list[Buffer | None] = [None] * turns
        self._runtime = _runtime() if device.type == "cuda" else None

    def buffer(self, size: int) -> Buffer:
        """One of at least so many ints that no copy is under way from or to."""
        turn = self._turn = (self._turn + 1) % len(self._buffers)
        buffer = self._buffers[turn]
        if buffer is not None and buffer.over is not None:
            buffer.over.synchronize()
        if buffer is None or len(buffer.ints) < size:
            buffer = self._buffers[turn] = Buffer(turn, 1 << max(size - 1, 0).bit_length(), self._device)
        return buffer

    def send(self, buffer: Buffer, to: Tensor, size: int) -> None:
        """So many ints of it, behind what the device has to do."""
        if self._runtime is None:
            _copy_by_torch(to[:size], buffer.pinned[:size], buffer)
        else:
            self._copy((to.data_ptr(), buffer.address, 4 * size, TO_DEVICE), to.device, buffer)

    def fetch(self, of: Tensor) -> Buffer:
        """A buffer that will hold all of an int32 tensor; it does until as many others as there are turns are used."""
        buffer = self.buffer(len(of))
        if self._runtime is None:
            _copy_by_torch(buffer.pinned[: len(of)], of, buffer)
        else:
            self._copy((buffer.address, of.data_ptr(), of.nbytes, TO_HOST), of.device, buffer)
        return buffer

    def _copy(self, what: tuple[int, int, int, int], device: torch.device, buffer: Buffer) -> None:
        assert self._runtime is not None
        stream = torch._C._cuda_getCurrentRawStream(device.index)
        failed = self._runtime.cudaMemcpyAsync(*what, stream)
        failed = failed or self._runtime.cudaEventRecord(buffer.over.cuda_event, stream)
        if failed:
            raise RuntimeError(f"a copy to or from {device} failed: CUDA error {failed}")


def _copy_by_torch(to: Tensor, of: Tensor, buffer: Buffer) -> None:
    to.copy_(of, non_blocking=True)
    if buffer.over is not None:
        buffer.over.record()


def _runtime() -> ctypes.CDLL | None:
    """The CUDA runtime that torch has loaded; None where it is not to be found, and torch copies."""
    try:
        runtime = ctypes.CDLL(f"libcudart.so.{(torch.version.cuda or '').partition('.')[0]}")
    except OSError:
        return None
    pointer = ctypes.c_void_p
    runtime.cudaMemcpyAsync.argtypes = [pointer, pointer, ctypes.c_size_t, ctypes.c_int, pointer]
    runtime.cudaEventRecord.argtypes = [pointer, pointer]
    return runtime
