"""A tiny random model, a draft model near it, and an effort small enough for tests."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from paceline import LLM
from paceline.prove.subject import Effort
from tests.helpers.tiny import save_tiny, write_tokenizer

EFFORT = Effort(prompts=3, few=2, max_tokens=20, replays=8_000, steps=1, generations=64)


def motifs(count: int = 8) -> list[list[int]]:
    """Prompts that repeat themselves."""
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(1, 97, (6,), generator=generator).tolist() * 3 for _ in range(count)]


@pytest.fixture(scope="session")
def tiny_paths(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target, and the same with some noise in its weights."""
    target, draft = tmp_path_factory.mktemp("target"), tmp_path_factory.mktemp("draft")
    model = save_tiny("llama-tied", target)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.04 * parameter.abs().mean() * torch.randn_like(parameter))
    model.save_pretrained(draft)
    write_tokenizer(draft, model.config.vocab_size)
    return target, draft


@pytest.fixture(scope="session")
def tiny(tiny_paths: tuple[Path, Path]) -> LLM:
    target, draft = map(str, tiny_paths)
    return LLM(target, device="cpu", method="auto", draft_model=draft, prefix_caching=False)
