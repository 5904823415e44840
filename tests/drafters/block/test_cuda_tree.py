"""Trees grown by kernels are those that torch grows."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from paceline.core.draft import Draft
from paceline.core.verdict import INVALID
from paceline.drafters.block.cuda_tree import PART, _grow, device_trees, serves
from paceline.drafters.block.tree import BEAM, CANDIDATES, grow, lattice
from tests.helpers.interpreter import require_interpreter

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
REAL = pytest.param(4, 7, 16384, 128, 60, BEAM, CANDIDATES, PART, marks=pytest.mark.cuda, id="real sizes")


@pytest.mark.parametrize(
    ("batch", "depth", "vocab", "rank", "nodes", "beam", "count", "part"),
    [
        pytest.param(2, 3, 40, 6, 13, 4, 8, 16, id="Markov head"),
        pytest.param(1, 2, 33, 0, 6, 2, 8, 16, id="no Markov head"),
        REAL,
    ],
)
def test_the_trees_of_torch(batch, depth, vocab, rank, nodes, beam, count, part) -> None:
    generator = torch.Generator().manual_seed(3)

    def numbers(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * 2 / shape[-1] ** 0.25).to(DEVICE)

    logits = numbers(batch, depth + 1, vocab)[:, 1:]  # rows of a block, of which the first drafts nothing
    anchor_rows, w1, w2 = (numbers(50, rank), numbers(vocab, rank), numbers(vocab, rank)) if rank else (None,) * 3
    anchors, ids = (torch.arange(batch) * 7 + 1).to(DEVICE), torch.randperm(vocab, generator=generator).to(DEVICE)
    before = None if anchor_rows is None else anchor_rows[anchors]
    wanted = grow(lattice(logits, before, w1, w2, count), nodes, beam)
    found = device_trees(logits, anchors, anchor_rows, w1, w2, ids, nodes, beam, count=count, part=part)
    assert found.tolist() == torch.stack((ids[wanted.tokens], wanted.parents, wanted.depth)).tolist()


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), 3.0])
def test_trees_are_sound_whatever_the_scores(wrong) -> None:
    """Verification and the pass take a tree as it is: parents before children, a level apart."""
    require_interpreter()
    depth, beam, count, nodes, vocab = 3, 4, 8, 30, 40
    noise = torch.Generator().manual_seed(5)
    child = torch.randint(0, count, (3, depth, count, beam), generator=noise, dtype=torch.int32)
    scores = -torch.rand(3, depth, count, beam, generator=noise)
    scores[torch.rand(scores.shape, generator=noise) < 0.3] = wrong
    tokens = torch.randint(0, vocab, (3, depth, count), generator=noise, dtype=torch.int32)
    scratch = [torch.empty(3, 64, dtype=kind) for kind in (torch.float32, *[torch.int32] * 3)]
    drafts = torch.empty(3, 3, nodes, dtype=torch.int64)
    sizes = {"DEPTH": depth, "COUNT": count, "WIDE": beam, "ALL": 64, "CHOSEN": 32}
    _grow[(3,)](tokens, child, scores, torch.arange(vocab), *scratch, drafts, 3, nodes, **sizes)
    found, parents, depths = drafts
    draft = Draft(tokens=found, parents=parents, depth=depths, num_nodes=torch.full((3,), nodes))
    draft.validate(vocab)
    assert int(depths.max()) <= depth


def test_a_last_token_that_is_none_reads_no_row_before_the_first() -> None:
    """Logits of the target that are not numbers yield `INVALID`, from which a draft may be begun before it is read."""
    generator, vocab, rank = torch.Generator().manual_seed(4), 40, 6
    logits, rows, w1, w2 = (torch.randn(*shape, generator=generator).to(DEVICE) for shape in
                            ((2, 3, vocab), (51, rank), (vocab, rank), (vocab, rank)))  # fmt: skip
    rows[0] *= 100  # what lies before the rows of tokens
    sizes = {"nodes": 13, "beam": 4, "count": 8, "part": 16}
    ids = torch.arange(vocab, device=DEVICE)
    found, first = (
        device_trees(logits, torch.tensor([token, 7], device=DEVICE), rows[1:], w1, w2, ids, **sizes)
        for token in (INVALID, 0)
    )
    assert found.tolist() == first.tolist()


def test_a_lane_without_a_node_reads_no_token(monkeypatch) -> None:
    """18 of 20 nodes are sorted in 32 lanes; reading behind the last position is noticed, not waited for to crash."""
    require_interpreter()
    from triton.runtime.interpreter import interpreter_builder

    depth, beam, count, nodes, vocab, lanes = 2, 4, 8, 18, 40, 32
    behind = 4  # rows that the deepest lane would reach
    tokens = torch.arange((depth + behind) * count, dtype=torch.int32).view(-1, count) % vocab
    child = torch.arange(beam, dtype=torch.int32).repeat(depth, count, 1)
    child_score = torch.randn(depth, count, beam, generator=torch.Generator().manual_seed(1))
    scratch = [torch.empty(1, lanes, dtype=kind) for kind in (torch.float32, *[torch.int32] * 3)]
    drafts, read, load = torch.empty(3, 1, nodes, dtype=torch.int64), set(), interpreter_builder.create_masked_load

    def noted(ptrs, mask, *more):
        read.update(ptrs.data[mask.data].ravel().tolist())
        return load(ptrs, mask, *more)

    monkeypatch.setattr(interpreter_builder, "create_masked_load", noted)
    ids = torch.arange(vocab)
    _grow[(1,)](
        tokens, child, child_score, ids, *scratch, drafts, 1, nodes,
        DEPTH=depth, COUNT=count, WIDE=beam, ALL=lanes, CHOSEN=lanes,
    )  # fmt: skip
    first = tokens.data_ptr()
    assert read & set(range(first, first + depth * tokens[0].nbytes)), "tokens were read"
    assert not read & set(range(first + depth * tokens[0].nbytes, first + tokens.nbytes))


def test_shapes_that_are_left_to_torch() -> None:
    assert serves(7, 16384, 8, 60)
    assert not serves(7, 16384, 1, 7)  # chains
    assert not serves(7, CANDIDATES - 1, 8, 60)  # fewer tokens than candidates
    assert not serves(7, 16384, 6, 60)
    assert not serves(1, 16384, 8, 60)  # more nodes than there are
