"""The training-time test of EAGLE and MTP: all drafts of a row in parallel against one draft at a time."""

from __future__ import annotations

import pytest
import torch

from paceline.drafters.eagle import checkpoint as eagle_checkpoint
from paceline.drafters.methods import EAGLE, EAGLE3, MTP
from paceline.drafters.mtp import checkpoint as mtp_checkpoint
from paceline.training.data.batch import DeviceRows
from paceline.training.data.rows import packed
from paceline.training.trainees.eagle import EagleOptions, EagleTrainee
from tests.drafters.eagle.eagles import Reference
from tests.training.toy import noise_sequences, some_vocabulary, toy_target

OPTIONS = EagleOptions(steps=3, draft_vocab=64, anchors=8)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return toy_target(tmp_path_factory.mktemp("target"))


def random_trainee(target, method, options=OPTIONS):
    trainee = EagleTrainee(target, options, some_vocabulary(), method, seed=0, name="toy")
    noise = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for one in trainee.parameters.values():
            one += 0.1 * torch.randn(one.shape, generator=noise)
    return trainee


@pytest.mark.parametrize("method", [EAGLE3, EAGLE, MTP])
def test_every_step_equals_a_draft_token_by_token(target, method):
    trainee, fused = random_trainee(target, method), method == EAGLE3
    rows = DeviceRows.of(packed(noise_sequences(), 32), target.device)
    batch = rows.batch(torch.arange(2), target, trainee.taps, (0, 0))
    tensors = {**trainee.parameters, "lm_head.weight": trainee.head} if fused else dict(trainee.parameters)
    reference = Reference(trainee.config, tensors, target.embedding, target.head)
    compared = 0
    with torch.no_grad():
        outputs = [trainee.normed(out) @ trainee.head.T for out in trainee.outputs(batch)]
        for row in range(2):
            for start, end in segments_of(batch.segments[row]):
                tokens = batch.tokens[row, start:end]
                states = batch.hidden.taps[row, start:end] if fused else batch.hidden.final[row, start:end, None]
                fused_states = reference.fuse(states)
                for index in range(1, len(tokens) - 1 - OPTIONS.steps):
                    places = torch.arange(index)
                    past = [reference.keys_values(tokens[1 : index + 1], fused_states[:index], places)]
                    feature = fused_states[index, None]
                    for step in range(OPTIONS.steps):
                        token, at = tokens[index + 1 + step, None], torch.tensor([index + step])
                        seen = torch.ones(1, index + step + 1, dtype=torch.bool)
                        logits, after = reference(token, feature, at, seen, past)
                        torch.testing.assert_close(
                            outputs[step][row, start + index].double(), logits[0], atol=5e-4, rtol=5e-4
                        )
                        past.append(reference.keys_values(token, feature, at))
                        feature, compared = after, compared + 1
    assert compared > 30


def segments_of(segments):
    return [
        (int((segments == number).nonzero()[0]), int((segments == number).nonzero()[-1]) + 1)
        for number in range(1, int(segments.max()) + 1)
    ]


@pytest.mark.parametrize("method", [EAGLE3, EAGLE, MTP])
def test_a_saved_drafter_is_the_one_that_was_trained(target, method, tmp_path):
    trainee, fused = random_trainee(target, method), method == EAGLE3
    trainee.save(tmp_path)
    config, tensors = (mtp_checkpoint if method == MTP else eagle_checkpoint).read(tmp_path, target.config)
    assert (config.method, config.fc_norm, config.vocab) == (trainee.config.method, fused, 64 if fused else 97)
    for name, one in trainee.parameters.items():
        torch.testing.assert_close(tensors[name].float(), one.detach(), atol=1e-2, rtol=1e-2)
    again = EagleTrainee(target, OPTIONS, torch.arange(3), method, seed=1, name="toy", init_from=tmp_path)
    assert torch.equal(again.vocab, trainee.vocab)
    assert again.parameters.keys() == trainee.parameters.keys()
