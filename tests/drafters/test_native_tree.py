"""Trees grown by native code are those that torch grows, and so are their scores."""

from __future__ import annotations

import math

import pytest
import torch

from paceline.drafters.base import DraftRow
from paceline.drafters.block_tree import grow, lattice
from paceline.drafters.tapped import likely_nodes
from paceline.models.native_kernels import NativeKernels, open_library, runnable_variants


@pytest.fixture(params=runnable_variants())
def kernels(request: pytest.FixtureRequest) -> NativeKernels:
    return NativeKernels(open_library(request.param), 2)


def numbers(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=generator) * 2 / shape[-1] ** 0.25


@pytest.mark.parametrize(
    ("batch", "depth", "vocab", "rank", "nodes", "beam", "count"),
    [
        pytest.param(3, 4, 700, 20, 60, 8, 64, id="Markov head"),
        pytest.param(1, 7, 333, 16, 7, 8, 128, id="one sequence"),
        pytest.param(2, 3, 41, 0, 13, 4, 8, id="no Markov head"),
        pytest.param(2, 5, 90, 6, 5, 1, 16, id="chains"),
        pytest.param(1, 2, 5, 3, 30, 8, 128, id="all there are"),
    ],
)
def test_the_trees_of_torch(
    kernels: NativeKernels, batch: int, depth: int, vocab: int, rank: int, nodes: int, beam: int, count: int
) -> None:
    generator = torch.Generator().manual_seed(3)
    logits = numbers(generator, batch, depth + 1, vocab)[:, 1:]  # rows of a block, of which the first drafts nothing
    markov = None
    if rank:
        markov = numbers(generator, 50, rank), numbers(generator, vocab, rank), numbers(generator, vocab, rank)
    anchors, ids = torch.arange(batch) * 7 + 1, torch.randperm(vocab, generator=generator)
    anchor_rows, w1, w2 = markov or (None, None, None)
    wanted = grow(lattice(logits, None if anchor_rows is None else anchor_rows[anchors], w1, w2, count), nodes, beam)
    tree, scores = kernels.block_trees(logits, anchors, markov, ids, nodes, beam, count)
    there = wanted.tokens.shape[1]
    assert tree[..., :there].tolist() == torch.stack((ids[wanted.tokens], wanted.parents, wanted.depth)).tolist()
    torch.testing.assert_close(scores[:, :there], wanted.score, rtol=1e-4, atol=1e-4)
    assert (scores[:, there:] == -math.inf).all()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_logits_that_are_no_numbers_end_nothing(kernels: NativeKernels, value: float) -> None:
    """The nodes are arbitrary tokens of the vocabulary, and every parent comes first."""
    logits = torch.full((1, 4, 100), value)
    tree, _ = kernels.block_trees(logits, torch.tensor([3]), None, torch.arange(100), 20, 4, 32)
    tokens, parents, depth = tree[:, 0]
    assert ((tokens >= 0) & (tokens < 100)).all()
    assert (parents < torch.arange(20)).all()
    assert (depth >= 0).all()


def test_nodes_less_likely_than_asked_for_are_left_out() -> None:
    scores = torch.log(torch.tensor([[0.6, 0.3, 0.2, 0.1], [0.05, 0.04, 0.03, 0.02], [0.6, 0.3, 0.2, 0.1]]))
    rows = [DraftRow(None, 4, least) for least in (0.15, 0.15, 0.0)]  # type: ignore[arg-type]
    assert likely_nodes(scores, rows, torch.tensor([4, 4, 4])).tolist() == [3, 1, 4]
    assert likely_nodes(scores, rows, torch.tensor([2, 0, 4])).tolist() == [2, 0, 4]
