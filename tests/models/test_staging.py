"""Buffers between the host and a device."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import pytest
import torch

from paceline.models.staging import TURNS, Runtime, Staging

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


def test_the_runtime_copies_both_ways_and_is_told_when_that_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.parametrize("failing", ["copy", "record"])
def test_a_copy_that_fails_is_not_passed_over(failing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    staging = staged(Library(failing), monkeypatch)
    with pytest.raises(RuntimeError, match="CUDA error 1"):
        staging.fetch(torch.zeros(4, dtype=torch.int32))
