"""The frozen target in plain torch against transformers, for packed rows."""

from __future__ import annotations

import pytest
import torch

from paceline.training.target import FrozenTarget, positions_of
from tests.models.tiny import TINY, save_tiny
from tests.training.toy import CPU

LENGTH = 48  # beyond every window (16)


@pytest.mark.parametrize("name", sorted(TINY))
def test_packed_sequences_have_the_hidden_states_they_have_alone(name, tmp_path):
    oracle = save_tiny(name, tmp_path)
    target = FrozenTarget(tmp_path, CPU, torch.float32)
    tokens = torch.randint(0, 97, (1, LENGTH), generator=torch.Generator().manual_seed(0))
    segments = torch.ones(1, LENGTH, dtype=torch.long)
    segments[0, 20:] = 2
    last = target.config.num_layers
    hidden = target(tokens, segments, positions_of(segments), (0, last - 1, last))
    for part in (slice(0, 20), slice(20, LENGTH)):
        with torch.no_grad():
            alone = oracle(tokens[:, part], output_hidden_states=True)
        torch.testing.assert_close(hidden.final[:, part] @ target.head.T, alone.logits, atol=2e-4, rtol=2e-4)
        for place, layer in enumerate((0, last - 1)):
            torch.testing.assert_close(hidden.taps[0, part, place], alone.hidden_states[layer][0], atol=2e-4, rtol=2e-4)


def test_positions_begin_anew_in_every_segment():
    segments = torch.tensor([[1, 1, 2, 2, 2, 0, 0], [1, 1, 1, 1, 1, 1, 2]])
    assert positions_of(segments).tolist() == [[0, 1, 0, 1, 2, 0, 1], [0, 1, 2, 3, 4, 5, 0]]
