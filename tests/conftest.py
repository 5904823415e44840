"""Fixtures every test may use. The real model is fetched once into the user's cache, as a first run would."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():  # Triton reads it when it is imported: kernels are then interpreted, on the CPU
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("cuda"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    from paceline.models.hub import resolve

    return resolve("smollm2")


@pytest.fixture(scope="session")
def smollm2(smollm2_path: Path):
    from paceline import LLM

    return LLM(str(smollm2_path), device="cpu")
