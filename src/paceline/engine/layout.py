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
Int32s = np.ndarray[Any, np.dtype[np.int32]]
Bools = np.ndarray[Any, np.dtype[np.bool_]]


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
    if batch.only_decodes and draft.batch == len(rows):
        form = _even(len(rows), draft.width) if draft.is_even else _decoding(len(rows), *_bytes(draft))
    else:
        form = _form_of([row.count for row in rows], [at for at, row in enumerate(rows) if row.samples], draft)
    each = form.each.copy()
    positions, _, stored, owner, _ = each
    each[:3] += np.array([row.first for row in rows], np.int32).take(owner)
    block, tables = stored // block_size, batch.tables
    written = tables.reshape(-1).take(owner * tables.shape[1] + block)
    written -= block
    written *= block_size
    if form.reads and tokens is None:  # what others computed is computed once more, but not written
        again = stored < np.array([row.sequence.num_cached for row in rows]).take(owner)
        written[again] = -1 - stored[again]
    stored += written
    path = np.append(stored, np.int32(-1)).take(form.ancestors) if form.trees else form.no_path
    if tokens is None:
        tokens = torch.from_numpy(_tokens(rows, draft, form))
    max_len = int(np.maximum.reduce(positions)) + 1 if len(positions) else 0
    return Layout(
        tokens=tokens,
        plan=PassPlan.on_host(each, path, tables, block_size, max_len),
        logit_rows=form.logit_rows,
        logit_row_of=form.logit_row_of,
        rows=rows,
        num_nodes=form.num_nodes,
        sampled=form.sampled,
        trees=form.trees,
    )


@dataclass(slots=True)
class _Form:
    """What of a layout depends on how many tokens each sequence computes and on the shape of its draft, and on nothing
    else: steps have the same again and again. Positions are counted from each sequence's first in the pass."""

    each: Int32s  # (5, M) as the plan's, with the position whose slot a row is written to for the slot
    no_path: Int32s  # (M, 0)
    ancestors: Ints  # (M, P) rows of the path, as in the plan; -1: none
    order: Ints  # (M,) where each row's token is found, the sequences' own and then the draft's (B * N) side by side
    logit_rows: Tensor
    logit_row_of: Tensor
    num_nodes: list[int]
    sampled: list[int]
    trees: dict[int, list[int]]
    reads: bool  # some sequence computes more than its last token


@functools.lru_cache(64)
def _even(batch: int, width: int) -> _Form:
    return _form_of([1] * batch, list(range(batch)), Draft.even(torch.zeros(batch, width, dtype=torch.int64), 0))


def _bytes(draft: Draft) -> tuple[bytes, ...]:
    return tuple(part.numpy().tobytes() for part in (draft.num_nodes, draft.parents, draft.depth))


@functools.lru_cache(256)
def _decoding(batch: int, *parts: bytes) -> _Form:
    num_nodes, parents, depth = (torch.from_numpy(np.frombuffer(part, np.int64).copy()) for part in parts)
    shaped = parents.view(batch, -1), depth.view(batch, -1)
    draft = Draft(tokens=shaped[0], parents=shaped[0], depth=shaped[1], num_nodes=num_nodes, source=num_nodes)
    return _form_of([1] * batch, list(range(batch)), draft)


def _form_of(counts: list[int], sampled: list[int], draft: Draft) -> _Form:
    """Of sequences that compute so many tokens each; those that sample have a draft."""
    width, count = draft.width, np.array(counts, np.int64)
    used = np.arange(width) < draft.num_nodes.numpy()[:, None]  # (B, N) nodes, not padding
    num_nodes = np.zeros(len(counts), np.int64)
    if width:
        num_nodes[sampled] = draft.num_nodes.numpy()
    size = count + num_nodes
    owner = np.arange(len(size)).repeat(size)
    stored = np.arange(len(owner)) - (size.cumsum() - size)[owner]
    node = stored - count[owner]  # -1 the last token, before it the others
    is_node = node >= 0
    wanted = node >= -1 if len(sampled) == len(counts) else (node >= -1) & np.isin(owner, sampled)
    each = np.zeros((5, len(owner)), np.int32)
    each[0], each[1], each[2], each[3] = stored, stored + 1, stored, owner
    order = np.empty_like(owner)
    own = len(owner) - np.count_nonzero(is_node)
    order[~is_node], order[is_node] = np.arange(own), own + np.flatnonzero(used)
    form = _Form(
        each=each,
        no_path=np.empty((len(owner), 0), np.int32),
        ancestors=np.empty((len(owner), 0), np.int64),
        order=order,
        logit_rows=torch.from_numpy(np.flatnonzero(wanted)),
        logit_row_of=torch.from_numpy(_logit_row_of(used)),
        num_nodes=num_nodes.tolist(),
        sampled=sampled,
        trees={},
        reads=max(counts, default=1) > 1 or len(sampled) < len(counts),
    )
    astray = used & (draft.parents.numpy() != np.arange(-1, width - 1))
    if astray.any():
        _place_trees(form, draft, np.flatnonzero(astray.any(1)), used, np.flatnonzero(is_node))
    return form


def _place_trees(form: _Form, draft: Draft, trees: Ints, used: Bools, of_nodes: Ints) -> None:
    """Nodes of trees see what is committed through the block table, and their drafted ancestors by slot.

    `of_nodes`: the rows of the pass that are nodes. In a chain every ancestor lies where the block table says, so the
    rows of chains stand already.
    """
    at = np.full((draft.batch, draft.width + 1), -1)  # rows of nodes; the last stands for the root
    at[:, :-1][used] = of_nodes
    at, used, depth = at[trees], used[trees], draft.depth.numpy()[trees]
    rows, deep = at[:, :-1][used], depth[used]
    length = (form.each[2, at[:, :-1]] - np.arange(draft.width))[used]
    form.each[0, rows], form.each[1, rows], form.each[4, rows] = length - 1 + deep, length, deep
    above = np.full(form.each.shape[1], -1)
    above[rows] = np.take_along_axis(at, draft.parents.numpy()[trees], 1)[used]
    form.ancestors = np.full((len(above), int(deep.max())), -1)
    seen, place = rows, deep - 1
    while len(rows):
        form.ancestors[rows, place] = seen
        more = place > 0
        rows, seen, place = rows[more], above[seen[more]], place[more] - 1
    by_depth = (depth[:, :, None] == np.arange(1, form.ancestors.shape[1] + 1)).sum(1).tolist()
    deepest = depth.max(1).tolist()
    form.trees = {
        form.sampled[tree]: nodes_at[:most]
        for tree, nodes_at, most in zip(trees.tolist(), by_depth, deepest, strict=True)
    }


def _tokens(rows: list[Row], draft: Draft, form: _Form) -> Ints:
    """(M,) the sequences' own and the drafts', or where those are to be found."""
    if form.reads:
        own = list(chain.from_iterable([row.sequence.tokens[row.first : row.first + row.count] for row in rows]))
    else:
        own = [row.sequence.tokens[row.first] for row in rows]
    tokens = np.array(own, np.int64)
    if draft.width:
        size = draft.batch * draft.width
        drafted = np.arange(-1, -1 - size, -1) if draft.unseen else draft.tokens.numpy().reshape(-1)
        tokens = np.concatenate((tokens, drafted)).take(form.order)
    return tokens


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
