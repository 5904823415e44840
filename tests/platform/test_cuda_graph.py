"""CudaGraph as its graphs see it: here graphs that keep a diary, on a device real ones."""

from __future__ import annotations

import gc
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from paceline.platform.cuda_graph import GraphRecorder


class Graph:
    diary: list[str]
    made = 0

    def __init__(self):
        Graph.made += 1
        self.name = str(Graph.made)

    def capture_begin(self, pool, capture_error_mode):
        Graph.diary.append(f"begin {self.name} in {pool}")

    def capture_end(self):
        Graph.diary.append(f"end {self.name}")

    def replay(self):
        Graph.diary.append(f"replay {self.name}")


@pytest.fixture
def diary(monkeypatch):
    Graph.diary, Graph.made, pools = [], 0, iter("abc")
    stream = SimpleNamespace(wait_stream=lambda other: None)
    fakes = {"CUDAGraph": Graph, "graph_pool_handle": lambda: next(pools), "stream": lambda stream: nullcontext()}
    for name, fake in (fakes | {"Stream": lambda: stream, "current_stream": lambda: stream}).items():
        monkeypatch.setattr(torch.cuda, name, fake)
    return Graph.diary


def test_what_is_recorded_is_replayed(diary):
    recording = GraphRecorder().capture(lambda: (diary.append("work"), 7)[-1])
    recording.replay()
    assert (diary, recording.result) == (["begin 1 in a", "work", "end 1", "replay 1"], 7)


def test_memory_is_shared_while_a_recording_lives_and_no_longer(diary):
    recorder = GraphRecorder()
    kept = [recorder.capture(int) for _ in range(2)]
    del kept[0]
    kept.append(recorder.capture(int))
    kept.clear()
    gc.collect()
    kept.append(recorder.capture(int))
    assert [line for line in diary if "begin" in line] == [
        f"begin {at + 1} in {pool}" for at, pool in enumerate("aaab")
    ]


def test_work_that_fails_ends_its_recording_and_leaves_the_next_alone(diary):
    def fails():
        raise RuntimeError("not permitted")

    recorder = GraphRecorder()
    with pytest.raises(RuntimeError, match="not permitted"):
        recorder.capture(fails)
    assert diary == ["begin 1 in a", "end 1"]
    recorder.capture(int).replay()
    assert diary[2:] == ["begin 2 in b", "end 2", "replay 2"]


def test_garbage_may_hold_graphs_and_is_not_collected_meanwhile(diary):
    recorder = GraphRecorder()
    assert recorder.capture(gc.isenabled).result is False
    assert gc.isenabled()
    gc.disable()
    try:
        recorder.capture(int)
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_memory_is_not_taken_for_shared_when_the_last_recording_goes_with_the_garbage(diary, monkeypatch):
    class Heavy(Graph):
        def __init__(self):
            if gc.isenabled():
                gc.collect()  # as may happen at any time
            super().__init__()

    recorder, alive = GraphRecorder(), []
    garbage = [recorder.capture(int)]
    garbage.append(garbage)
    del garbage
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Heavy)
    recorder.capture(lambda: alive.append(len(recorder._alive)))
    assert (diary[2], alive) == ("begin 2 in a", [1])


@pytest.mark.cuda
def test_graphs_among_garbage_do_not_end_a_recording():
    def work():
        if gc.isenabled():
            gc.collect()  # as may happen at any time
        return 2 * x

    x = torch.ones(4, device="cuda")
    work()
    garbage = [GraphRecorder().capture(work)]
    garbage.append(garbage)
    del garbage
    recording = GraphRecorder().capture(work)
    recording.replay()
    assert recording.result.tolist() == [2] * 4


@pytest.mark.cuda
def test_a_device_does_again_what_was_recorded():
    x = torch.zeros(4, device="cuda")
    recording = GraphRecorder().capture(lambda: 2 * (x + 1))
    x.fill_(4)
    recording.replay()
    assert recording.result.tolist() == [10] * 4
