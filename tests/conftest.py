"""Fixtures every test may use. The real model is fetched once into the user's cache, as a first run would."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests import fake_llm
from tests.fake_llm import FakeLLM, Result

if not torch.cuda.is_available():  # Triton reads it when it is imported: kernels are then interpreted, on the CPU
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("cuda"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


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
    from paceline.models.hub import resolve

    return resolve("smollm2")


@pytest.fixture(scope="session")
def smollm2(smollm2_path: Path):
    from paceline import LLM

    return LLM(str(smollm2_path), device="cpu")
