"""For modules that test kernels of CUDA on a CPU, by Triton's interpreter."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest


def require_interpreter() -> None:
    """Called before the kernels are imported: skips the module where they are not interpreted."""
    triton = pytest.importorskip("triton", reason="triton is not installed: the CUDA kernels are not tested")
    if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7):
        pytest.skip("triton's interpreter works with this numpy from 3.7 on", allow_module_level=True)
    if not triton.knobs.runtime.interpret:
        pytest.skip("where there is a CUDA device, nothing is interpreted", allow_module_level=True)
    patch_language_once()


def patch_language_once() -> None:
    """The interpreter patches triton.language again at every call of a kernel or its helper: here once for all."""
    import triton.language as tl
    from triton.runtime import interpreter

    if interpreter._patch_lang.__module__ == __name__:
        return
    inside = {"tl": tl, "core": tl.core}
    exec("def sees_the_language(): pass", inside)
    interpreter._patch_lang(inside["sees_the_language"])
    interpreter._patch_lang = _already_patched
    interpreter.np = _NumpyInOrder()


def _already_patched(fn: object) -> object:
    from triton.runtime import interpreter

    return interpreter._LangPatchScope()


class _NumpyInOrder:
    """numpy, but for matrix products: BLAS sums in an order that depends on the number of rows (on a Zen 5 for any of
    them), and a GPU's tensor cores do not. Here k is summed in order, for each element alone."""

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)

    @staticmethod
    def matmul(a: Any, b: Any, dtype: Any = None) -> Any:
        a, b = np.asarray(a, dtype), np.asarray(b, dtype)
        total = a[..., :, :1] * b[..., :1, :]
        for k in range(1, a.shape[-1]):
            total += a[..., :, k : k + 1] * b[..., k : k + 1, :]
        return total
