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

from paceline.draft import Draft, packed_to
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
    tokens: Tensor  # (M,); -1 - i: token i of the draft, which the host has not seen
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


def lay_out(batch: Batch, draft: Draft, block_size: int, tokens: Tensor | None = None) -> Layout:
    """`tokens` (M,) where the host does not know them."""
    rows = batch.rows
    rereads = tokens is None and any(row.first < row.sequence.num_cached for row in rows)
    ordinary = batch.only_decodes and draft.batch == len(rows) and not rereads
    if ordinary and draft.is_even:
        return _decodes(batch, draft, None, block_size, tokens)
    used = np.arange(draft.width) < draft.num_nodes.numpy()[:, None]  # (B, N) nodes, not padding
    trees = _trees(draft, used)
    if ordinary and not trees:
        return _decodes(batch, draft, used, block_size, tokens)
    sampled = [index for index, row in enumerate(rows) if row.samples]
    num_nodes = _num_nodes(draft, sampled, len(rows))
    first, count = np.array([row.first for row in rows]), np.array([row.count for row in rows])
    # (M,) whose each row is, which node (-1 the last token), and the position whose slot it is written to
    owner, node = _spread(count, num_nodes)
    stored = (first + count)[owner] + node
    each = _each(batch, owner, stored, block_size)
    if rereads:  # computed once more, but not written
        each[1, stored < np.array([row.sequence.num_cached for row in rows])[owner]] = -1
    path = np.empty((len(owner), 0), np.int32)
    if trees:
        path = _place_trees(draft, trees, used, each, np.flatnonzero(node >= 0))
    if tokens is None:
        tokens = torch.from_numpy(_tokens(rows, draft, used, node))
    wanted = node >= -1 if len(sampled) == len(rows) else (node >= -1) & np.isin(owner, sampled)
    return Layout(
        tokens=tokens,
        plan=_plan(batch, each, path, block_size),
        logit_rows=torch.from_numpy(np.flatnonzero(wanted)),
        logit_row_of=torch.from_numpy(_logit_row_of(used)),
        rows=rows,
        num_nodes=num_nodes.tolist(),
        sampled=sampled,
        trees={sampled[tree]: draft.depth[tree].bincount()[1:].tolist() for tree in trees},
    )


@dataclass(slots=True)
class _Chains:
    """Where rows lie when every sequence decodes and its draft is a chain."""

    owner: Ints  # (M,)
    index: Ints  # (M,) of each row
    begin: Ints  # (B,) each sequence's first row, of the pass and of the logits alike
    nodes: Ints  # rows that are nodes, in the order of the draft's
    row_of: Ints  # (B, N + 1) as `Layout.logit_row_of`
    path: Int32s  # (M, 0)


def _chains(num_nodes: Ints, used: Bools) -> _Chains:
    batch, width = used.shape
    size = num_nodes + 1
    owner, begin = np.arange(batch).repeat(size), size.cumsum() - size
    row_of = np.arange(width + 1) + begin[:, None]
    nodes = row_of[:, 1:][used]
    row_of[:, 1:][~used] = -1
    return _Chains(owner, np.arange(len(owner)), begin, nodes, row_of, np.empty((len(owner), 0), np.int32))


@functools.lru_cache(64)
def _even_chains(batch: int, width: int) -> _Chains:
    """Steps ask for the same again and again."""
    return _chains(np.full(batch, width), np.ones((batch, width), np.bool_))


def _decodes(batch: Batch, draft: Draft, used: Bools | None, block_size: int, tokens: Tensor | None) -> Layout:
    """The most common batch, in fewer operations: every sequence decodes, its draft a chain or empty.

    `used` None: all nodes are.
    """
    rows = batch.rows
    of = _even_chains(len(rows), draft.width) if used is None else _chains(draft.num_nodes.numpy(), used)
    stored = of.index + (batch.first - of.begin)[of.owner]
    if tokens is None:
        said = np.empty(len(stored), np.int64)
        said[of.begin] = [row.sequence.tokens[row.first] for row in rows]
        if draft.width:
            said[of.nodes] = _drafted(draft, used)
        tokens = torch.from_numpy(said)
    return Layout(
        tokens=tokens,
        plan=_plan(batch, _each(batch, of.owner, stored, block_size), of.path, block_size),
        logit_rows=torch.from_numpy(of.index),
        logit_row_of=torch.from_numpy(of.row_of),
        rows=rows,
        num_nodes=draft.num_nodes.tolist(),
        sampled=list(range(len(rows))),
        trees={},
    )


def _each(batch: Batch, owner: Ints, stored: Ints, block_size: int) -> Int32s:
    """(5, M) what is one number a row, as for tokens and chains: position, slot, sequence, prefix and path's length."""
    block = stored // block_size
    each = np.zeros((5, len(owner)), np.int32)
    each[0], each[2], each[3] = stored, owner, stored + 1
    each[1] = batch.tables[owner, block] * block_size + (stored - block * block_size)
    return each


def _plan(batch: Batch, each: Int32s, path: Int32s, block_size: int) -> PassPlan:
    packed = torch.from_numpy(each)
    positions, slots, sequence, prefix, path_len = packed.unbind()
    return PassPlan(
        positions=positions,
        slots=slots,
        sequence=sequence,
        prefix=prefix,
        path=torch.from_numpy(path),
        path_len=path_len,
        block_tables=torch.from_numpy(batch.tables),
        block_size=block_size,
        max_len=int(each[0].max(initial=-1)) + 1,
        packed=packed,
    )


def _num_nodes(draft: Draft, sampled: list[int], num_rows: int) -> Ints:
    """By row of the batch."""
    num_nodes = np.zeros(num_rows, np.int64)
    if draft.width:
        num_nodes[sampled] = draft.num_nodes.numpy()
    return num_nodes


def _spread(count: Ints, num_nodes: Ints) -> tuple[Ints, Ints]:
    """Whose each row of the pass is, and which node: -1 the last token, before it the others."""
    size = count + num_nodes
    owner = np.arange(len(size)).repeat(size)
    return owner, np.arange(len(owner)) - (size.cumsum() - num_nodes)[owner]


def _tokens(rows: list[Row], draft: Draft, used: Bools, node: Ints) -> Ints:
    """(M,) the sequences' own and the drafts': nodes are in the order of their rows."""
    own = chain.from_iterable([row.sequence.tokens[row.first : row.first + row.count] for row in rows])
    if not draft.width:
        return np.fromiter(own, np.int64, len(node))
    tokens, is_node = np.empty_like(node), node >= 0
    tokens[~is_node] = list(own)
    tokens[is_node] = _drafted(draft, used)
    return tokens


def _drafted(draft: Draft, used: Bools | None) -> Ints:
    """The nodes' tokens in order, or where they are to be found."""
    if used is None:
        found: Ints = np.arange(-1, -1 - draft.tokens.numel(), -1) if draft.unseen else draft.tokens.numpy().reshape(-1)
    else:
        found = -1 - np.flatnonzero(used) if draft.unseen else draft.tokens.numpy()[used]
    return found


def filled_in(tokens: Tensor, draft: Draft) -> Tensor:
    """The tokens of a layout on the device of a draft the host has not seen."""
    (codes,) = packed_to(draft.tokens.device, tokens)
    return torch.where(codes < 0, draft.tokens.flatten()[(-1 - codes).clamp_min(0)], codes)


def _logit_row_of(used: Bools) -> Ints:
    """(B, N + 1): rows of logits lie in order of sequence and slot."""
    batch, width = used.shape
    if not width:
        return np.arange(batch)[:, None]
    slots = np.ones((batch, width + 1), np.bool_)
    slots[:, 1:] = used
    return np.where(slots, slots.cumsum().reshape(slots.shape) - 1, -1)


def _trees(draft: Draft, used: Bools) -> list[int]:
    """The rows of the draft in which some node hangs from another than the one before."""
    if not draft.width:
        return []
    astray = used & (draft.parents.numpy() != np.arange(-1, draft.width - 1))
    return np.flatnonzero(astray.any(1)).tolist() if astray.any() else []


def _place_trees(draft: Draft, trees: list[int], used: Bools, each: Int32s, of_nodes: Ints) -> Int32s:
    """Nodes of trees see what is committed through the block table, and their drafted ancestors by slot: (M, P).

    `of_nodes`: the rows of the pass that are nodes. In a chain every ancestor lies where the block table says, so the
    rows of chains stand already.
    """
    parents, depth = draft.parents.numpy()[trees], draft.depth.numpy()[trees]  # (T, N)
    at = np.zeros(used.shape, np.int64)
    at[used] = of_nodes
    rows, used, tree = at[trees], used[trees], np.arange(len(trees))
    paths = np.full((*parents.shape, int(depth.max())), -1, np.int32)
    for node in range(draft.width):  # parents come before their children
        # The root's children take the last node's, which is not yet there: nothing.
        paths[:, node] = paths[tree, parents[:, node]]
        paths[tree, node, depth[:, node] - 1] = each[1, rows[:, node]]
    length = (each[0, rows] - np.arange(draft.width))[used]
    rows, depth = rows[used], depth[used]
    each[0, rows], each[3, rows], each[4, rows] = length - 1 + depth, length, depth
    path = np.full((each.shape[1], paths.shape[2]), -1, np.int32)
    path[rows] = paths[used]
    return path
