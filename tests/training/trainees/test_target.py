"""The frozen target in plain torch against transformers, for packed rows."""

from __future__ import annotations

import pytest
import torch

from paceline.models.load.open_model import load_model
from paceline.models.quant.quantize import quantize_folder
from paceline.training.export import target_of
from paceline.training.trainees.draft_model import DraftOptions, DraftTrainee
from paceline.training.trainees.target import FrozenTarget, positions_of
from tests.helpers.tiny import TINY, save_tiny
from tests.models.quant.test_quantize import sized_model
from tests.training.toy import CPU

LENGTH, CUT = 80, 40  # both parts are beyond every window (16) and original context (32)


@pytest.mark.parametrize("name", sorted(TINY))
def test_packed_sequences_have_the_hidden_states_they_have_alone(name, tmp_path):
    oracle = save_tiny(name, tmp_path)
    target = FrozenTarget(tmp_path, CPU, torch.float32)
    tokens = torch.randint(0, 97, (1, LENGTH), generator=torch.Generator().manual_seed(0))
    segments = torch.ones(1, LENGTH, dtype=torch.long)
    segments[0, CUT:] = 2
    last = target.config.num_layers
    hidden = target(tokens, segments, positions_of(segments), (0, last - 1, last))
    for part in (slice(0, CUT), slice(CUT, LENGTH)):
        with torch.no_grad():
            alone = oracle(tokens[:, part], output_hidden_states=True)
        logits, cap = hidden.final[:, part] @ target.head.T, target.config.logit_softcap
        logits = cap * torch.tanh(logits / cap) if cap else logits
        torch.testing.assert_close(logits, alone.logits, atol=2e-4, rtol=2e-4)
        for place, layer in enumerate((0, last - 1)):
            torch.testing.assert_close(hidden.taps[0, part, place], alone.hidden_states[layer][0], atol=2e-4, rtol=2e-4)


def test_positions_begin_anew_in_every_segment():
    segments = torch.tensor([[1, 1, 2, 2, 2, 0, 0], [1, 1, 1, 1, 1, 1, 2]])
    assert positions_of(segments).tolist() == [[0, 1, 0, 1, 2, 0, 1], [0, 1, 2, 3, 4, 5, 0]]


def test_a_target_stored_as_blocks_is_what_its_blocks_stand_for(tmp_path):
    """smollm2 itself is stored so."""
    sized_model(tmp_path / "model")
    quantize_folder(tmp_path / "model", "q8_0", tmp_path / "blocks", lambda done, total: None)
    decoder = load_model(tmp_path / "blocks", device="cpu").decoder
    target = FrozenTarget(tmp_path / "blocks", CPU, torch.float32)
    embedding = decoder.embedding[torch.arange(96)]
    assert torch.equal(target.embedding, embedding)
    assert torch.equal(target_of(str(tmp_path / "blocks")).head(), embedding)
    first = DraftTrainee(target, DraftOptions(layers=1)).parameters["model.layers.0.mlp.down_proj.weight"]
    assert torch.equal(first, target.layers[0].down)
    assert first.shape == (64, 256)
