"""A limit to the threads of torch's own operations.

Between passes the engine works on small tensors: a row of logits, a few indices. Waking a second thread for them saves
little on a quiet machine and costs milliseconds on a busy one, where torch's idle threads spin beside those of the
native kernels.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def torch_threads(count: int | None) -> Iterator[None]:
    """Set the number of threads for the block; None: unchanged."""
    before = torch.get_num_threads()
    if count is None or count == before:
        yield
        return
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
