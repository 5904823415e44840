"""Where the torch kernels serve, every command says so once, with the reason and the remedy."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from paceline.models.backends.torch import TorchKernels
from paceline.models.kernels import kernels_for, why_slow
from paceline.models.load import open_model as runtime
from paceline.native import library as native_library
from paceline.platform import triton as triton_support


@pytest.fixture
def no_triton_known() -> None:
    triton_support.triton_problem.cache_clear()


def test_kernels_made_for_the_device_are_not_called_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PACELINE_KERNELS", raising=False)
    cpu = torch.device("cpu")
    assert why_slow(kernels_for(cpu), cpu) is None


def test_the_sentence_is_logged_once_however_many_models_are_opened(monkeypatch, caplog, tmp_path, write_model) -> None:
    status = "no native kernels: kernels_x.so was not built"
    monkeypatch.delenv("PACELINE_KERNELS", raising=False)
    monkeypatch.setattr(native_library, "best_library", lambda: (None, status))
    monkeypatch.setattr(runtime.Tokenizer, "from_path", lambda path: None)
    write_model(tmp_path, "Llama")
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            runtime.load_model(tmp_path, device="cpu")
    [record] = [record for record in caplog.records if "slow kernels" in record.message]
    assert "kernels_x.so was not built; install paceline's wheel" in record.message
    assert "may differ" in record.message, "torch's products are not exact, and the user is told"


def test_a_command_says_so_on_stderr_and_nothing_of_it_on_stdout(tiny_model: Path) -> None:
    command = [sys.executable, "-m", "paceline", "generate", "Hi", "-m", str(tiny_model), "--max-tokens", "2", "--json"]
    environment = os.environ | {"PACELINE_KERNELS": "torch"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("slow kernels serve") == 1
    assert "unset it" in done.stderr
    assert done.stdout.startswith("{")


@pytest.mark.parametrize(
    ("missing", "advice"), [("triton", "pip install triton"), ("gcc", "install gcc"), ("Python.h", "python3-dev")]
)
def test_a_gpu_without_what_triton_needs_says_what_is_missing(missing, advice, monkeypatch, no_triton_known) -> None:
    for variable in ("PACELINE_KERNELS", "CC", "TRITON_INTERPRET"):
        monkeypatch.delenv(variable, raising=False)
    found = None if missing == "triton" else object()
    monkeypatch.setattr(triton_support.importlib.util, "find_spec", lambda name: found)
    monkeypatch.setattr(triton_support.shutil, "which", lambda name: None if missing == "gcc" else f"/usr/bin/{name}")
    monkeypatch.setattr(triton_support.sysconfig, "get_paths", lambda: {"include": "/nowhere"})
    gpu = torch.device("cuda")
    assert kernels_for(gpu).name == "torch"
    sentence = why_slow(TorchKernels(), gpu)
    assert sentence is not None
    assert missing.lower() in str(sentence).replace("C compiler", "gcc").lower()
    assert sentence.advice.startswith(advice) or advice in sentence.advice
    monkeypatch.setenv("PACELINE_KERNELS", "triton")
    triton_support.require_triton()  # insisted upon
    triton_support.triton_problem.cache_clear()
