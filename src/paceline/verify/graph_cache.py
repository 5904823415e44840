"""Work of tensors in, tensors out on a CUDA device, recorded by shape and replayed: one launch for many.

What is given is sorted into a key (structure, shapes, plain values) and tensors. The first calls of a key run as they
are: what comes a few times only is not worth recording. The next one is recorded too; later ones copy the tensors to
where the recording reads them, replay it and copy the results out, so nobody minds the next replay. What cannot be
recorded stays as it is. Recordings share one pool of memory and one stretch for large inputs: a replay's scratch is
over with the replay.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor

from paceline.cuda_graph import CudaGraph, GraphRecorder

log = logging.getLogger("paceline")
MOST = 256  # recordings; the least recently used gives way
FIRST = 3  # calls of a key before it is recorded
LARGE = 1 << 16  # bytes: inputs from here on lie in one stretch for all recordings
ALIGNED = 512  # bytes: where an input may begin
T = TypeVar("T")


class GraphCache:
    """One call at a time, on one stream."""

    def __init__(self, device: torch.device, most: int = MOST, first: int = FIRST) -> None:
        self.records = device.type == "cuda"
        self.warm = True  # the last call took what its like will take again: it was not recorded
        self._most, self._first = most, first
        self._known: OrderedDict[Hashable, _Known] = OrderedDict()
        self._large: Tensor | None = None
        self._recorder = GraphRecorder()

    def __call__(self, work: Callable[..., T], *given: Any, standing: Tensor | None = None, **options: Any) -> T:
        """`work(*given, **options)`. `standing`: a tensor among the given whose like will come at the same address."""
        if not self.records:
            return work(*given, **options)
        tensors: list[Tensor] = []
        known = self._of((work, _sort((given, options), tensors, standing)))
        self.warm = known.refused or known.recording is not None or known.calls < self._first
        if known.recording is not None:
            return known.recording.play(tensors)  # type: ignore[no-any-return]
        known.calls += 1
        if self.warm:
            return work(*given, **options)
        inputs = _Inputs(self._places(tensors))
        inputs.fill(tensors)
        given, options = _with((given, options), iter(inputs.places), standing)
        result = work(*given, **options)  # which compiles it, if it was not for tensors that lie like these
        known.recording = self._recording(functools.partial(work, *given, **options), inputs)
        known.refused = known.recording is None
        return result

    def _of(self, key: Hashable) -> _Known:
        known = self._known.setdefault(key, _Known())
        self._known.move_to_end(key)
        if len(self._known) > self._most:
            self._known.popitem(last=False)
        return known

    def __len__(self) -> int:
        return sum(known.recording is not None for known in self._known.values())

    def _places(self, tensors: list[Tensor]) -> list[Tensor]:
        """Where a recording reads its tensors: small ones each for itself, large ones side by side."""
        places, end = {}, 0
        for index, tensor in enumerate(tensors):
            if tensor.nbytes >= LARGE:
                places[index] = slice(end, end + tensor.nbytes)
                end = -(-(end + tensor.nbytes) // ALIGNED) * ALIGNED
        if end and (self._large is None or len(self._large) < end):
            size = 1 << (end - 1).bit_length()  # so all that were ever too small are no more than this one
            self._large = torch.empty(size, dtype=torch.uint8, device=tensors[0].device)
        large = self._large
        return [
            large[places[index]].view(tensor.dtype).view(tensor.shape)
            if large is not None and index in places
            else torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
            for index, tensor in enumerate(tensors)
        ]

    def _recording(self, work: Callable[[], Any], inputs: _Inputs) -> _Recording | None:
        started, before = time.perf_counter(), self._reserved()
        try:
            recording = self._recorder.capture(work)
        except RuntimeError as problem:
            log.warning("cannot be recorded, and runs as it is: %s", str(problem).partition("\n")[0])
            return None
        took, grown = 1e3 * (time.perf_counter() - started), (self._reserved() - before) / 1e6
        log.debug("recorded in %.0f ms, %.0f MB; %d before it", took, grown, len(self))
        return _Recording(recording, inputs)

    def _reserved(self) -> int:
        return torch.cuda.memory_reserved() if torch.cuda.is_available() else 0


@dataclasses.dataclass
class _Known:
    """What is known of a key."""

    calls: int = 0
    recording: _Recording | None = None
    refused: bool = False


class _Inputs:
    """Where a recording reads, filled in with one launch for each type of numbers."""

    def __init__(self, places: list[Tensor]) -> None:
        self.places = places
        kinds: dict[torch.dtype, list[int]] = {}
        for index, place in enumerate(places):
            if place.numel():
                kinds.setdefault(place.dtype, []).append(index)
        self._kinds = [(indices, [places[index] for index in indices]) for indices in kinds.values()]

    def fill(self, tensors: list[Tensor]) -> None:
        for indices, places in self._kinds:
            torch._foreach_copy_(places, [tensors[index] for index in indices])


class _Recording:
    """A recording, where it reads, and where it writes."""

    def __init__(self, of: CudaGraph, inputs: _Inputs) -> None:
        self._of, self._inputs = of, inputs
        self._outputs: list[Tensor] = []
        _sort(of.result, self._outputs, None)
        # Results that are views of one block of memory come out in one copy.
        blocks = {tensor.untyped_storage().data_ptr(): tensor for tensor in self._outputs if tensor.numel()}
        self._blocks = [_bytes_of(tensor) for tensor in blocks.values()]
        at = {place: index for index, place in enumerate(blocks)}
        self._block_of = [at.get(tensor.untyped_storage().data_ptr(), -1) for tensor in self._outputs]

    def play(self, tensors: list[Tensor]) -> Any:
        self._inputs.fill(tensors)
        self._of.replay()
        blocks = [block.clone() for block in self._blocks]
        return _with(self._of.result, (self._out(blocks, at) for at in range(len(self._outputs))), None)

    def _out(self, blocks: list[Tensor], at: int) -> Tensor:
        like = self._outputs[at]
        if not like.numel():
            return like
        block = blocks[self._block_of[at]].view(like.dtype)
        return block.as_strided(like.shape, like.stride(), like.storage_offset())


def _bytes_of(tensor: Tensor) -> Tensor:
    """The memory a tensor is a view of."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def _sort(part: Any, tensors: list[Tensor], standing: Tensor | None) -> Hashable:
    """What holds as long as the same recording serves; the tensors come out in order."""
    if part is None:
        return None
    if part.__class__ is Tensor or isinstance(part, Tensor):
        if part is standing:
            return part.shape, part.dtype, part.stride(), part.data_ptr()
        tensors.append(part)
        return part.shape, part.dtype
    if (names := _fields(part.__class__)) is not None:
        return (type(part), *[_sort(getattr(part, name), tensors, standing) for name in names])
    if isinstance(part, (tuple, list)):
        return tuple([_sort(one, tensors, standing) for one in part])
    if isinstance(part, dict):
        return tuple([(name, _sort(one, tensors, standing)) for name, one in part.items()])
    return part  # type: ignore[no-any-return]


def _with(part: Any, tensors: Iterator[Tensor], standing: Tensor | None) -> Any:
    """The same with other tensors."""
    if isinstance(part, Tensor):
        return part if part is standing else next(tensors)
    if (names := _fields(part.__class__)) is not None:
        return type(part)(**{name: _with(getattr(part, name), tensors, standing) for name in names})
    if isinstance(part, (tuple, list)):
        return tuple([_with(one, tensors, standing) for one in part])
    if isinstance(part, dict):
        return {name: _with(one, tensors, standing) for name, one in part.items()}
    return part


@functools.cache
def _fields(of: Hashable) -> tuple[str, ...] | None:
    """Of a dataclass."""
    return tuple(field.name for field in dataclasses.fields(of)) if dataclasses.is_dataclass(of) else None
