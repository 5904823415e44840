"""The hardware seam of verification: the kernels for a tensor's device; None: torch and numpy are used.

Called only by the pure functions of this package: verify, process, probabilities, draw, propose.
"""

from __future__ import annotations

import functools
from types import ModuleType

from torch import Tensor

from paceline.triton_support import require_triton


def kernels(tensor: Tensor) -> ModuleType | None:
    """The package `device`, for tensors it can work on."""
    return _device() if tensor.is_cuda else None


@functools.cache
def _device() -> ModuleType | None:
    try:
        require_triton()
        from paceline.verify import device
    except ImportError:  # no Triton that works here
        return None
    return device
