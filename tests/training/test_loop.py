"""The loop: continuing after kill -9, several processes, NaN, a full disk, the schedule."""

from __future__ import annotations

import itertools
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from paceline.errors import PacelineError
from paceline.training.loop import STATE, LoopConfig
from tests.helpers.errors import refused
from tests.training.toy import toy_loop, toy_target

ROOT = Path(__file__).parents[2]
RUN = """
import sys, json, time
from pathlib import Path
import torch
torch.set_num_threads(1)
if int({world}) > 1:
    import torch.distributed as dist
    dist.init_process_group("gloo")
from tests.training.toy import toy_loop
from paceline.training.trainees.target import FrozenTarget
target = FrozenTarget(Path({target!r}), torch.device("cpu"), torch.float32)
loop = toy_loop(target, Path({folder!r}), 8)
loop.report = lambda line: (print(line, flush=True), time.sleep(600 * line.startswith({stuck_at!r})))
loop.run()
if loop.processes.rank == 0:
    print(json.dumps([entry["loss"] for entry in loop.progress.curve]), flush=True)
"""


def script(target, folder, *, stuck_at="no line", world=1):
    return RUN.format(target=str(target.path), folder=str(folder), stuck_at=stuck_at, world=world)


def started(code, **environment):
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    given = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, env=given, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return toy_target(tmp_path_factory.mktemp("target"))


def test_a_killed_run_continues_to_the_very_weights_it_would_have_had(target, tmp_path):
    killed = started(script(target, tmp_path / "killed", stuck_at="step 3"))
    for line in killed.stdout:
        if line.startswith("step 3"):
            break
    os.kill(killed.pid, signal.SIGKILL)
    killed.communicate()
    assert killed.returncode == -signal.SIGKILL
    assert (tmp_path / "killed" / STATE).exists()
    whole, again = toy_loop(target, tmp_path / "whole", 8), toy_loop(target, tmp_path / "killed", 8)
    again.resume()
    assert 2 <= again.progress.step < 8
    for loop in (whole, again):
        loop.run()
    one, other = whole.averaged(), again.averaged()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_two_processes_have_the_loss_curve_of_one(target, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    pair = [started(script(target, tmp_path / "two", world=2), RANK=str(rank), **shared) for rank in (0, 1)]
    alone = toy_loop(target, tmp_path / "one", 8)
    alone.run()
    outputs = [process.communicate(timeout=120) for process in pair]
    assert [process.returncode for process in pair] == [0, 0], outputs
    curve = json.loads(outputs[0][0].strip().splitlines()[-1])
    expected = [entry["loss"] for entry in alone.progress.curve]
    assert len(curve) == 8
    assert curve == pytest.approx(expected, rel=2e-4)
    assert expected[-1] < expected[0]


@pytest.mark.parametrize("saved", [False, True])
def test_a_loss_that_is_not_a_number_keeps_the_last_good_state(target, tmp_path, saved):
    loop = toy_loop(target, tmp_path, 6)
    if saved:
        loop.step(1e-3)
        loop.save()
    kept = (tmp_path / STATE).read_bytes() if saved else None
    with torch.no_grad():
        loop.weights[0].fill_(float("nan"))
    with pytest.raises(PacelineError, match="step 2" if saved else "step 1"):
        loop.run()
    assert (kept is None) == (not (tmp_path / STATE).exists())
    assert kept is None or (tmp_path / STATE).read_bytes() == kept


def test_a_full_disk_keeps_the_last_good_state(target, tmp_path, monkeypatch):
    loop = toy_loop(target, tmp_path, 6)
    loop.save()
    kept = (tmp_path / STATE).read_bytes()

    def full(state, file):
        file.write(b"half of it")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with refused("out"):
        loop.save()
    assert (tmp_path / STATE).read_bytes() == kept
    assert list(tmp_path.iterdir()) == [tmp_path / STATE]


def test_a_run_bounded_by_minutes_ends_in_time_and_the_next_one_goes_on(target, tmp_path, monkeypatch):
    clock = itertools.count(step=0.1)  # a look at it takes a tenth of a second
    monkeypatch.setattr("paceline.training.loop.time", SimpleNamespace(perf_counter=lambda: next(clock)))
    changes = {"steps": None, "minutes": 0.05, "stop_minutes": 0.02}
    first = toy_loop(target, tmp_path, **changes)
    first.run()
    assert 1.2 <= first.progress.elapsed_s < 1.6
    second = toy_loop(target, tmp_path, **{**changes, "stop_minutes": None})
    second.resume()
    assert second.progress.step == first.progress.step
    second.run()
    assert second.progress.elapsed_s >= 3
    assert second.progress.curve[-1]["lr"] < 0.1 * 3e-3


def test_bad_settings_are_refused(target, tmp_path):
    for changes, field in (
        ({"steps": 3, "minutes": 1.0}, "minutes"),
        ({}, "minutes"),
        ({"steps": 3, "optimizer": "sgd"}, "optimizer"),
    ):
        with refused(field):
            LoopConfig(**changes)
    with refused("resume"):
        toy_loop(target, tmp_path / "nothing").resume()


def test_muon_learns_too(target, tmp_path):
    loop = toy_loop(target, tmp_path, 12, optimizer="muon")
    loop.run()
    assert loop.progress.curve[-1]["loss"] < loop.progress.curve[0]["loss"]
