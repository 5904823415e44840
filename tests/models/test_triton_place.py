# ruff: noqa: E402
"""Trees that only the device knows, placed by the kernel through Triton's interpreter, against `paceline.draft`."""

from __future__ import annotations

import pytest
import torch

from tests.interpreter import require_interpreter

require_interpreter()

from paceline.draft import UNKNOWN, ancestors, clamp_trees
from paceline.models.plan import DeviceTrees, PassPlan
from paceline.models.triton.place import place_trees

NODES, ROWS, PATH, BEFORE = 20, 90, 24, -7  # BEFORE: what stands in rows that are no nodes


def scene(parents, counts, max_depth, *, rows=None):
    """(plan, trees): trees of so many nodes, their rows of the pass and their slots anywhere."""
    counts = torch.tensor(counts)
    width = int(counts.max())
    used = torch.arange(width) < counts[:, None]
    at = torch.full((len(counts), width), -1)
    at[used] = torch.randperm(ROWS)[: int(counts.sum())]
    slots = torch.where(used, torch.randint(0, 5000, used.shape), -1)

    def blank(*shape):
        return torch.full(shape, BEFORE, dtype=torch.int32)

    plan = PassPlan(
        positions=blank(ROWS),
        slots=blank(ROWS),
        sequence=blank(ROWS),
        prefix=blank(ROWS),
        reach=blank(ROWS),
        path=blank(ROWS, PATH),
        block_tables=blank(1, 1),
        block_size=16,
        max_len=1000,
    )
    which = torch.arange(len(counts)) if rows is None else rows
    length = torch.randint(1, 900, (len(counts),))
    return plan, DeviceTrees(which, at, slots, length, parents, max_depth)


def check(plan, trees):
    """Against the rules written in torch, of nodes within the bound; deeper ones end at the bound."""
    width = trees.at.shape[1]
    raw = trees.parents[trees.rows][:, :width]
    _, parents, true = clamp_trees(torch.zeros_like(raw), raw, 1, width)
    depth, paths = true.clamp_max(trees.max_depth), ancestors(parents, true, width)
    nodes = torch.nonzero(trees.at >= 0).tolist()
    for tree, node in nodes:
        row, length = int(trees.at[tree, node]), int(trees.length[tree])
        assert int(plan.positions[row]) == length - 1 + int(depth[tree, node])
        assert int(plan.reach[row]) == length + int(depth[tree, node])
        own = [at for at in paths[tree, node].tolist() if at >= 0][-trees.max_depth :]
        expected = [int(trees.slots[tree, at]) for at in own]
        assert plan.path[row].tolist() == expected + [BEFORE] * (PATH - len(expected))
    others = torch.ones(ROWS, dtype=torch.bool)
    others[trees.at[trees.at >= 0]] = False
    for part in (plan.positions, plan.reach, plan.path):
        assert (part[others] == BEFORE).all()
    for part in (plan.slots, plan.sequence, plan.prefix):
        assert (part == BEFORE).all()
    return true


def random_tree():
    return torch.tensor([int(torch.randint(-1, node, ())) if node else -1 for node in range(NODES)])


@pytest.mark.parametrize("seed", range(4))
def test_trees_are_placed_as_the_host_would_place_them(seed):
    torch.manual_seed(seed)
    wide = torch.nn.functional.pad(torch.stack([random_tree() for _ in range(5)]), (0, 5))
    plan, trees = scene(wide[:, :NODES], [NODES, 1, 7, 13], NODES, rows=torch.tensor([4, 0, 2, 1]))
    place_trees(plan, trees)
    check(plan, trees)


@pytest.mark.parametrize("max_depth", [1, 3, 6])
def test_nodes_deeper_than_the_bound_are_taken_for_that_deep(max_depth):
    torch.manual_seed(max_depth)
    chain = torch.arange(NODES) - 1
    parents = torch.stack((chain, chain.clamp_min(2)))
    plan, trees = scene(parents, [NODES, 9], max_depth)
    place_trees(plan, trees)
    assert int(check(plan, trees).max()) > max_depth


@pytest.mark.parametrize("max_depth", [1, 3, 6])
def test_trees_made_sound_are_placed_at_the_depth_verification_takes_them_for(max_depth):
    torch.manual_seed(max_depth)
    raw = torch.randint(-3, NODES + 3, (2, NODES))
    _, parents, depth = clamp_trees(torch.zeros_like(raw), raw, 1, max_depth)
    plan, trees = scene(parents, [NODES, NODES], max_depth)
    place_trees(plan, trees)
    check(plan, trees)
    assert torch.equal(plan.positions[trees.at], (trees.length[:, None] - 1 + depth).int())


@pytest.mark.parametrize("seed", range(4))
def test_parents_that_do_not_come_before_their_nodes_are_made_to(seed):
    """As verification takes them, or the pass would compute one tree and verify another."""
    torch.manual_seed(seed)
    parents = torch.randint(-6, NODES + 6, (3, NODES))
    wild = torch.tensor([UNKNOWN, 2**31, 2**32 + 1, 2**40 + 3, -(2**31) - 1, -(2**40), 2**63 - 1, -(2**63)])
    parents[:, 3 : 3 + len(wild)] = wild
    plan, trees = scene(parents, [NODES, 12, 5], NODES)
    place_trees(plan, trees)
    check(plan, trees)
