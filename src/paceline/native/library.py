"""The C++ library (kernels.cpp): its variants by instruction set, and the signatures of its functions.

The libraries are plain C, opened by path, with threads of their own (pool.h has the reason against OpenMP).
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from ctypes import c_double, c_float, c_int, c_int64, c_long, c_uint64, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

ABI = 13  # plan.h
VARIANTS = ("avx512vnni", "avx512", "avx2", "baseline")  # best first; a machine that runs one runs those after it

SIGNATURES: dict[str, tuple[type | None, list[type]]] = {
    "abi": (c_long, []),
    "runs_here": (c_int, []),
    "panel_bytes": (c_long, [c_int64, c_long, c_long]),
    "pack": (None, [c_int64] + [c_void_p] * 2 + [c_long] * 2 + [c_int]),
    "linear": (c_int, [c_void_p] * 3 + [c_long, c_int]),
    "gather": (None, [c_void_p] * 3 + [c_long, c_int]),
    "rms_norm": (None, [c_void_p] * 4 + [c_long] * 2 + [c_float, c_int, c_int]),
    "cap": (None, [c_void_p] + [c_long] * 2 + [c_float, c_int]),
    "gate": (None, [c_void_p] * 2 + [c_long] * 3 + [c_int]),
    "rope_and_store": (c_int, [c_void_p] * 7 + [c_int]),
    "attention": (c_int, [c_void_p] * 5 + [c_long, c_int]),
    "layers": (c_int, [c_void_p] * 2 + [c_long] + [c_void_p] * 2 + [c_int, c_void_p, c_int]),
    "pass": (c_int, [c_void_p] * 3 + [c_long] + [c_void_p] * 2 + [c_long] + [c_void_p] * 2 + [c_int]),
    "store_in_ring": (None, [c_void_p] * 3 + [c_long, c_void_p, c_long]),
    "write_context_kv": (c_int, [c_void_p] * 2 + [c_long] + [c_void_p] * 2 + [c_int]),
    "draft_blocks": (c_int, [c_void_p] * 2 + [c_int]),
    "draw_token": (c_long, [c_void_p, c_long, c_float, c_float, c_long, c_double, c_double, c_uint64]),
    "top_tokens": (None, [c_void_p] + [c_long] * 3 + [c_void_p, c_int]),
    "index_extend": (None, [c_void_p] * 2 + [c_long]),
    "lookup_append": (None, [c_void_p] * 2 + [c_long]),
    "lookup_find": (None, [c_void_p] * 2 + [c_long]),
    "successors_move": (None, [c_void_p] * 2),
    "recycling_teach": (None, [c_void_p] * 3 + [c_int64, c_void_p]),
    "lookup_draft": (c_long, [c_void_p, c_void_p, c_long, c_long, c_void_p]),
}


@dataclass(frozen=True)
class Library:
    variant: str
    path: Path
    handle: ctypes.CDLL

    def function(self, name: str) -> Callable[..., Any]:
        function = self.handle[f"paceline_{name}"]
        function.restype, function.argtypes = SIGNATURES[name]
        return function


def load_library() -> Library | None:
    """Return the library for this processor, or None; `library_status` gives the reason."""
    return best_library()[0]


def library_status() -> str:
    """Return one line for `paceline doctor`."""
    return best_library()[1]


def runnable_variants() -> tuple[str, ...]:
    capability = torch.backends.cpu.get_cpu_capability()
    variants = VARIANTS[{"AVX512": 0, "AVX2": 2}.get(capability, 3) :]
    return tuple(variant for variant in variants if variant != "avx512vnni" or _has_vnni())


def _has_vnni() -> bool:
    try:
        return bool(open_library("avx512vnni").function("runs_here")())
    except OSError:
        return True  # best_library opens it again and reports the reason


@functools.cache
def best_library() -> tuple[Library | None, str]:
    """Return the best library of this processor, if one can be opened, and a line about it."""
    problems = []
    for variant in runnable_variants():
        try:
            library = open_library(variant)
        except OSError as error:
            problems.append(str(error))
        else:
            return library, f"native-{variant} ({library.path.name})"
    return None, f"no native kernels: {problems[0]}"


@functools.cache
def open_library(variant: str) -> Library:
    """Open a variant; OSError if its file is missing, cannot be loaded or was built from older sources."""
    path = Path(__file__).parent / f"kernels_{variant}.so"
    if not path.exists():
        raise OSError(f"{path.name} was not built")
    handle = ctypes.CDLL(str(path))
    if missing := [name for name in SIGNATURES if not hasattr(handle, f"paceline_{name}")]:
        raise OSError(f"{path.name} is older than the sources: it has no {missing[0]}")
    library = Library(variant, path, handle)
    if library.function("abi")() != ABI:
        raise OSError(f"{path.name} is not of these sources")
    return library
