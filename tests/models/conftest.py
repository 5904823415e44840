"""Tiny random models of every architecture, written by transformers itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.tiny import SMALL


@pytest.fixture
def write_model() -> Callable[..., Any]:
    """`write_model(folder, "Llama", **config)` saves a model there and returns it."""
    import torch
    import transformers

    def write(folder: Path, kind: str, max_shard_size: str = "5GB", **options: Any) -> Any:
        torch.manual_seed(0)
        config = getattr(transformers, f"{kind}Config")(**(SMALL | {"bos_token_id": 1, "eos_token_id": 2} | options))
        model = getattr(transformers, f"{kind}ForCausalLM")(config)
        for name, parameter in model.named_parameters():
            if "norm" in name or "bias" in name:  # ones and zeros would hide a mix-up
                torch.nn.init.uniform_(parameter, 0.5, 1.5)
        model.save_pretrained(folder, max_shard_size=max_shard_size)
        return model

    return write
