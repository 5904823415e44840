"""Buffers between the host and a device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from paceline.models.staging import TURNS, Staging

CPU = torch.device("cpu")
RUNTIME = ("cudaMemcpyAsync", "cudaEventRecord")


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


@pytest.mark.parametrize("failing", ["cudaMemcpyAsync", "cudaEventRecord"])
def test_a_copy_that_fails_is_not_passed_over(failing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    staging, calls = Staging(CPU), []

    def fake(name: str) -> Any:
        return lambda *args: calls.append(name) or int(name == failing)

    monkeypatch.setattr(staging, "_runtime", SimpleNamespace(**{name: fake(name) for name in RUNTIME}))
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)
    buffer = staging.buffer(4)
    buffer.over = SimpleNamespace(cuda_event=1)
    with pytest.raises(RuntimeError, match="CUDA error 1"):
        staging.send(buffer, torch.zeros(4, dtype=torch.int32), 4)
    assert calls == list(RUNTIME[: RUNTIME.index(failing) + 1])
