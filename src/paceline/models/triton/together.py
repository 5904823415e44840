"""Compiling kernels side by side: most of that happens outside Python, so threads help."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import triton
from triton.runtime.jit import JITFunction


@contextmanager
def compiled_together() -> Iterator[None]:
    """Whatever this thread launches in here gets compiled, several kernels at a time, and does not run."""
    launch, mine = JITFunction.run, threading.get_ident()

    def only_compile(self: Any, *args: Any, warmup: bool, **kwargs: Any) -> Any:
        return launch(self, *args, warmup=warmup or threading.get_ident() == mine, **kwargs)

    with ThreadPoolExecutor() as pool, triton.AsyncCompileMode(pool), patch.object(JITFunction, "run", only_compile):
        yield
