# ruff: noqa: E402
"""The code of a GPU where there is none: modules imported, kernels compiled and interpreted, an engine started and run.

The device is `tests.helpers.fake_cuda`: passes are captured and replayed, with its refusals, on the CPU's memory.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from tests.helpers.interpreter import require_interpreter

require_interpreter()

from triton.runtime.interpreter import InterpretedFunction

from paceline.engine.engine import Engine
from paceline.models.backends.cuda.attention import attention
from paceline.models.backends.cuda.codes import codes
from paceline.platform import launch
from tests.helpers.contract_toys import params, run
from tests.helpers.fake_cuda import GPU, FakeCuda, fake_cuda
from tests.helpers.gpu_walk import SOURCE, further_kernels, kernels_in_source, small_engine

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
NOT_INTERPRETED = {"paceline.platform.launch.fetch"}  # of inline assembly
REQUESTS = [
    (0, "0", [1, 2, 3], params(max_tokens=4, temperature=0.7, top_p=0.9)),
    (0, "1", [5, 6, 5, 6, 5], params(max_tokens=4, temperature=0.7, seed=1)),
]


def test_every_module_is_imported() -> None:
    for path in SOURCE.rglob("*.py"):
        if path.name not in ("__main__.py", "ray.py"):  # ray is installed by few
            importlib.import_module(".".join(("paceline", *path.relative_to(SOURCE).with_suffix("").parts)))


def test_every_kernel_compiles_for_hopper() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.helpers.compile_walk"],
        capture_output=True, text=True, env=environment, cwd=SOURCE.parents[1], timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert not set(kernels_in_source()) - with_helpers(json.loads(done.stdout))


def with_helpers(names: list[str]) -> set[str]:
    """Add the functions that these kernels call, by the names in their source."""
    found, ahead = set(), list(names)
    while ahead:
        name = ahead.pop()
        if name not in found:
            found.add(name)
            module, _, function = name.rpartition(".")
            kernel = getattr(importlib.import_module(module), function).fn
            for used in inspect.getclosurevars(kernel).globals.values():
                if hasattr(used, "fn") and used.fn.__module__.startswith("paceline"):
                    ahead.append(f"{used.fn.__module__}.{used.fn.__name__}")
    return found


def answers(engine: Engine) -> dict[str, list[int]]:
    sequences, _ = run(engine, REQUESTS)
    assert engine.drafters.failures == 0
    assert all(sequence.stats.num_drafts for sequence in sequences.values())
    return {name: sequence.output_tokens for name, sequence in sequences.items()}


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The names of the kernels that are interpreted, and of their helpers."""
    names: set[str] = set()
    rewrite = InterpretedFunction.rewrite

    def noted(self: Any) -> Any:
        names.add(f"{self.fn.__module__}.{self.fn.__name__}")
        return rewrite(self)

    monkeypatch.setattr(InterpretedFunction, "rewrite", noted)
    return names


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_an_engine_that_replays_its_passes_gives_the_answer_of_a_cpu(interpreted: set[str]) -> None:
    with fake_cuda(launch=False) as device:
        engine = small_engine(CUDA, torch.float32, 16)
        captured = device.captures
        device.launch = True
        replayed = answers(engine)
        further_kernels(CUDA, torch.float32)
    assert captured > 100
    assert device.replays > 10
    assert device.copies >= device.replays // 2
    plain = answers(small_engine(CPU, torch.float32, 16))
    assert replayed["1"] == plain["1"], "a seeded answer has no other randomness than its seed's"
    assert len(replayed["0"]) == len(plain["0"])
    kernels = {name for name, compiler in kernels_in_source().items() if compiler != "gluon"}
    assert not kernels - interpreted - NOT_INTERPRETED


def test_launches_of_a_hopper_overlap_and_use_its_own_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (launch, attention, codes):
        monkeypatch.setattr(module, "INTERPRETED", False)
    with fake_cuda(launch=False) as device:
        small_engine(CUDA, torch.bfloat16, 64)
        further_kernels(CUDA, torch.bfloat16)
    for name, options in device.launches.items():
        if ".models.backends.cuda.attention" in name or name.endswith(("_linear", "_rms_norm", "streamed")):
            assert any(option.get("launch_pdl") for option in options), name
    names = {name.rpartition(".")[2] for name in device.launches}
    assert {"attend_pipelined", "attend_shared", "streamed"} <= names


@pytest.mark.parametrize("refused", ["mixed devices", "an array", "a kernel", "a read in a capture"])
def test_the_device_refuses_what_a_gpu_refuses(refused: str) -> None:
    from paceline.models.backends.cuda.elementwise import gate
    from paceline.platform.cuda_graph import GraphRecorder

    with fake_cuda() as device:
        tensor, host = torch.ones(3, 4, device=CUDA), torch.ones(3, 4)
        assert (tensor.device, host.device, tensor.cpu().is_cuda) == (GPU, CPU, False)
        assert isinstance(device, FakeCuda)
        actions = {
            "mixed devices": lambda: tensor + host,
            "an array": tensor.numpy,
            "a kernel": lambda: gate(host),
            "a read in a capture": lambda: GraphRecorder().capture(tensor.tolist),
        }
        with pytest.raises((AssertionError, TypeError, RuntimeError)):
            actions[refused]()
