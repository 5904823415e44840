"""Quantised Hugging Face checkpoints: the logits of the same model with expanded weights, or one line that says why
not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from paceline.errors import BrokenModel, InvalidParameter, ModelError, UnsupportedModel
from paceline.models.code_blocks import as_blocks
from paceline.models.kernels import INT8
from paceline.models.loader import load_config, load_weights
from paceline.models.quantized_config import parse_quantization
from paceline.models.runtime import load_model
from paceline.models.weights import StoredWeight, WeightKind
from paceline.testing import logits_of
from tests.models.quantized import AWQ, FORMATS, GPTQ, Format, compressed, compressed_fp8, write_quantized
from tests.models.conftest import TINY
from tests.models.tiny import write_tokenizer

LAYER = "model.layers.1.mlp.down_proj"
TOKENS = torch.randint(0, 96, (20,), generator=torch.Generator().manual_seed(3)).tolist()


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Plain numbers, with biases and an untied head."""
    import transformers

    torch.manual_seed(0)
    model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**TINY))
    for name, parameter in model.named_parameters():
        if "norm" in name or "bias" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    folder = tmp_path_factory.mktemp("plain")
    model.save_pretrained(folder)
    write_tokenizer(folder, 96)
    return folder


@pytest.mark.parametrize("case", FORMATS)
def test_a_quantised_checkpoint_has_the_logits_of_its_expansion(case: str, plain: Path, tmp_path: Path) -> None:
    coded, expanded = write_quantized(tmp_path, plain, FORMATS[case])
    loaded, expected = load_model(coded, device="cpu"), load_model(expanded, device="cpu")
    assert loaded.kind is FORMATS[case].on_cpu
    assert all(layer.qkv.kinds == {loaded.kind} for layer in loaded.decoder.layers)
    wanted = logits_of(expected.decoder, TOKENS, [20])
    for passes in ([20], [1] * 20, [7, 13]):
        assert torch.equal(logits_of(loaded.decoder, TOKENS, passes), wanted)
