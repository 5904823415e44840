"""The chunked loss against autograd over whole tensors."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from paceline.training.trainees.losses import LossOptions, draft_loss


@pytest.mark.parametrize("markov", [True, False])
def test_loss_and_gradients_equal_autograds_for_any_chunk_size(markov):
    noise = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=noise, dtype=torch.float64)

    hidden, head, target = draw(11, 6), draw(20, 6), draw(11, 6)
    previous, w2 = (draw(11, 3), draw(20, 3)) if markov else (None, None)
    weight = torch.rand(11, generator=noise, dtype=torch.float64)
    leaves = [one.requires_grad_() for one in (hidden, previous, w2) if one is not None]

    z = hidden @ head.T + (previous @ w2.T if markov else 0)
    p, logq = F.softmax(target @ head.T / 0.7, -1), F.log_softmax(z, -1)
    tv = 1 - torch.minimum(p, logq.exp()).sum(-1)
    expected = (weight * (0.3 * -(p * logq).sum(-1) + 0.7 * tv)).sum()
    wanted = torch.autograd.grad(2 * expected, leaves)

    for rows in (4, 11, 100):
        options = LossOptions(ce=0.3, tv=0.7, temperature=0.7)
        found = draft_loss(hidden, head, target, weight, options, previous=previous, w2=w2, rows=rows)
        torch.testing.assert_close(found.loss.double(), expected, atol=1e-5, rtol=1e-5)
        assert torch.equal(found.hit, z.argmax(-1) == (target @ head.T).argmax(-1))
        for one, other in zip(torch.autograd.grad(2 * found.loss, leaves), wanted, strict=True):
            torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)
