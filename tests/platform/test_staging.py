"""Buffers between the host and a device."""

from __future__ import annotations

import ctypes
import random
from types import SimpleNamespace

import pytest
import torch

from paceline.platform.staging import TURNS, Buffer, Runtime, Staging

CPU = torch.device("cpu")


def test_buffers_are_filled_in_turn_and_grow_when_they_must() -> None:
    staging = Staging(CPU)
    turns = [staging.buffer(8) for _ in range(2 * TURNS)]
    assert turns[:TURNS] == turns[TURNS:]
    assert len({buffer.address for buffer in turns}) == TURNS
    larger = staging.buffer(9)
    assert larger.turn == turns[0].turn
    assert len(larger.ints) >= 9
    assert staging.buffer(4) is turns[1]


def test_what_is_sent_is_copied_and_nothing_behind_it() -> None:
    staging, there = Staging(CPU), torch.full((4,), 7, dtype=torch.int32)
    buffer = staging.buffer(4)
    buffer.ints[:] = 1, 2, 3, 4
    staging.send(buffer, there, 3)
    assert there.tolist() == [1, 2, 3, 7]


def test_what_is_fetched_stands_until_its_turn_comes_again() -> None:
    staging = Staging(CPU, turns=3)
    fetched = [staging.fetch(torch.arange(first, first + 5, dtype=torch.int32)) for first in (0, 10, 20)]
    assert [buffer.ints[:5].tolist() for buffer in fetched] == [[*range(first, first + 5)] for first in (0, 10, 20)]


class Library:
    """The runtime, on the host: copies, and numbers its events."""

    def __init__(self, failing: str = "") -> None:
        self.failing, self.recorded = failing, []  # type: tuple[str, list[int]]

    def cudaMemcpyAsync(self, to: int, of: int, size: int, kind: int, stream: int) -> int:
        ctypes.memmove(to, of, size)
        return int(self.failing == "copy")

    def cudaEventRecord(self, event: int, stream: int) -> int:
        self.recorded.append(event)
        return int(self.failing == "record")


def staged(library: Library, monkeypatch: pytest.MonkeyPatch) -> Staging:
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)
    staging = Staging(CPU)
    monkeypatch.setattr(staging, "_runtime", Runtime(library, 0))
    for number in range(TURNS):
        staging.buffer(4).over = SimpleNamespace(cuda_event=number, synchronize=lambda: None)
    return staging


def test_the_runtime_copies_both_ways_and_an_event_marks_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library()
    staging, there = staged(library, monkeypatch), torch.full((4,), 7, dtype=torch.int32)
    buffer = staging.buffer(4)
    buffer.ints[:] = 1, 2, 3, 4
    staging.send(buffer, there, 3)
    assert (there.tolist(), library.recorded) == ([1, 2, 3, 7], [])
    staging.mark()
    staging.mark()
    assert library.recorded == [0]
    assert staging.fetch(there).ints.tolist() == [1, 2, 3, 7]
    assert library.recorded == [0, 1]
    staging.send(staging.buffer(4), there, 1)
    staging.buffer(4)  # which marks what was sent before
    assert library.recorded == [0, 1, 2]


class Late(Library):
    """A device that does nothing before the host waits for it."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[int, ...]] = []  # copies, and events

    def cudaMemcpyAsync(self, *given: int) -> int:
        self.asked.append(given)
        return 0

    def cudaEventRecord(self, event: int, stream: int) -> int:
        self.asked.append((event,))
        return 0

    def wait(self, event: int | None = None) -> None:
        while self.asked if event is None else (event,) in self.asked:
            one = self.asked.pop(0)
            if len(one) > 1:
                ctypes.memmove(*one[:3])


@pytest.mark.parametrize("seed", range(8))
def test_no_buffer_is_filled_or_given_away_before_its_last_copy_is_over(seed, monkeypatch) -> None:
    noise, library, sizes = random.Random(seed), Late(), range(1, 9)
    staging, events = staged(library, monkeypatch), iter(range(99))
    kept: list[torch.Tensor] = []  # what late copies read and write

    class Made(Buffer):
        def __init__(self, turn: int, size: int, device: torch.device) -> None:
            super().__init__(turn, size, device)
            kept.append(self.pinned)
            number = next(events)
            self.over = SimpleNamespace(cuda_event=number, synchronize=lambda: library.wait(number))

    monkeypatch.setattr("paceline.platform.staging.Buffer", Made)
    staging._buffers = [None] * TURNS
    sent: list[tuple[torch.Tensor, list[int]]] = []
    read: list[tuple[list[int], list[int]]] = []
    for step in range(40):
        size = noise.choice(sizes)
        if noise.random() < 0.6:
            buffer, there = staging.buffer(size), torch.zeros(8, dtype=torch.int32)
            buffer.ints[:size] = range(step, step + size)
            if noise.random() < 0.9:  # else something failed before it was sent
                staging.send(buffer, there, size)
                sent.append((there, list(range(step, step + size))))
            if noise.random() < 0.5:
                staging.mark()
        else:
            values = torch.arange(step, step + size, dtype=torch.int32)
            buffer = staging.fetch(values)
            if noise.random() < 0.7:  # else it is never read
                buffer.over.synchronize()
                read.append((buffer.ints[:size].tolist(), values.tolist()))
            kept.append(values)
    library.wait()
    assert all(there[: len(values)].tolist() == values for there, values in sent)
    assert all(there == values for there, values in read)


@pytest.mark.parametrize("failing", ["copy", "record"])
def test_a_copy_that_fails_is_not_passed_over(failing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    staging = staged(Library(failing), monkeypatch)
    with pytest.raises(RuntimeError, match="CUDA error 1"):
        staging.fetch(torch.zeros(4, dtype=torch.int32))
