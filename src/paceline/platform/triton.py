"""Whether Triton can compile here: it builds a small C library for each process's first launch.

Every seam that imports Triton kernels for a GPU calls `require_triton` first, so all of them choose alike.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import sysconfig
from pathlib import Path


def require_triton() -> None:
    """Raises ImportError, which says what to do, where kernels could be imported but never launched.

    PACELINE_KERNELS=triton insists: a compile cache filled elsewhere needs no compiler.
    """
    if os.environ.get("PACELINE_KERNELS", "") != "triton" and (problem := triton_problem()):
        raise ImportError("; ".join(problem))


@functools.cache
def triton_problem() -> tuple[str, str] | None:
    """What is missing, and what to do about it."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed", "pip install triton"
    if os.environ.get("TRITON_INTERPRET", "") == "1":
        return None
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        return "Triton finds no C compiler", "install gcc, or set CC to one"
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").exists():
        return "Triton finds no Python.h", "install this Python's headers (python3-dev, python3-devel)"
    return None
