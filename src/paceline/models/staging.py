"""From arrays of the host to a CUDA device: pinned buffers, filled in turn, each again once the device has read it.

A device waits for this copy before every pass, so the runtime is called directly: by torch it takes twice as long.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import torch
from torch import Tensor

TURNS = 2  # one is filled while the device reads the other
TO_DEVICE = 1  # cudaMemcpyHostToDevice


class Buffer:
    def __init__(self, turn: int, size: int, device: torch.device) -> None:
        self.turn, self.pinned = turn, torch.zeros(size, dtype=torch.int32, pin_memory=device.type == "cuda")
        self.ints: np.ndarray[Any, np.dtype[np.int32]] = self.pinned.numpy()
        self.address = self.pinned.data_ptr()
        self.read: Any = None  # when the device has read it
        if device.type == "cuda":
            self.read = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self.read.record()  # which makes it


class Staging:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: list[Buffer | None] = [None] * TURNS
        self._turn = 0
        self._runtime = _runtime() if device.type == "cuda" else None

    def buffer(self, size: int) -> Buffer:
        """One of at least so many ints that the device does not read any more."""
        turn = self._turn = (self._turn + 1) % TURNS
        buffer = self._buffers[turn]
        if buffer is not None and buffer.read is not None:
            buffer.read.synchronize()
        if buffer is None or len(buffer.ints) < size:
            buffer = self._buffers[turn] = Buffer(turn, size, self._device)
        return buffer

    def send(self, buffer: Buffer, to: Tensor, size: int) -> None:
        """So many ints of it, behind what the device has to do."""
        if self._runtime is None:
            to[:size].copy_(buffer.pinned[:size], non_blocking=True)
            if buffer.read is not None:
                buffer.read.record()
            return
        stream = torch._C._cuda_getCurrentRawStream(to.device.index)
        failed = self._runtime.cudaMemcpyAsync(to.data_ptr(), buffer.address, 4 * size, TO_DEVICE, stream)
        failed = failed or self._runtime.cudaEventRecord(buffer.read.cuda_event, stream)
        if failed:
            raise RuntimeError(f"a copy to {to.device} failed: CUDA error {failed}")


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
