"""The device's kernels for tests: interpreted on a CPU, the very source a GPU compiles, or compiled where there is one.

Tests build their tensors on the CPU either way; what is handed to compiled kernels is moved there and back. The
interpreter patches triton.language again at every call of a kernel's helper; here once, which is five times faster.
"""

import contextlib
import importlib.util
from types import SimpleNamespace

import numpy as np
import torch

from paceline.verify.seam import moved

NAMES = ("judge", "process", "probabilities", "draw", "propose")


def missing():
    """Why the kernels cannot run here, or None."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    import triton

    if not torch.cuda.is_available() and not triton.knobs.runtime.interpret:
        return "no CUDA device, and Triton was imported before it was told to interpret"
    return None


def interpreted():
    import triton

    return bool(triton.knobs.runtime.interpret)


def served(device):
    """What a seam gives out: the kernels of the package `device`, for tensors on the CPU."""
    if interpreted():
        return device

    def moving(function):
        return lambda *given, **options: moved(function(*moved(given, "cuda"), **moved(options, "cuda")), "cpu")

    return SimpleNamespace(**{name: moving(getattr(device, name)) for name in NAMES})


@contextlib.contextmanager
def patched_once():
    """Triton's language is patched for as long as this lasts, and not at every call."""
    if not interpreted():
        yield
        return
    import triton.language as tl
    from triton.runtime import interpreter

    real = interpreter._patch_lang
    inside = {"tl": tl, "core": tl.core}
    exec("def sees_the_language(): pass", inside)
    scope = real(inside["sees_the_language"])
    interpreter._patch_lang = lambda fn: interpreter._LangPatchScope()
    try:
        with np.errstate(all="ignore"):  # a device does not warn when a number overflows
            yield
    finally:
        interpreter._patch_lang = real
        scope.restore()
