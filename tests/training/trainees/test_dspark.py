"""Training DSpark: all blocks of a row at once against one block at a time without any mask."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from paceline.drafters.block.checkpoint import read
from paceline.training.acceptance import tau, walk
from paceline.training.data.batch import DeviceRows, anchors
from paceline.training.data.rows import packed
from tests.drafters.block.dspark_reference import after, unary_logits
from tests.training.toy import (
    SMALL,
    continued,
    noise_sequences,
    some_vocabulary,
    toy_target,
    toy_trainee,
)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return toy_target(tmp_path_factory.mktemp("target"))


def random_trainee(target, **changes):
    """Parameters far from their initial values, so that each of them matters."""
    trainee = toy_trainee(target, replace(SMALL, **changes))
    noise = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for one in trainee.parameters.values():
            one += 0.3 * torch.randn(one.shape, generator=noise)
    return trainee


@pytest.mark.parametrize("changes", [{}, {"portable": True}, {"rank": 0}], ids=["own", "portable", "dflash"])
def test_blocks_of_packed_rows_equal_one_block_at_a_time(target, changes):
    trainee = random_trainee(target, **changes)
    config, tensors = trainee.config, {**trainee.parameters, "d2t": trainee.vocab - torch.arange(len(trainee.vocab))}
    rows = DeviceRows.of(packed(noise_sequences(), 32), target.device)
    batch = rows.batch(torch.arange(3), target, trainee.taps, (0, 0))
    at, exists = anchors(batch, 5)
    assert exists.sum() > 10
    with torch.no_grad():
        context = trainee.model.context(trainee.parameters, batch.hidden.taps)
        place = torch.arange(32)
        same = batch.segments[:, None] == batch.segments.gather(1, at)[:, :, None]
        hidden = trainee.model.hidden(
            trainee.parameters,
            context,
            batch.positions,
            batch.tokens.gather(1, at),
            batch.positions.gather(1, at),
            same & (place < at[:, :, None]),
        )
        for row, one in exists.nonzero().tolist():
            anchor = int(at[row, one])
            start = anchor - int(batch.positions[row, anchor])
            assert bool((batch.segments[row, start : anchor + 1] == batch.segments[row, anchor]).all())
            taps = batch.hidden.taps[row, start:anchor]
            expected = unary_logits(config, tensors, target.embedding, taps, int(batch.tokens[row, anchor]))
            torch.testing.assert_close(hidden[row, one] @ trainee.head.T, expected, atol=2e-4, rtol=2e-4)


def test_the_loss_counts_every_position_that_the_reference_counts(target):
    """The weighted sum over anchors of a batch, by a loop over positions."""
    trainee = random_trainee(target)
    options, config = trainee.options, trainee.config
    tensors = {**trainee.parameters, "d2t": trainee.vocab - torch.arange(len(trainee.vocab))}
    rows = DeviceRows.of(packed(noise_sequences(), 32), target.device)
    batch = rows.batch(torch.arange(3), target, trainee.taps, (0, 0))
    at, exists = anchors(batch, options.anchors)
    total = weights = 0.0
    counts = [0] * config.block_size
    with torch.no_grad():
        for row, one in exists.nonzero().tolist():
            anchor = int(at[row, one])
            start = anchor - int(batch.positions[row, anchor])
            logits = unary_logits(
                config, tensors, target.embedding, batch.hidden.taps[row, start:anchor], int(batch.tokens[row, anchor])
            )
            for i in range(config.block_size):
                here = anchor + i
                inside = here + 1 < 32 and batch.segments[row, here + 1] == batch.segments[row, anchor]
                if not inside:
                    break
                counts[i] += 1
                if int(batch.tokens[row, here + 1]) not in trainee.vocab.tolist():
                    continue
                logq = after(config, tensors, logits[i], int(batch.tokens[row, here]))
                p = (batch.hidden.final[row, here] @ trainee.head.T).softmax(-1)
                tv = 1 - torch.minimum(p, logq.exp()).sum()
                weight = float(torch.exp(torch.tensor(-i / options.decay)))
                total += weight * float(options.ce * -(p * logq).sum() + options.tv * tv)
                weights += weight
        found = trainee.loss(batch)
    assert found.counts.tolist() == counts
    assert float(found.weight) == pytest.approx(weights, rel=1e-5)
    assert float(found.loss) == pytest.approx(total, rel=1e-4)


def test_a_saved_drafter_is_the_one_that_was_trained(target, tmp_path):
    trainee = random_trainee(target)
    trainee.save(tmp_path)
    config, tensors = read(tmp_path)
    assert replace(config, body=trainee.config.body) == trainee.config
    for field in ("num_layers", "hidden_size", "layers"):
        assert getattr(config.body, field) == getattr(trainee.config.body, field)
    assert torch.equal(tensors["d2t"] + torch.arange(64), some_vocabulary())
    for name, one in trainee.parameters.items():
        torch.testing.assert_close(tensors[name].float(), one.detach(), atol=1e-2, rtol=1e-2)


def test_a_tree_accepts_at_least_its_best_chain(target):
    trainee = random_trainee(target)
    prompt = [5, 9, 33, 2]
    answers = [(prompt, continued(target, prompt, 30))]
    chain, tree = walk(trainee, answers, 1, chain=True), walk(trainee, answers, 60)
    assert tau(tree) >= tau(chain)
    assert sum(each.committed for each in tree) == 30
