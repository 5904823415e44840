"""The hardware seam of verification: each of its pure functions is written for tensors in the host's memory, and on a
CUDA device the kernels of `device` take its place. Without Triton the tensors are copied to the host and back.
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
    """The package `device`, for tensors it can work on."""
    return _device() if tensor.is_cuda else None


def on_device(function: Callable[P, R]) -> Callable[P, R]:
    """Decorator: the function of the same name in `device` serves where there are kernels."""
    name = function.__name__

    @functools.wraps(function)
    def call(*given: P.args, **options: P.kwargs) -> R:
        logits = next(part for part in given if isinstance(part, Tensor))
        if (there := kernels(logits)) is not None:
            return getattr(there, name)(*given, **options)  # type: ignore[no-any-return]
        if logits.is_cpu:
            return function(*given, **options)
        found = function(*moved(given, "cpu"), **moved(options, "cpu"))
        return moved(found, logits.device)  # type: ignore[no-any-return]

    return call


def moved(part: Any, to: device | str) -> Any:
    """Tensors, and whatever holds them, on another device."""
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
def _device() -> ModuleType | None:
    try:
        require_triton()
        from paceline.verify.cuda import kernels as device
    except ImportError:  # no Triton that works here
        return None
    return device
