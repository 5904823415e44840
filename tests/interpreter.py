"""For modules that test kernels of CUDA on a CPU, by Triton's interpreter."""

from __future__ import annotations

import pytest


def require_interpreter() -> None:
    """Called before the kernels are imported: skips the module where they are not interpreted."""
    triton = pytest.importorskip("triton", reason="triton is not installed: the CUDA kernels are not tested")
    if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7):
        pytest.skip("triton's interpreter works with this numpy from 3.7 on", allow_module_level=True)
    if not triton.knobs.runtime.interpret:
        pytest.skip("where there is a CUDA device, nothing is interpreted", allow_module_level=True)
