"""From sequences and drafts to the flat rows of one target pass, on the host; the model takes them to its device.

Each scheduled sequence gives its uncomputed tokens and then its draft's nodes; only valid nodes become rows. Node j
of a sequence with L tokens is written to the slot of position L + j, whatever its depth, and stands at position L - 1
+ depth: in a chain that is the same. All rows are laid out at once, in a few operations on arrays: a step may have
hundreds of sequences.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.draft import Draft
from paceline.engine.batch import Batch, Row
from paceline.models.plan import PassPlan
from paceline.sequence import Sequence

Ints = np.ndarray[Any, np.dtype[np.int64]]
Bools = np.ndarray[Any, np.dtype[np.bool_]]
Int32s = np.ndarray[Any, np.dtype[np.int32]]


def slot(sequence: Sequence, position: int, block_size: int) -> int:
    block, offset = divmod(position, block_size)
    return sequence.blocks[block] * block_size + offset


@dataclass(slots=True)
class Span:
    """Where one sequence's rows lie in the pass: its tokens from `begin`, then its nodes from `nodes`."""

    row: Row
    begin: int
    nodes: int
    num_nodes: int


@dataclass
class Layout:
    tokens: Tensor  # (M,)
    plan: PassPlan
    logit_rows: Tensor  # rows whose logits are needed: each sampling sequence's last token and all its nodes
    logit_row_of: Tensor  # (B, N + 1) index into logit_rows by slot: 0 the last token, i + 1 node i; -1 = padding
    rows: list[Row]  # of the batch
    num_nodes: list[int]  # by row of the batch
    sampled: list[int]  # which rows of the batch sample, in the order of the draft's rows
    trees: dict[int, list[int]]  # by row of the batch, where its draft branches: nodes at depth 1, 2, ...

    @property
    def is_tree(self) -> bool:
        """Some accepted path may have to be moved into place."""
        return bool(self.trees)

    def nodes_by_depth(self, index: int) -> list[int]:
        return self.trees.get(index) or [1] * self.num_nodes[index]

    @functools.cached_property
    def spans(self) -> list[Span]:
        """By row of the batch."""
        spans, begin = [], 0
        for row, num_nodes in zip(self.rows, self.num_nodes, strict=True):
            spans.append(Span(row, begin, begin + row.count, num_nodes))
            begin += row.count + num_nodes
        return spans


def lay_out(batch: Batch, draft: Draft, block_size: int) -> Layout:
    rows = batch.rows
    sampled = [index for index, row in enumerate(rows) if row.samples]
    first, count = np.array([row.first for row in rows]), np.array([row.count for row in rows])
    num_nodes = np.zeros_like(count)
    if draft.width:
        num_nodes[sampled] = draft.num_nodes.numpy()
    size = count + num_nodes
    begin = size.cumsum() - size
    owner = np.arange(len(rows)).repeat(size)  # (M,)
    node = np.arange(len(owner)) - (begin + count)[owner]  # (M,) -1 the last token, before it the others
    stored = (first + count)[owner] + node  # (M,) the position whose slot the row is written to
    each = np.zeros((5, len(owner)), np.int32)  # one array for all that is one number a row
    each[0], each[2], each[3] = stored, owner, stored + 1
    each[1] = batch.tables[owner, stored // block_size] * block_size + stored % block_size
    cached = [row.sequence.num_cached for row in rows]
    each[1, stored < np.array(cached)[owner]] = -1
    path = np.empty((len(owner), 0), np.int32)
    trees = _trees(draft)
    if trees.size:
        path = _place_trees(draft, trees, each, (begin + count)[sampled])
    logit_rows, logit_row_of = _logits(draft, node, np.array([row.samples for row in rows])[owner])
    of = torch.from_numpy(each)
    return Layout(
        tokens=torch.from_numpy(_tokens(rows, draft, node)),
        plan=PassPlan(
            positions=of[0],
            slots=of[1],
            sequence=of[2],
            prefix=of[3],
            path=torch.from_numpy(path),
            path_len=of[4],
            block_tables=torch.from_numpy(batch.tables),
            block_size=block_size,
            max_len=int(each[0].max(initial=-1)) + 1,
        ),
        logit_rows=torch.from_numpy(logit_rows),
        logit_row_of=torch.from_numpy(logit_row_of),
        rows=rows,
        num_nodes=num_nodes.tolist(),
        sampled=sampled,
        trees={sampled[tree]: draft.depth[tree].bincount()[1:].tolist() for tree in trees.tolist()},
    )


def _tokens(rows: list[Row], draft: Draft, node: Ints) -> Ints:
    """(M,) the sequences' own and the drafts': nodes are in the order of their rows."""
    own = chain.from_iterable([row.sequence.tokens[row.first : row.first + row.count] for row in rows])
    if not draft.width:
        return np.fromiter(own, np.int64, len(node))
    tokens, is_node = np.empty_like(node), node >= 0
    tokens[~is_node] = np.fromiter(own, np.int64)
    tokens[is_node] = draft.tokens.numpy()[_used(draft)]
    return tokens


def _logits(draft: Draft, node: Ints, samples: Bools) -> tuple[Ints, Ints]:
    """Which rows' logits are needed, and (B, N + 1) where each slot's lie among them."""
    logit_rows = np.flatnonzero((node >= -1) & samples)
    row_of = np.full((draft.batch, draft.width + 1), -1)
    used = np.ones((draft.batch, draft.width + 1), np.bool_)
    used[:, 1:] = _used(draft)
    row_of[used] = np.arange(len(logit_rows))
    return logit_rows, row_of


def _used(draft: Draft) -> Bools:
    """(B, N) which nodes are not padding."""
    return np.arange(draft.width) < draft.num_nodes.numpy()[:, None]


def _trees(draft: Draft) -> Ints:
    """The rows of the draft in which some node hangs from another than the one before."""
    if not draft.width:
        return np.empty(0, np.int64)
    return np.flatnonzero((_used(draft) & (draft.parents.numpy() != np.arange(-1, draft.width - 1))).any(1))


def _place_trees(draft: Draft, trees: Ints, each: Int32s, first: Ints) -> Int32s:
    """Nodes of trees see what is committed through the block table, and their drafted ancestors by slot: (M, P).

    `first` (B,): the row of the pass that holds a draft's first node. In a chain every ancestor lies where the block
    table says, so a chain's rows stand already.
    """
    parents, depth = draft.parents.numpy()[trees], draft.depth.numpy()[trees]  # (T, N)
    used, node, tree = _used(draft)[trees], np.arange(draft.width), np.arange(len(trees))
    rows = np.minimum(first[trees, None] + node, each.shape[1] - 1)
    paths = np.full((*parents.shape, int(depth.max())), -1, np.int32)
    for at in node:  # parents come before their children
        paths[:, at] = paths[tree, parents[:, at]]  # of the root's children nothing: the last node is not there yet
        paths[tree, at, depth[:, at] - 1] = each[1, rows[:, at]]
    length = each[0, rows] - node
    path = np.full((each.shape[1], paths.shape[2]), -1, np.int32)
    rows, length, depth = rows[used], length[used], depth[used]
    path[rows] = paths[used]
    each[0, rows], each[3, rows], each[4, rows] = length - 1 + depth, length, depth
    return path
