"""Trees grown by native code are those that torch grows, and so are their scores."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from paceline.drafters.base import DraftRequest
from paceline.drafters.block.native import BlockRow, NativeBlocks
from paceline.drafters.block.tree import grow, lattice
from paceline.drafters.tapped import likely_nodes
from paceline.models.backends.cpu.kernels import NativeKernels
from paceline.models.backends.cpu.stack import ContextKVView, NativeStack
from paceline.models.kernels import StackParams
from paceline.models.kv_cache import LayerCache
from paceline.native.library import open_library, runnable_variants


@pytest.fixture(params=runnable_variants())
def kernels(request: pytest.FixtureRequest) -> NativeKernels:
    return NativeKernels(open_library(request.param), 2)


def numbers(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=generator) * 2 / shape[-1] ** 0.25


class Scene:
    """Blocks of a drafter without layers, whose head and embeddings are given, for sequences of a req_index each."""

    def __init__(self, kernels, embedding, masks, head, markov, ids, beam, count, first_row):
        dim = 4
        shape = StackParams((), 1e-6)
        caches = [LayerCache(torch.zeros(64, 1, dim), torch.zeros(64, 1, dim))]
        self.stack = NativeStack(kernels, [], caches, shape)
        self.blocks = NativeBlocks(
            kernels,
            ContextKVView(eps=1e-6),
            masks=masks,
            norm=torch.ones(masks.shape[1]),
            head=kernels.pack(head),
            embedding=embedding,
            ids=ids,
            markov=markov,
            beam=beam,
            count=count,
            first_row=first_row,
            max_positions=64,
            block_size=16,
        )
        self.columns = torch.zeros(1, dtype=torch.int64)

    def draft(self, anchors, nodes, min_node_probability=0.0):
        capacity, length = 4, 3
        tokens = torch.zeros(len(anchors) * capacity + 1, dtype=torch.int64)
        tokens[torch.arange(len(anchors)) * capacity + length - 2] = anchors
        self.blocks.bind(self.stack, self.columns, (torch.zeros(len(tokens), 1, 1), tokens, capacity))
        rows = [BlockRow(req_index, length, 0, 0, 0, 32) for req_index in range(len(anchors))]
        asked = [DraftRequest(None, nodes, min_node_probability)] * len(rows)
        return map(torch.from_numpy, self.blocks.draft(rows, [[2, 3]] * len(rows), asked, nodes))


@pytest.mark.parametrize(
    ("batch", "depth", "vocab", "rank", "nodes", "beam", "count"),
    [
        pytest.param(3, 4, 700, 20, 60, 8, 64, id="Markov head"),
        pytest.param(1, 7, 333, 16, 7, 8, 128, id="one sequence"),
        pytest.param(2, 12, 333, 16, 50, 2, 32, id="deep"),
        pytest.param(2, 3, 41, 0, 13, 4, 8, id="no Markov head"),
        pytest.param(2, 5, 90, 6, 5, 1, 16, id="chains"),
        pytest.param(1, 2, 5, 3, 30, 8, 128, id="all there are"),
    ],
)
@pytest.mark.parametrize("first_row", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_trees_of_torch(kernels, batch, depth, vocab, rank, nodes, beam, count, first_row, dtype):
    generator, hidden = torch.Generator().manual_seed(4), 24
    embedding, masks = numbers(generator, 50, hidden).to(dtype), numbers(generator, depth - 1 + first_row, hidden)
    head, markov = 2 * numbers(generator, vocab, hidden), None
    if rank:
        markov = numbers(generator, 50, rank), numbers(generator, vocab, rank), numbers(generator, vocab, rank)
    anchors, ids = torch.arange(batch) * 7 + 1, torch.randperm(vocab, generator=generator)
    block = torch.cat((embedding[anchors].float()[:, None], masks.expand(batch, -1, -1)), 1)[:, first_row:]
    logits = torch.nn.functional.rms_norm(block, (hidden,), eps=1e-6) @ head.T
    anchor_rows, w1, w2 = markov or (None, None, None)
    wanted = grow(lattice(logits, None if anchor_rows is None else anchor_rows[anchors], w1, w2, count), nodes, beam)
    scene = Scene(kernels, embedding, masks, head, markov, ids, beam, count, first_row)
    tree, scores = scene.draft(anchors, nodes)
    there = wanted.tokens.shape[1]
    assert tree[..., :there].tolist() == torch.stack((ids[wanted.tokens], wanted.parents, wanted.depth)).tolist()
    torch.testing.assert_close(scores[:, :there], wanted.score, rtol=1e-4, atol=1e-4)
    assert (scores[:, there:] == -math.inf).all()


def test_positions_that_no_tree_reaches_are_not_looked_at(kernels):
    """The nodes that are likely enough are those of the whole tree."""
    generator, hidden, depth = torch.Generator().manual_seed(5), 24, 20
    embedding, masks = numbers(generator, 50, hidden), numbers(generator, depth - 1, hidden)
    scene = Scene(kernels, embedding, masks, numbers(generator, 90, hidden), None, torch.arange(90), 8, 64, 0)
    anchors = torch.tensor([4, 9])
    whole, scores = scene.draft(anchors, 60)
    least = float(scores[:, 5].max().exp())
    cut, few = scene.draft(anchors, 60, least)
    assert len(scene.blocks.logits) < len(anchors) * depth
    for row in range(len(anchors)):
        kept = int((scores[row] >= math.log(least)).sum())
        assert 1 < kept < 60
        assert int((few[row] >= math.log(least)).sum()) == kept
        assert torch.equal(whole[:, row, :kept], cut[:, row, :kept])


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_logits_that_are_no_numbers_end_nothing(kernels, value):
    """The nodes are arbitrary tokens of the vocabulary, and every parent comes first."""
    head = torch.full((100, 8), value)
    scene = Scene(kernels, torch.ones(5, 8), torch.ones(3, 8), head, None, torch.arange(100), 4, 32, 0)
    tree, _ = scene.draft(torch.tensor([3]), 20)
    tokens, parents, depth = tree[:, 0]
    assert ((tokens >= 0) & (tokens < 100)).all()
    assert (parents < torch.arange(20)).all()
    assert (depth > 0).all()


def test_nodes_less_likely_than_asked_for_are_left_out() -> None:
    scores = np.log(np.array([[0.6, 0.3, 0.2, 0.1], [0.05, 0.04, 0.03, 0.02], [0.6, 0.3, 0.2, 0.1]], np.float32))
    rows = [DraftRequest(None, 4, least) for least in (0.15, 0.15, 0.0)]  # type: ignore[arg-type]
    assert likely_nodes(scores, rows, [4, 4, 4]) == [3, 1, 4]
    assert likely_nodes(scores, rows, [2, 0, 4]) == [2, 0, 4]
