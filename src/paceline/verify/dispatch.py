"""Dispatch by device: each pure function of verification is written for tensors in the host's memory; on a CUDA device
the kernels of `cuda` take its place. Without Triton the tensors are copied to the host and back.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any, ParamSpec, TypeVar

from torch import Tensor, device

from paceline.platform.triton import require_triton

P = ParamSpec("P")
R = TypeVar("R")


def kernels(tensor: Tensor) -> ModuleType | None:
    """Return the module `cuda.kernels`, for tensors that it can work on."""
    return _cuda_kernels() if tensor.is_cuda else None


def on_device(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function that `cuda.kernels` has by the same name, which serves where there are kernels."""
    name = function.__name__

    @functools.wraps(function)
    def call(*args: P.args, **options: P.kwargs) -> R:
        logits = next(part for part in args if isinstance(part, Tensor))
        if (module := kernels(logits)) is not None:
            return getattr(module, name)(*args, **options)  # type: ignore[no-any-return]
        if logits.is_cpu:
            return function(*args, **options)
        result = function(*moved(args, "cpu"), **moved(options, "cpu"))
        return moved(result, logits.device)  # type: ignore[no-any-return]

    return call


def moved(part: Any, to: device | str) -> Any:
    """Return tensors, and whatever holds them, on another device."""
    if isinstance(part, Tensor):
        return part.to(to)
    if isinstance(part, (tuple, list)):
        return tuple(moved(one, to) for one in part)
    if isinstance(part, dict):
        return {name: moved(one, to) for name, one in part.items()}
    if dataclasses.is_dataclass(part) and not isinstance(part, type):
        fields = {field.name: moved(getattr(part, field.name), to) for field in dataclasses.fields(part)}
        return type(part)(**fields)
    return part


@functools.cache
def _cuda_kernels() -> ModuleType | None:
    try:
        require_triton()
        from paceline.verify.cuda import kernels as cuda_kernels
    except ImportError:  # no Triton that works here
        return None
    return cuda_kernels
