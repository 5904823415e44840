"""The benchmarks' yardstick gives the small model's logits: checked at a small scale, in fp32."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))


def test_the_yardstick_is_the_small_model_in_a_larger_shape() -> None:
    from gpu_subject import TINY, Subject
    from yardstick import logits_of

    subject = Subject("random", torch.device("cpu"), tiny=True)
    assert TINY.layers > subject.small_config.num_layers
    tokens = torch.randint(0, 500, (24,)).tolist()
    small, large = logits_of(subject.small, tokens), logits_of(subject.yardstick, tokens)
    torch.testing.assert_close(large, small, rtol=1e-4, atol=1e-4)
