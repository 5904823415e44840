"""Triton here: whether it can compile (it builds a small C library for each process's first launch), and several
kernels compiled at a time.

Every seam that imports Triton kernels for a GPU calls `require_triton` first, so all of them choose alike.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import sysconfig
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch


def require_triton() -> None:
    """Raise ImportError, which says what to do, where kernels could be imported but never launched.

    PACELINE_KERNELS=triton insists: a compile cache filled elsewhere needs no compiler.
    """
    if os.environ.get("PACELINE_KERNELS", "") != "triton" and (problem := triton_problem()):
        raise ImportError("; ".join(problem))


@functools.cache
def triton_problem() -> tuple[str, str] | None:
    """Return the problem and its remedy; None where Triton can compile."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed", "pip install triton"
    if os.environ.get("TRITON_INTERPRET", "") == "1":
        return None
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        return "Triton finds no C compiler", "install gcc, or set CC to one"
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").exists():
        return "Triton finds no Python.h", "install this Python's headers (python3-dev, python3-devel)"
    return None


@contextmanager
def parallel_compile() -> Iterator[None]:
    """Compile the kernels that this thread launches in the block, several at a time; they do not run.

    Most of the work runs outside Python, so threads are enough.
    """
    import triton
    from triton.runtime.jit import JITFunction

    launch, thread = JITFunction.run, threading.get_ident()

    def only_compile(self: Any, *args: Any, warmup: bool, **kwargs: Any) -> Any:
        return launch(self, *args, warmup=warmup or threading.get_ident() == thread, **kwargs)

    with ThreadPoolExecutor() as pool, triton.AsyncCompileMode(pool), patch.object(JITFunction, "run", only_compile):
        yield


def compile_together(device: torch.device, works: Iterable[Callable[[], object]]) -> None:
    """Compile the kernels that these launch on a GPU; elsewhere there are none to compile."""
    if device.type != "cuda":
        return
    with parallel_compile():
        for work in works:
            work()
