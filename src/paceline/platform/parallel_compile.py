"""Compiles kernels in several threads: most of the work runs outside Python."""

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
def parallel_compile() -> Iterator[None]:
    """Kernels that this thread launches inside are compiled, several at a time, and do not run."""
    launch, mine = JITFunction.run, threading.get_ident()

    def only_compile(self: Any, *args: Any, warmup: bool, **kwargs: Any) -> Any:
        return launch(self, *args, warmup=warmup or threading.get_ident() == mine, **kwargs)

    with ThreadPoolExecutor() as pool, triton.AsyncCompileMode(pool), patch.object(JITFunction, "run", only_compile):
        yield
