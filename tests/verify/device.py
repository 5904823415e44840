"""The device's kernels for tests: interpreted on a CPU, the very source a GPU compiles, or compiled where there is one.

Tests build their tensors on the CPU either way; what is handed to compiled kernels is moved there and back.
"""

import importlib.util
from types import SimpleNamespace

import torch

from paceline.verify.dispatch import moved

NAMES = ("verify_rows", "process", "probabilities", "draw", "propose")


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
    """Return the kernels of the package `device` as the dispatch gives them out, for tensors on the CPU."""
    if interpreted():
        return device

    def moving(function):
        return lambda *given, **options: moved(function(*moved(given, "cuda"), **moved(options, "cuda")), "cpu")

    return SimpleNamespace(**{name: moving(getattr(device, name)) for name in NAMES})
