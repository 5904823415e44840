"""A CUDA device over CPU tensors, so that code for a GPU is walked where there is none.

Tensors made on the device are CPU tensors whose storage is listed as the device's; operations that a GPU refuses are
refused: mixed devices, arrays of device tensors, kernels on host tensors, a read by the host or a copy from its memory
during a capture. A captured graph keeps its operations and launches, and a replay does them again into the same memory.
Kernels are interpreted, or with `launch=False` only noted.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

GPU, HOST = torch.device("cuda", 0), torch.device("cpu")
BOTH = ("copy_", "__getitem__", "__setitem__", "is_set_to", "to")  # operations that may mix devices
READS = (
    "item",
    "tolist",
    "__bool__",
    "__int__",
    "__float__",
    "__len__",
    "nonzero",
    "cpu",
    "equal",
)  # waits, but for len
LIKE = ("_like", "new_")
GETTERS = {
    Tensor.device.__get__: lambda on: GPU if on else HOST,
    Tensor.is_cuda.__get__: lambda on: on,
    Tensor.is_cpu.__get__: lambda on: not on,
}


class Graph:
    """torch.cuda.CUDAGraph."""

    def __init__(self, device: FakeCuda) -> None:
        self.device, self.steps = device, []  # type: FakeCuda, list[Callable[[], object]]

    def capture_begin(self, pool: object, capture_error_mode: str) -> None:
        assert self.device.capturing is None, "one capture at a time"
        self.device.capturing = self

    def capture_end(self) -> None:
        self.device.capturing = None
        self.device.captures += 1

    def replay(self) -> None:
        assert self.steps, "nothing was captured"
        self.device.replays += 1
        with torch._C.DisableTorchFunction():
            for step in self.steps:
                step()


class FakeCuda(TorchFunctionMode):
    def __init__(self, *, launch: bool = True) -> None:
        super().__init__()
        self.launch = launch
        self.storages: dict[int, Any] = {}  # kept: an address is not used again
        self.capturing: Graph | None = None
        self.captures = self.replays = self.copies = self.events = 0
        self.launches: dict[str, list[dict[str, Any]]] = {}  # options by kernel

    def is_on(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self.storages

    def move_in(self, result: Any) -> Any:
        for tensor in tensors_of(result):
            storage = tensor.untyped_storage()
            self.storages[storage._cdata] = storage
        return result

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in GETTERS:
            return GETTERS[func](self.is_on(args[0]))
        name = getattr(func, "__name__", "")
        if name in ("__get__", "device", "data_ptr", "untyped_storage", "stride", "numel", "element_size"):
            return func(*args, **kwargs)
        if name == "pin_memory":
            assert not self.is_on(args[0]), "pinned memory is the host's"
            return args[0].clone()
        if name in ("to", "cpu", "cuda"):
            return self._moved(func, name, args, kwargs)
        inputs = list(tensors_of((args, kwargs)))
        on = [self.is_on(tensor) for tensor in inputs]
        if any(on):
            self._check(name, inputs, on, args)
        pinned, place = kwargs.pop("pin_memory", False), kwargs.pop("device", None)
        target = any(on) if place is None else torch.device(place).type == "cuda"
        assert not (pinned and target), "pinned memory is the host's"
        if place is not None and target and self.capturing and name in ("tensor", "as_tensor"):
            raise RuntimeError("a copy from pageable memory is not permitted during a capture")
        result = self._filled(func, name, args, kwargs)
        if target and (place is not None or name not in ("tolist", "item")):
            self._record(lambda: func(*args, **kwargs), result, inputs)
            self.move_in(result)
        return result

    def _filled(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """Memory that is not written is 0, so that no launch that was only noted leaves arbitrary numbers."""
        result = func(*args, **kwargs)
        if name in ("empty", "new_empty", "empty_like", "empty_strided"):
            result.zero_()
        return result

    def _check(self, name: str, inputs: list[Tensor], on: list[bool], args: Any) -> None:
        if name == "numpy":
            raise TypeError("can't convert a CUDA tensor to numpy; copy it to the host first")
        if self.capturing and name in READS and name != "__len__":
            raise RuntimeError(f"{name} waits for the device, which is not permitted during a capture")
        if name in BOTH:
            if name == "copy_" and self.capturing and not all(on):
                raise RuntimeError("a copy from pageable memory is not permitted during a capture")
            assert name != "__getitem__" or on[0], "the host's tensors cannot be indexed by the device's"
            return
        for tensor, there in zip(inputs, on, strict=True):
            assert there or tensor.dim() == 0, f"{name}: tensors of the host and of the device"

    def _moved(self, func: Any, name: str, args: Any, kwargs: Any) -> Tensor:
        tensor, rest = args[0], list(args[1:])
        place = {"cpu": HOST, "cuda": GPU}.get(name) or kwargs.pop("device", None)
        for at, one in enumerate(rest):
            if isinstance(one, (torch.device, str)):
                place = torch.device(rest.pop(at))
                break
            if isinstance(one, Tensor):
                place, rest[at] = (GPU if self.is_on(one) else HOST), one.dtype
                break
        before = self.is_on(tensor)
        after = before if place is None else torch.device(place).type == "cuda"
        if self.capturing and before != after:
            raise RuntimeError(f"a copy {'from' if before else 'to'} the device is not permitted during a capture")
        copy = kwargs.pop("copy", False) or before != after
        kwargs.pop("non_blocking", None)

        def work() -> Tensor:
            return tensor.to(*rest, **kwargs, copy=copy) if rest or kwargs else tensor.clone() if copy else tensor

        result = work()
        if after:
            self._record(work, result, [tensor])
            self.move_in(result)
        return result

    def _record(self, work: Callable[[], Any], result: Any, inputs: list[Tensor]) -> None:
        if self.capturing is None:
            return
        old = {tensor.untyped_storage()._cdata for tensor in inputs}
        fresh = [
            (at, tensor) for at, tensor in enumerate(tensors_of(result)) if tensor.untyped_storage()._cdata not in old
        ]

        def step() -> None:
            again = list(tensors_of(work()))
            for at, tensor in fresh:
                tensor.copy_(again[at])

        self.capturing.steps.append(step)

    def launched(self, name: str, run: Callable[[], object], args: Any, kwargs: dict[str, Any]) -> None:
        for tensor in tensors_of((args, kwargs)):
            assert self.is_on(tensor), f"{name}: a pointer of the host"
        self.launches.setdefault(name, []).append(kwargs)

        def step() -> None:
            if self.launch and not kwargs["warmup"]:
                with torch._C.DisableTorchFunction():
                    run()

        step()
        if self.capturing is not None:
            self.capturing.steps.append(step)


class Runtime:
    """libcudart: copies, and events that are over at once."""

    def __init__(self, device: FakeCuda) -> None:
        self.device = device
        self.cudaMemcpyAsync, self.cudaEventRecord = Function(self.copy), Function(self.record)

    def copy(self, to: int, of: int, size: int, kind: int, stream: int) -> int:
        ctypes.memmove(to, of, size)
        self.device.copies += 1
        return 0

    def record(self, event: int, stream: int) -> int:
        self.device.events += 1
        return 0


class Function:
    argtypes: list[Any]

    def __init__(self, function: Callable[..., int]) -> None:
        self.function = function

    def __call__(self, *args: int) -> int:
        return self.function(*args)


def tensors_of(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from tensors_of(part)
    elif isinstance(value, dict):
        yield from tensors_of(list(value.values()))
    elif hasattr(value, "base") and isinstance(value.base, Tensor):  # a descriptor of the copy engine
        yield value.base


@contextlib.contextmanager
def fake_cuda(*, launch: bool = True) -> Iterator[FakeCuda]:
    """The device, for the threads that are started in the block too."""
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    device, stream, events = (
        FakeCuda(launch=launch),
        SimpleNamespace(wait_stream=lambda other: None),
        itertools.count(1),
    )
    properties = SimpleNamespace(multi_processor_count=8, major=9, minor=0, total_memory=1 << 33, name="fake")

    class Event:
        def __init__(self, **options: bool) -> None:
            self.cuda_event = next(events)

        def record(self, *_: object) -> None:
            device.events += 1

        def synchronize(self) -> None:
            assert device.capturing is None

        def query(self) -> bool:
            return True

        def elapsed_time(self, other: Event) -> float:
            return 1.0

    functions = {
        "is_available": lambda: True,
        "current_device": lambda: 0,
        "device_count": lambda: 1,
        "get_device_properties": lambda *_: properties,
        "get_device_capability": lambda *_: (9, 0),
        "get_device_name": lambda *_: "fake",
        "mem_get_info": lambda *_: (1 << 33, 1 << 33),
        "memory_reserved": lambda *_: 0,
        "memory_allocated": lambda *_: 0,
        "empty_cache": lambda: None,
        "synchronize": lambda *_: None,
        "device": lambda *_: contextlib.nullcontext(),
        "stream": lambda *_: contextlib.nullcontext(),
        "Stream": lambda *_, **__: stream,
        "current_stream": lambda *_: stream,
        "Event": Event,
        "CUDAGraph": lambda *_, **__: Graph(device),
        "graph_pool_handle": lambda: 0,
    }

    def launches(kernel: type) -> Callable[..., None]:
        original = kernel.run

        def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
            options = {"grid": grid, "warmup": warmup, **kwargs}
            name = f"{self.fn.__module__}.{self.fn.__name__}"
            device.launched(name, lambda: original(self, *args, **options), args, options)

        return run

    def run_thread(self: threading.Thread) -> None:
        with device:
            thread_run(self)

    thread_run = threading.Thread.run
    with pytest.MonkeyPatch.context() as patch, device:
        for name, function in functions.items():
            patch.setattr(torch.cuda, name, function)
        for kernel in (InterpretedFunction, JITFunction):
            patch.setattr(kernel, "run", launches(kernel))
        patch.setattr(threading.Thread, "run", run_thread)
        patch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)
        patch.setattr("paceline.platform.staging.ctypes.CDLL", lambda name: Runtime(device))
        yield device
