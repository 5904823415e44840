"""The likeliest tokens of rows of logits: torch's and the native way against a sort in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from paceline.models import kernels
from paceline.verify.top_tokens import TopTokens, top_tokens


def native_top_tokens(logits, n):
    native = kernels.top_tokens_of(torch.device("cpu"))
    if native is None:
        pytest.skip("no native library")
    return native(logits, n, 2)


WAYS = {"torch": top_tokens, "native": native_top_tokens}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("n", [1, 9, 64])
@pytest.mark.parametrize("vocab_size", [3, 17, 1000, 49_152])
def test_ids_probabilities_and_the_rest_equal_those_of_a_sort(way, vocab_size, n):
    logits = 4 * torch.randn(3, vocab_size, generator=torch.Generator().manual_seed(vocab_size + n))
    logits[1, ::2] = -math.inf  # tokens of p = 0 are no ids
    found = TopTokens.unpacked(WAYS[way](logits, n).numpy(), 3, n)
    p = logits.double().softmax(-1)
    for row in range(3):
        order = p[row].argsort(descending=True)[: min(n, int((p[row] > 0).sum()))]
        count = len(order)
        assert found.ids[row].tolist() == order.tolist() + [-1] * (n - count)
        np.testing.assert_allclose(found.probs[row, :count], p[row, order], rtol=1e-4)
        assert not found.probs[row, count:].any()
        assert abs(found.rest[row] - (1 - float(p[row, order].sum()))) < 1e-5


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("strange", [math.nan, math.inf])
def test_a_row_that_is_not_finite_has_no_tokens_and_harms_no_other(way, strange):
    logits = torch.arange(300.0).repeat(3, 1)
    logits[1, 7] = strange
    found = TopTokens.unpacked(WAYS[way](logits, 2).numpy(), 3, 2)
    assert found.ids.tolist() == [[299, 298], [-1, -1], [299, 298]]
    assert found.probs[1].tolist() == [0, 0]
    assert found.rest[1] == 1


def test_of_equal_tokens_the_native_way_takes_the_first():
    found = TopTokens.unpacked(native_top_tokens(torch.zeros(1, 500), 5).numpy(), 1, 5)
    assert found.ids.tolist() == [[0, 1, 2, 3, 4]]
