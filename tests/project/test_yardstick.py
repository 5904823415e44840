"""Scripts of benchmarks at a small scale on a CPU: what they use of the package is there, and the yardstick gives the
small model's logits."""

from __future__ import annotations

import pytest
import torch

from paceline.drafters.base import DraftRequest


def test_the_yardstick_is_the_small_model_in_a_larger_shape() -> None:
    from benchmarks.gpu.subject import TINY, Subject
    from benchmarks.gpu.yardstick import logits_of

    subject = Subject("random", torch.device("cpu"), tiny=True)
    assert TINY.layers > subject.small_config.num_layers
    tokens = torch.randint(0, 500, (24,)).tolist()
    small, large = logits_of(subject.small, tokens), logits_of(subject.yardstick, tokens)
    torch.testing.assert_close(large, small, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("part", ["passes", "prefill", "host", "batches"])
def test_figures_of_a_gpu_can_be_taken_of_a_small_model(part: str) -> None:
    from benchmarks.gpu.run import PARTS
    from benchmarks.gpu.subject import Subject

    assert PARTS[part](Subject("random", torch.device("cpu"), tiny=True))


def test_every_case_of_verification_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import gpu_kernels

    monkeypatch.setattr(gpu_kernels, "DEVICE", torch.device("cpu"))
    for case in gpu_kernels.CASES:
        assert gpu_kernels.batch(case, rows=2, nodes=6, vocab=80)().tokens.shape[0] == 2


def test_drafts_that_are_to_be_refused_are_valid() -> None:
    from benchmarks.thresholds import Refused

    draft = Refused().propose([DraftRequest(None, 3), DraftRequest(None, 1)])
    draft.validate(50)
    assert draft.num_nodes.tolist() == [3, 1]
