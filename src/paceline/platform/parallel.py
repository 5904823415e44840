"""Kernels of a drafter compiled several at a time, where there is something to compile."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch


def compile_together(device: torch.device, works: Iterable[Callable[[], object]]) -> None:
    """Our kernels that these launch on a GPU are compiled, several at a time, and do not run; elsewhere there are none
    to compile."""
    if device.type != "cuda":
        return
    from paceline.platform.parallel_compile import parallel_compile

    with parallel_compile():
        for work in works:
            work()
