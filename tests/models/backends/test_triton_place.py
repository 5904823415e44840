# ruff: noqa: E402
"""Trees that only the device knows, placed by the kernel through Triton's interpreter, against `core.draft`."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.helpers.interpreter import require_interpreter

require_interpreter()

from paceline.core.device_draft import clamp_trees
from paceline.core.draft import UNKNOWN, ancestors
from paceline.models.backends.cuda.place import place_trees
from paceline.models.plan import DeviceTrees, PassPlan

NODES, ROWS, PATH, BEFORE = 20, 90, 24, -7  # BEFORE: what stands in rows that are no nodes


def scene(parents, counts, max_depth, *, rows=None):
    """(plan, tokens of the pass, trees): trees of so many nodes in rows that follow one another, slots anywhere."""
    ends = np.cumsum([1 + count for count in counts])  # a row before each is the sequence's own

    def blank(*shape):
        return torch.full(shape, BEFORE, dtype=torch.int32)

    plan = PassPlan(
        positions=blank(ROWS),
        slots=torch.randint(0, 5000, (ROWS,), dtype=torch.int32),
        sequence=blank(ROWS),
        prefix=blank(ROWS),
        reach=blank(ROWS),
        path=blank(ROWS, PATH),
        block_tables=blank(1, 1),
        block_size=16,
        max_len=1000,
    )
    which = range(len(counts)) if rows is None else rows
    numbers = [which, ends - counts, counts, np.random.default_rng(len(counts)).integers(1, 900, len(counts))]
    drafted = torch.randint(0, 49_000, parents.shape)
    return plan, blank(ROWS), DeviceTrees(np.column_stack(numbers).astype(np.int32), drafted, parents, max_depth)


def place_and_check(plan, tokens, trees):
    """Against the rules written in torch, of nodes within the bound; deeper ones end at the bound."""
    slots = plan.slots.clone()
    place_trees(plan, tokens, torch.from_numpy(trees.numbers.ravel()), trees)
    width = trees.parents.shape[1]
    _, parents, true = clamp_trees(trees.tokens, trees.parents, 50_000, width)
    depth, paths = true.clamp_max(trees.max_depth), ancestors(parents, true, width)
    others = torch.ones(ROWS, dtype=torch.bool)
    for tree, first, count, length in trees.numbers.tolist():
        for node in range(count):
            row, others[first + node] = first + node, False
            assert int(tokens[row]) == int(trees.tokens[tree, node])
            assert int(plan.positions[row]) == length - 1 + int(depth[tree, node])
            assert int(plan.reach[row]) == length + int(depth[tree, node])
            own = [at for at in paths[tree, node].tolist() if at >= 0][-trees.max_depth :]
            expected = [int(slots[first + at]) for at in own]
            assert plan.path[row].tolist() == expected + [BEFORE] * (PATH - len(expected))
    for part in (plan.positions, plan.reach, plan.path, tokens):
        assert (part[others] == BEFORE).all()
    for part in (plan.sequence, plan.prefix):
        assert (part == BEFORE).all()
    assert torch.equal(plan.slots, slots)
    return true


def random_tree():
    return torch.tensor([int(torch.randint(-1, node, ())) if node else -1 for node in range(NODES)])


@pytest.mark.parametrize("seed", range(4))
def test_trees_are_placed_as_the_host_would_place_them(seed):
    torch.manual_seed(seed)
    wide = torch.nn.functional.pad(torch.stack([random_tree() for _ in range(5)]), (0, 5))
    place_and_check(*scene(wide[:, :NODES], [NODES, 1, 7, 13], NODES, rows=[4, 0, 2, 1]))


@pytest.mark.parametrize("max_depth", [1, 3, 6])
def test_nodes_deeper_than_the_bound_are_taken_for_that_deep(max_depth):
    torch.manual_seed(max_depth)
    chain = torch.arange(NODES) - 1
    parents = torch.stack((chain, chain.clamp_min(2)))
    assert int(place_and_check(*scene(parents, [NODES, 9], max_depth)).max()) > max_depth


@pytest.mark.parametrize("max_depth", [1, 3, 6])
def test_trees_made_sound_are_placed_at_the_depth_verification_takes_them_for(max_depth):
    torch.manual_seed(max_depth)
    raw = torch.randint(-3, NODES + 3, (2, NODES))
    _, parents, depth = clamp_trees(torch.zeros_like(raw), raw, 1, max_depth)
    plan, tokens, trees = scene(parents, [NODES, NODES], max_depth)
    place_and_check(plan, tokens, trees)
    for tree, first, count, length in trees.numbers.tolist():
        assert torch.equal(plan.positions[first : first + count], (length - 1 + depth[tree]).int())


@pytest.mark.parametrize("seed", range(4))
def test_parents_that_do_not_come_before_their_nodes_are_made_to(seed):
    """Verification clamps parents too: else the pass would compute one tree and verify another."""
    torch.manual_seed(seed)
    parents = torch.randint(-6, NODES + 6, (3, NODES))
    wild = torch.tensor([UNKNOWN, 2**31, 2**32 + 1, 2**40 + 3, -(2**31) - 1, -(2**40), 2**63 - 1, -(2**63)])
    parents[:, 3 : 3 + len(wild)] = wild
    place_and_check(*scene(parents, [NODES, 12, 5], NODES))
