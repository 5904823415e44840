"""The rows of a pass, laid out at once, against what the layout's own words say of each of them."""

from __future__ import annotations

import gc
import itertools
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core import draft as draft_module
from paceline.core.device_draft import DeviceDraft, clamp_trees
from paceline.core.draft import Draft, ancestors, packed_to
from paceline.core.sequence import Sequence
from paceline.core.verdict import HostVerdict, Verdict, VerdictRow
from paceline.engine import layout as layout_module
from paceline.engine.batch import Batch, Row
from paceline.engine.block_manager import BlockManager
from paceline.engine.in_flight import VerdictCopy
from paceline.engine.layout import filled_in, lay_out
from paceline.platform.garbage import expect_objects, no_collection
from paceline.platform.staging import Staging
from paceline.sampling_params import SamplingParams

BLOCK = 4


def make_batch(noise: random.Random, num_rows: int, *, decodes: bool, max_nodes: int) -> Batch:
    blocks, rows = BlockManager(400, BLOCK), []
    for index in range(num_rows):
        prompt = [noise.randrange(50) for _ in range(noise.randint(1, 20))]
        sequence = Sequence(str(index), prompt, SamplingParams().resolve({}), max_len=100)
        first = len(prompt) - 1 if decodes else noise.randrange(len(prompt))
        count = 1 if decodes else noise.randint(1, len(prompt) - first)
        if not decodes and first + 1 < len(prompt) and noise.random() < 0.3:
            sequence.num_cached = first + 1  # the last shared token is computed once more
        blocks.allocate(sequence, first + count + 1 + max_nodes)
        rows.append(Row(sequence, first, count, first + count == len(prompt), "some", max_nodes))
    batch = Batch.of(rows)
    batch.tables = tables_of(blocks, [row.sequence for row in rows])
    return batch


def tables_of(blocks: BlockManager, sequences: list[Sequence]) -> np.ndarray:
    width = max(len(sequence.blocks) for sequence in sequences)
    return blocks.tables_at(np.array([sequence.req_index for sequence in sequences]), width)


def slot(sequence, position, block_size):
    return sequence.blocks[position // block_size] * block_size + position % block_size


def make_draft(noise: random.Random, batch: int, width: int, *, trees: bool) -> Draft:
    draft = Draft.empty(batch, width=width)
    for row in range(batch):
        draft.num_nodes[row] = count = noise.randint(0, width)
        for node in range(count):
            parent = noise.randrange(-1, node) if trees and node else node - 1
            draft.tokens[row, node], draft.parents[row, node] = noise.randrange(50), parent
            draft.depth[row, node] = 1 if parent < 0 else draft.depth[row, parent] + 1
    return draft


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 6), st.integers(0, 6), st.booleans(), st.booleans())
def test_every_row_matches_the_definition(seed, num_rows, width, decodes, trees):
    noise = random.Random(seed)
    batch = make_batch(noise, num_rows, decodes=decodes, max_nodes=width)
    columns = batch.sequences, batch.first.tolist(), batch.count.tolist(), batch.samples.tolist()
    rows = list(map(Row, *columns))
    sampled = batch.sampling.tolist()
    draft = make_draft(noise, len(sampled), width, trees=trees)
    layout = lay_out(batch, draft, BLOCK)
    plan, at, logits, branches = layout.plan, 0, 0, []
    for index, row in enumerate(rows):
        tokens, table = row.sequence.tokens, row.sequence.blocks
        assert plan.block_tables[index].tolist() == table + [-1] * (plan.block_tables.shape[1] - len(table))
        for position in range(row.first, row.first + row.count):
            written = -1 if position < row.sequence.num_cached else slot(row.sequence, position, BLOCK)
            assert row_at(layout, at) == (tokens[position], position, written, index, position + 1, [])
            at += 1
        if not row.samples:
            assert layout.shape.num_nodes[index] == 0
            continue
        which, length = sampled.index(index), len(tokens)
        parents, depth = draft.parents[which].tolist(), draft.depth[which].tolist()
        count = layout.shape.num_nodes[index]
        is_chain = parents[:count] == list(range(-1, count - 1))
        paths = {-1: []}
        assert layout.shape.logit_rows[logits] == at - 1
        assert layout.shape.logit_row_of[which].tolist() == [logits + i if i <= count else -1 for i in range(width + 1)]
        for node in range(count):
            own, position = slot(row.sequence, length + node, BLOCK), length - 1 + depth[node]
            paths[node] = [*paths[parents[node]], own]
            seen = (position + 1, []) if is_chain else (length, paths[node])
            assert row_at(layout, at) == (int(draft.tokens[which, node]), position, own, index, *seen)
            assert layout.shape.logit_rows[logits + node + 1] == at
            at += 1
        assert layout.depths[index] == max(depth[:count], default=0)
        assert layout.shape.begin[index] == at - count - row.count
        logits += count + 1
        if not is_chain:
            branches.append([which, *(slot(row.sequence, length + node, BLOCK) for node in range(count))])
    assert (len(layout.tokens), len(layout.shape.logit_rows)) == (at, logits)
    assert [of[: len(own)] for of, own in zip(layout.tree_slots.tolist(), branches, strict=True)] == branches
    assert layout.is_tree == bool(branches)
    assert plan.max_len == int(plan.reach.max())


def row_at(layout, at):
    plan = layout.plan
    numbers = (layout.tokens, plan.positions, plan.slots, plan.sequence, plan.prefix)
    path = plan.path[at].tolist()
    length = int(plan.reach[at] - plan.prefix[at])
    assert plan.reach[at] == plan.positions[at] + 1
    assert path[length:] == [-1] * (len(path) - length)
    return (*(int(part[at]) for part in numbers), path[:length])


def test_tables_grow_and_seats_are_used_again():
    blocks, params = BlockManager(3000, BLOCK), SamplingParams().resolve({})
    sequences = [Sequence(str(i), [1], params, max_len=9999) for i in range(9)]
    for turn in range(3):
        for index, sequence in enumerate(sequences):
            blocks.allocate(sequence, (index + 1) * 40 * (turn + 1))
        blocks.check(sequences)
        tables = tables_of(blocks, sequences[::-1])
        assert [[block for block in row if block >= 0] for row in tables.tolist()] == [
            s.blocks for s in sequences[::-1]
        ]
        blocks.trim(sequences[3], 5)
        blocks.check(sequences)
        for sequence in sequences[::2]:
            blocks.free(sequence)
        blocks.check(sequences)
    assert len({sequence.req_index for sequence in sequences if sequence.blocks}) == 4


@pytest.mark.parametrize(("batch", "depth"), [(1, 0), (3, 0), (1, 4), (5, 3), (64, 2)])
def test_a_verdict_is_read_as_it_was_packed(batch, depth):
    noise = np.random.default_rng(batch)
    given = {
        "tokens": noise.integers(-1, 99, (batch, depth + 1)),
        "num_accepted": noise.integers(0, depth + 1, batch),
        "path": noise.integers(-1, 9, (batch, depth)),
        "kinds": noise.integers(0, 4, (batch, depth + 1)).astype(np.uint8),
    }
    verdict = Verdict(**{name: torch.from_numpy(part) for name, part in given.items()})
    packed = Verdict.blank(batch, depth, torch.device("cpu"))
    packed.pack().copy_(verdict.pack())
    for some, of in itertools.product({batch, (batch + 1) // 2}, (verdict, packed)):
        of = of if some == batch else of.first(some)
        staging = Staging(torch.device("cpu"))
        here, arrived = VerdictCopy(of, staging), VerdictCopy(of, staging)
        arrived._fetch(staging)
        arrived._arrived = SimpleNamespace(synchronize=lambda: None)
        for verdict_copy in (here, arrived):
            tokens, accepted = verdict_copy.read()
            kinds = [verdict_copy.kinds(row)[: count + 1] for row, count in enumerate(accepted)]
            assert accepted == given["num_accepted"][:some].tolist()
            for row, count in enumerate(accepted):
                assert tokens[row] == given["tokens"][row, : count + 1].tolist()
                assert kinds[row] == given["kinds"][row, : count + 1].tolist()
            assert len(tokens) == len(kinds) == some
    blank = Verdict.blank(batch, depth, torch.device("cpu"))
    assert blank.pack() is blank.packed
    for name in ("tokens", "num_accepted", "kinds"):
        assert (getattr(blank, name).data_ptr() - blank.packed.data_ptr()) % 16 == 0, name


def test_shapes_of_large_steps_are_not_kept(monkeypatch):
    """Each may take megabytes, and they rarely come again."""
    noise = random.Random(1)
    batch, draft = make_batch(noise, 4, decodes=True, max_nodes=6), make_draft(noise, 4, 6, trees=True)
    layout_module.cached_shape.cache_clear()
    kept = lay_out(batch, draft, BLOCK)
    assert lay_out(batch, draft, BLOCK).shape is kept.shape
    monkeypatch.setattr(layout_module, "CACHED_ROWS", batch.num_tokens - 1)
    large = lay_out(batch, draft, BLOCK)
    assert large.shape is not kept.shape
    assert np.array_equal(large.plan.host.each, kept.plan.host.each)
    assert np.array_equal(large.plan.host.path, kept.plan.host.path)
    assert layout_module.cached_shape.cache_info().currsize == 1


def test_a_verdict_of_lists_is_that_of_its_tensors():
    rows = [VerdictRow([4, 5, 6], [0, 2], [0, 0, 1]), VerdictRow([7], [], [2]), VerdictRow([8, 9], [0], [0, 2])]
    lists = HostVerdict.of(rows, 3)
    tensors = Verdict(**{name: getattr(lists, name) for name in ("tokens", "num_accepted", "path", "kinds")})
    assert lists.tokens.tolist() == [[4, 5, 6, -1], [7, -1, -1, -1], [8, 9, -1, -1]]
    assert lists.path.tolist() == [[0, 2, -1], [-1] * 3, [0, -1, -1]]
    assert lists.num_accepted.tolist() == [2, 0, 1]
    assert lists.kinds.tolist() == [[0, 0, 1, 3], [2, 3, 3, 3], [0, 2, 3, 3]]
    assert tensors.rows == rows
    assert lists.moves
    assert tensors.moves
    assert not HostVerdict.of(rows[1:], 3).moves  # accepted nodes lie where their tokens belong


@pytest.mark.parametrize("enabled", [True, False])
def test_a_step_leaves_garbage_collection_as_it_found_it(enabled):
    (gc.enable if enabled else gc.disable)()
    try:
        with no_collection():
            assert not gc.isenabled()
        assert gc.isenabled() is enabled
    finally:
        gc.enable()


def test_tokens_the_host_has_not_seen_are_filled_in_from_the_draft():
    draft = Draft.chains(torch.tensor([[10, 11], [12, 13]]), torch.tensor([2, 1]))
    assert filled_in(torch.tensor([5, -1, -2, 7, -3]), draft.tokens.flatten()).tolist() == [5, 10, 11, 7, 12]


@pytest.mark.parametrize(("before", "after"), [(700, 4096), (10_000, 10_000), (0, 0)])
def test_a_large_batch_is_not_taken_for_garbage_and_what_the_user_set_stays(before, after):
    kept = gc.get_threshold()
    try:
        gc.set_threshold(before, 7, 9)
        expect_objects(4096)
        assert gc.get_threshold() == (after, 7, 9)
    finally:
        gc.set_threshold(*kept)


def test_numbers_packed_for_a_device_arrive_whole_and_aligned(monkeypatch):
    monkeypatch.setattr(draft_module, "sent", lambda tensor, device: tensor)
    tensors = [
        torch.arange(n).view(shape) for n, shape in ((3, (3,)), (1, (1, 1)), (0, (2, 0)), (6, (2, 3)), (5, (5,)))
    ]
    packed = packed_to(torch.device("cuda"), *tensors)
    assert all(torch.equal(one, other) for one, other in zip(tensors, packed, strict=True))
    first = packed[0].data_ptr()
    assert all((one.data_ptr() - first) % 16 == 0 for one in packed if one.numel())


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 5), st.integers(1, 7))
def test_a_tree_known_on_the_device_alone_is_placed_as_the_host_would(seed, num_rows, width):
    """Malformed ones too: parents and tokens are made sound, and nothing else changes."""
    noise = random.Random(seed)
    batch = make_batch(noise, num_rows, decodes=True, max_nodes=width)
    draft = make_draft(noise, num_rows, width, trees=True)
    wrong = torch.tensor([[noise.choice([0, 0, 0, -7, 9]) for _ in range(width)] for _ in range(num_rows)])
    unknown = DeviceDraft.trees(draft.tokens, draft.parents + wrong, draft.num_nodes, width)
    unknown.validate(50)
    sound = unknown.on_host(50)
    sound.validate(50)
    if not wrong.any():
        for name in ("tokens", "parents", "depth", "num_nodes"):
            assert torch.equal(getattr(sound, name), getattr(draft, name)), name
    expected, layout = lay_out(batch, sound, BLOCK), lay_out(batch, unknown, BLOCK)
    assert layout.plan.max_len >= expected.plan.max_len
    assert torch.equal(filled_in(layout.tokens, draft.tokens.flatten()), expected.tokens)
    assert layout.tokens_on_device == (layout.plan.trees is None)
    placed = placed_on_the_device(layout.plan)
    nodes = [row for row in range(len(expected.tokens)) if row not in layout.shape.begin.tolist()]
    if expected.is_tree:
        for name in ("positions", "reach", "slots", "sequence"):
            assert torch.equal(getattr(placed, name)[nodes], getattr(expected.plan, name)[nodes]), name
        for row in nodes:
            if int(expected.plan.prefix[row]) == int(placed.prefix[row]):
                count = int(placed.reach[row] - placed.prefix[row])
                assert placed.path[row, :count].tolist() == expected.plan.path[row, :count].tolist()


def placed_on_the_device(plan):
    """Place trees by definition; tests/models compares the kernel with the same."""
    trees = plan.trees
    if trees is None:
        return plan
    _, parents, depth = clamp_trees(trees.parents, trees.parents, 1, trees.max_depth)
    path = ancestors(parents, depth, trees.max_depth)
    for tree, first, count, length in trees.numbers.tolist():
        for node in range(count):
            row, deep = first + node, int(depth[tree, node])
            plan.positions[row], plan.reach[row] = length - 1 + deep, length + deep
            plan.path[row, :deep] = plan.slots[first + path[tree, node, :deep]]
    return plan
