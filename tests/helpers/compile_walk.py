"""Compiles every kernel for Hopper as a GPU's start would: `python -m tests.helpers.compile_walk`, not interpreted.

Prints the dotted names of the kernels. Compiled code stays in Triton's cache, so a second run takes seconds.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from tests.helpers.fake_cuda import fake_cuda
from tests.helpers.gpu_walk import further_kernels, small_engine

TARGET = GPUTarget("cuda", 90, 32)
BRANCHES = ("TREE", "DIRECT", "FLAT", "TAILS", "KIND", "SHIFT", "WINDOW")  # constants for which a kernel is other code


def compiling(compile_only: Any, note: Any, names: set[str]) -> Callable[..., None]:
    """Compile a kernel at its first launch with other branches; every launch is noted."""
    seen = set()

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        key = self.fn, *(bool(options.get(name)) for name in BRANCHES)
        if key not in seen:
            seen.add(key)
            names.add(f"{self.fn.__module__}.{self.fn.__name__}")
            with torch._C.DisableTorchFunction():
                compile_only(self, *args, grid=grid, warmup=True, **options)
        note(self, *args, grid=grid, warmup=warmup, **options)

    return run


def main() -> None:
    functions = {"target": lambda: TARGET, "device": lambda: 0, "stream": lambda device: 0}
    driver.set_active(SimpleNamespace(**{f"get_current_{name}": function for name, function in functions.items()}))
    names: set[str] = set()
    compile_only = JITFunction.run
    with fake_cuda(launch=False):
        JITFunction.run = compiling(compile_only, JITFunction.run, names)
        small_engine(torch.device("cuda"), torch.bfloat16, 64)
        further_kernels(torch.device("cuda"), torch.bfloat16)
    print(json.dumps(sorted(names)))


if __name__ == "__main__":
    main()
