# ruff: noqa: E402
"""A layer of each kind that is not Llama's by the CUDA kernels, in Triton's interpreter, beside torch's kernels."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest
import torch

from tests.helpers.interpreter import require_interpreter

require_interpreter()

from paceline.models.backends.cuda.attention import division
from paceline.models.backends.cuda.kernels import TritonKernels
from paceline.models.backends.torch import TorchKernels
from paceline.models.decoder import Decoder
from paceline.models.load.loader import load_config, load_weights
from paceline.models.weights import Dtypes
from paceline.testing import logits_of
from tests.helpers.tiny import save_tiny

pytestmark = [
    pytest.mark.skipif(sys.platform == "win32", reason="triton does not run on Windows"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # the interpreter's numpy on infinities, which kernels mask
]
CPU = torch.device("cpu")
LENGTH = 18  # beyond the windows of 16
KINDS = {  # of other families only tables, names and numbers differ
    "gemma2": "soft caps, sandwich norms, GELU, a window",
    "olmo2": "norms of outputs alone, q and k normed whole",
    "cohere2": "both halves at once, a norm that subtracts the mean, neighbours, layers without positions",
}


@pytest.mark.parametrize("name", KINDS)
def test_a_familys_layers_are_those_of_the_reference(name: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(division, "PROGRAMS", 16)  # the interpreter runs one program after the other
    save_tiny(name, tmp_path)
    config, dtypes = load_config(tmp_path), Dtypes.of(torch.float32, CPU)
    config = config.replaced(layers=config.layers[:1])
    weights = load_weights(tmp_path, load_config(tmp_path))
    tokens = random.Random(1).choices(range(97), k=LENGTH)
    ours, theirs = (
        Decoder(config, weights, kernels, device=CPU, dtypes=dtypes) for kernels in (TritonKernels(CPU), TorchKernels())
    )
    whole = logits_of(ours, tokens, [LENGTH], block_size=32)
    torch.testing.assert_close(whole, logits_of(theirs, tokens, [LENGTH]), atol=1e-3, rtol=1e-3)
