"""Drafts are validated, merged, cut and sent whole to a device; trees that only the device knows are made valid."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.device_draft import DeviceDraft, clamp_trees, merge_drafts
from paceline.core.draft import Draft, Proposal, ancestors
from tests.verify.steps import tree

PARTS = ("tokens", "parents", "depth", "num_nodes")


def test_ancestors_name_the_path_from_the_root():
    draft = tree([1, 2, 1, 0], [-1, -1, 0, 2], width=6)
    expected = [[0, -1, -1], [1, -1, -1], [0, 2, -1], [0, 2, 3], [-1, -1, -1], [-1, -1, -1]]
    assert ancestors(draft.parents, draft.depth, 3).tolist() == [expected]


def test_merging_drafts_keeps_every_row_and_every_q():
    ids = torch.tensor([1, 2, 4])
    first = Draft.chains(
        torch.tensor([[4, 2], [1, 0]]),
        torch.tensor([2, 1]),
        q=Proposal(probs=torch.rand(3, 3), row_of=torch.tensor([[0, 1, -1], [2, -1, -1]]), ids=ids),
    )
    second = tree([0, 1, 3], [-1, -1, 1])
    third = Draft.chains(
        torch.tensor([[3]]),
        torch.tensor([1]),
        q=Proposal(probs=torch.rand(1, 5), row_of=torch.tensor([[0, -1]])),
    )
    merged = merge_drafts([([4, 0], first), ([2], second), ([3], third)], batch=6, vocab_size=5)
    merged.validate(5)
    assert merged.num_nodes.tolist() == [1, 0, 3, 1, 2, 0]
    assert merged.tokens.tolist()[4] == [4, 2, 0]
    assert merged.parents.tolist()[2] == [-1, -1, 1]
    assert merged.q.ids is None
    assert torch.equal(merged.q.probs[merged.q.row_of[4, 1]][ids], first.q.probs[1])
    assert torch.equal(merged.q.probs[merged.q.row_of[3, 0]], third.q.probs[0])
    assert merged.q.row_of[2].tolist() == [-1] * 4
    alone = merge_drafts([([1, 0], first), ([2], second)], batch=3, vocab_size=5)
    assert alone.q.probs is first.q.probs  # the very tensor that was sampled
    assert alone.q.ids is ids


@pytest.mark.parametrize("placed", [False, True], ids=["at once", "trees first"])
def test_all_of_a_draft_goes_to_the_device_where_trees_of_the_device_stand_beside_chains_with_a_q(placed):
    """Where verification is captured, trees are filled in on the device first and the rest stays on the host."""
    device = torch.device("meta")
    ints = torch.zeros(1, 3, dtype=torch.int64, device=device)
    q = Proposal(probs=torch.rand(2, 5, device=device), row_of=torch.tensor([[0, 1, -1]]))
    trees = DeviceDraft.trees(ints, ints, torch.tensor([3]), 2, depth=ints)
    chain = DeviceDraft.chains(ints[:, :2], torch.tensor([2]), q)
    draft = merge_drafts([([0], trees), ([1], chain)], batch=2, vocab_size=5)
    if placed:
        draft = draft.placed(device)
        assert draft.is_planned is False
        assert draft.num_nodes.is_cpu
        assert draft.q.row_of.is_cpu
    there = draft.to(device)
    parts = (there.tokens, there.parents, there.depth, there.num_nodes, there.q.row_of, there.q.probs)
    assert {part.device for part in parts} == {device}


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"tokens": torch.tensor([[0, 9]])}, "outside the vocabulary"),
        ({"parents": torch.tensor([[-1, 1]])}, "does not come before"),
        ({"depth": torch.tensor([[1, 1]])}, "depth"),
        ({"num_nodes": torch.tensor([3])}, "num_nodes"),
        ({"q": Proposal(probs=torch.rand(1, 4), row_of=torch.tensor([[0, -1]]))}, "row_of"),
        ({"q": Proposal(probs=torch.rand(1, 3), row_of=torch.tensor([[0, -1, -1]]))}, "probs"),
        ({"q": Proposal(probs=torch.rand(1, 4), row_of=torch.tensor([[1, -1, -1]]))}, "points outside"),
    ],
)
def test_a_malformed_draft_is_refused(change, complaint):
    """Among few rows and many."""
    draft = tree([0, 1], [-1, 0])
    draft.validate(4)
    with pytest.raises(ValueError, match=complaint):
        replace(draft, **change).validate(4)
    if "q" not in change:
        sound = {name: getattr(draft, name).expand(5, *getattr(draft, name).shape[1:]) for name in PARTS}
        broken = {name: torch.cat((sound[name], change.get(name, sound[name][:1]))) for name in PARTS}
        with pytest.raises(ValueError, match="row 5"):
            Draft(**broken).validate(4)


@given(st.integers(0, 100_000), st.integers(1, 4))
def test_few_rows_are_judged_as_many_are(seed, width):
    """The same row once, and so often that arrays are worth their while."""
    noise = random.Random(seed)
    parents = [noise.randint(-1, max(node - 1, -1)) for node in range(width)]
    depth = [1] * width
    for node, parent in enumerate(parents):
        depth[node] = depth[parent] + 1 if parent >= 0 else 1
    parts = {"tokens": [noise.randrange(4) for _ in range(width)], "parents": parents, "depth": depth}
    if noise.random() < 0.7:
        noise.choice(list(parts.values()))[noise.randrange(width)] += noise.choice([-4, -1, 1, 4])
    count = noise.randint(-1, width + 1) if noise.random() < 0.3 else noise.randint(0, width)
    told = []
    for rows in (1, 9):
        tensors = {name: torch.tensor([part] * rows) for name, part in parts.items()}
        draft = Draft(**tensors, num_nodes=torch.full((rows,), count))
        try:
            draft.validate(4)
            told.append("sound")
        except ValueError as problem:
            told.append(str(problem))
    assert told[0] == told[1]


def reference(parents, max_depth):
    """One tree, node by node."""
    found, depth = [], []
    for node, parent in enumerate(parents):
        parent = min(max(parent, -1), node - 1)
        raw = 1 if parent < 0 else depth[parent] + 1
        found.append((parent, raw))
        depth.append(raw)
    kept = [(raw - 1) % max_depth + 1 for _, raw in found]
    return [-1 if deep == 1 else parent for (parent, _), deep in zip(found, kept, strict=True)], kept


@pytest.mark.parametrize("max_depth", [1, 3, 12])
def test_any_numbers_become_sound_trees(max_depth):
    noise = np.random.default_rng(4)
    parents, tokens = noise.integers(-9, 15, (200, 12)), noise.integers(-5, 60, (200, 12))
    found = clamp_trees(torch.from_numpy(tokens), torch.from_numpy(parents), 50, max_depth)
    for row in range(200):
        assert (found[1][row].tolist(), found[2][row].tolist()) == reference(parents[row].tolist(), max_depth)
    counts = torch.full((200,), 12)
    draft = Draft(tokens=found[0], parents=found[1], depth=found[2], num_nodes=counts, depth_bound=max_depth)
    draft.validate(50)
    path = ancestors(draft.parents, draft.depth, draft.max_depth)
    assert torch.equal((path >= 0).sum(-1), draft.depth)


def test_sound_trees_stay_as_they_are():
    parents = torch.tensor([[-1, 0, 1, 0, -1, 4], [-1, -1, -1, 2, 3, 4]])
    tokens = torch.arange(12).view(2, 6)
    same, above, depth = clamp_trees(tokens, parents, 50, 4)
    assert torch.equal(same, tokens)
    assert torch.equal(above, parents)
    assert depth.tolist() == [[1, 2, 3, 2, 1, 2], [1, 1, 1, 2, 3, 4]]
