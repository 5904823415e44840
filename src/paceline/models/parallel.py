"""Kernels of a drafter compiled several at a time, where there is something to compile."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def compiling(device: torch.device) -> Iterator[None]:
    """On a GPU: our kernels launched inside are compiled, several at a time, and do not run. Else: they run."""
    if device.type != "cuda":
        yield
        return
    from paceline.models.triton.parallel_compile import parallel_compile

    with parallel_compile():
        yield
