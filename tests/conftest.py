"""Fixtures every test may use. The real model is fetched once into the user's cache, as a first run would; policies and
chats are kept in a folder of this process, so that a run beside other work does not teach the user's policies.

Tests compute on toys and run side by side, so each gets one thread, and so do processes it starts: threads that compete
for a core spin, which takes many times as long as the work. Tests of threads ask for more.
"""

from __future__ import annotations

import atexit
import io
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # torch reads it when it is imported

import torch

from paceline.models.load.store import cache_home_if_any
from paceline.platform.cpu import usable_cores
from tests.bench.fake_subject import repetitive
from tests.helpers import fake_llm
from tests.helpers.fake_llm import FakeLLM, Result
from tests.helpers.tiny import save_tiny
from tests.helpers.tiny_model import write_tiny_model

Output = tuple[int, str, str]  # exit code, stdout, stderr

if not torch.cuda.is_available():  # Triton reads it when it is imported: kernels are then interpreted, on the CPU
    os.environ.setdefault("TRITON_INTERPRET", "1")


def own_home() -> None:
    """Take a cache folder for this process and those that it starts, with the user's models in it."""
    users = cache_home_if_any()
    if users is not None:
        (users / "models").mkdir(parents=True, exist_ok=True)
        home = Path(tempfile.mkdtemp(prefix="paceline-tests-"))
        (home / "models").symlink_to((users / "models").resolve())
        atexit.register(shutil.rmtree, home, ignore_errors=True)
        os.environ["PACELINE_HOME"] = str(home)


own_home()


@pytest.hookimpl(optionalhook=True)  # pytest-xdist's
def pytest_xdist_auto_num_workers() -> int:
    return usable_cores()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("cuda"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="session", autouse=True)
def one_core() -> Iterator[None]:
    """A model loaded without a number of threads takes one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("paceline.models.load.open_model.usable_cores", lambda: 1)
        yield


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Whatever the test before left."""
    torch.set_num_threads(1)


@pytest.fixture
def paceline(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """The command line over a fake engine, in this process."""
    from paceline.cli.app import run

    monkeypatch.setitem(sys.modules, "paceline.llm", fake_llm.module())
    for name, value in {"created": [], "requests": [], "closed": 0}.items():
        monkeypatch.setattr(FakeLLM, name, value)
    for name in ("error", "expected_gain", "drafted", "plain_says"):
        monkeypatch.setattr(FakeLLM, name, None)

    def call(*arguments: str, stdin: bytes = b"") -> Result:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        code = run(arguments)
        captured = capsys.readouterr()
        return Result(code, captured.out, captured.err)

    return call


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    from paceline.models.load.hub import resolve

    return resolve("smollm2")


@pytest.fixture(scope="session")
def smollm2(smollm2_path: Path):
    from paceline import LLM

    return LLM(str(smollm2_path), device="cpu")


@pytest.fixture(scope="session")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model without EOS: its answers have all the tokens they may have."""
    folder = tmp_path_factory.mktemp("endless")
    save_tiny("llama-tied", folder)
    for name in ("config.json", "generation_config.json"):
        (folder / name).write_text(json.dumps({**json.loads((folder / name).read_text()), "eos_token_id": None}))
    return folder


@pytest.fixture
def measuring(endless: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Output]:
    """`bench` or `advise` on the endless model and on prompts with something to draft from."""
    from paceline.cli.app import run

    capsys.readouterr()  # saving the model draws a bar
    prompts = tmp_path / "mine.txt"

    def call(command: str, count: int, *arguments: str) -> Output:
        prompts.write_text("\n".join(prompt.turns[0] for prompt in repetitive(count)))
        fixed = [command, str(endless), "--raw", "--device", "cpu", "--out", str(tmp_path / "out")]
        fixed += ["--prompts", str(prompts)] if "--prompts" not in arguments else []
        code = run([*fixed, *arguments])
        return code, *capsys.readouterr()

    return call


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory, smollm2_path: Path) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_model(folder, smollm2_path)
    return folder
