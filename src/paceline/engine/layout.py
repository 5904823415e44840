"""From sequences and drafts to the flat rows of one target pass, on the host; the model takes them to its device.

Each scheduled sequence gives its uncomputed tokens and then its draft's nodes; only valid nodes become rows. Node j
of a sequence with L tokens is written to the slot of position L + j, whatever its depth, and stands at position L - 1
+ depth: in a chain that is the same. A device waits while a step is laid out: what depends on the drafts' shape alone
is kept from step to step (`_Form`), and the rest is a few operations, for hundreds of sequences too.
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
from paceline.models.plan import ROW_FIELDS, HostPlan, PassPlan
from paceline.sequence import Sequence

Ints = np.ndarray[Any, np.dtype[np.int64]]
Int32s = np.ndarray[Any, np.dtype[np.int32]]
Bools = np.ndarray[Any, np.dtype[np.bool_]]
FEW = 24  # rows
POSITION, PREFIX, SLOT, OWNER, REACH, TOKEN = range(len(ROW_FIELDS) + 1)  # rows of a plan's arrays


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
    trees: dict[int, list[int]]  # by row of the batch, where its draft branches: nodes at depth 1, 2, ..., then zeros

    @property
    def is_tree(self) -> bool:
        """Some accepted path may have to be moved into place."""
        return bool(self.trees)

    def nodes_by_depth(self, index: int) -> list[int]:
        counts = self.trees.get(index)
        return [1] * self.num_nodes[index] if counts is None else [count for count in counts if count]

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
    rows, tables = batch.rows, batch.tables
    form = _form(batch, draft)
    known = _own_tokens(rows, form) if tokens is None else None
    if len(form.owner) <= FEW and not form.reads:
        each, max_len = _few(rows, form, known, draft, block_size)
    else:
        each, max_len = _many(batch, form, known, draft, block_size)
    path = form.no_path
    if form.ancestors is not None:
        path = np.append(each[SLOT], np.int32(-1)).take(form.ancestors)
    said = torch.from_numpy(each[TOKEN]) if tokens is None else tokens
    host = HostPlan(each, path, tables, None if known is None else said)
    return Layout(
        tokens=said,
        plan=PassPlan.on_host(host, block_size, max_len),
        logit_rows=form.logit_rows,
        logit_row_of=form.logit_row_of,
        rows=rows,
        num_nodes=form.num_nodes,
        sampled=form.sampled,
        trees=form.trees,
    )


def _few(rows: list[Row], form: _Form, tokens: list[int] | None, draft: Draft, block_size: int) -> tuple[Int32s, int]:
    """(6, M) as the plan's, and the longest context. Of few rows: arrays take longer to begin than to finish."""
    firsts, tables = [row.first for row in rows], [row.sequence.blocks for row in rows]
    positions, prefixes, slots, reaches = [], [], [], []
    for owner, position, prefix, stored, reach in form.rows:
        first = firsts[owner]
        block, offset = divmod(first + stored, block_size)
        positions.append(first + position)
        prefixes.append(first + prefix)
        reaches.append(first + reach)
        slots.append(tables[owner][block] * block_size + offset)
    said = slots  # any, where they are not known
    if tokens is not None:
        tokens += _codes(draft) if draft.unseen else chain.from_iterable(draft.tokens.tolist())
        said = [tokens[at] for at in form.places]
    return np.array([positions, prefixes, slots, form.owners, reaches, said], np.int32), max(reaches)


def _many(batch: Batch, form: _Form, tokens: list[int] | None, draft: Draft, block_size: int) -> tuple[Int32s, int]:
    each = form.each.copy()
    moved, stored, owner, tables = each[: SLOT + 1], each[SLOT], form.owner, batch.tables
    first = batch.first.astype(np.int32).take(owner)
    moved += first
    each[REACH] += first
    block = stored // block_size
    slots = tables.reshape(-1).take(owner * tables.shape[1] + block)
    slots -= block
    slots *= block_size
    if tokens is not None:
        drafted = np.array(_codes(draft)) if draft.unseen else draft.tokens.numpy().reshape(-1)
        each[TOKEN] = np.concatenate((np.array(tokens, np.int64), drafted)).take(form.order)
        if form.reads:  # what others computed is computed once more, but not written
            again = stored < np.array([row.sequence.num_cached for row in batch.rows]).take(owner)
            slots[again] = -1 - stored[again]
    stored += slots
    return each, int(np.maximum.reduce(each[REACH], initial=0))


class _Form:
    """What of a layout depends on how many tokens each sequence computes and on the shape of its draft, and on nothing
    else: steps have the same again and again. Positions are counted from each sequence's first in the pass."""

    def __init__(self, each: Int32s, owner: Ints, order: Ints, logits: tuple[Tensor, Tensor]) -> None:
        self.each = each  # (6, M) as the plan's, with the position whose slot a row is written to for the slot
        self.owner = owner  # (M,)
        self.order = order  # (M,) where a row's token is: all that are the sequences' own, then the draft's (B, N)
        self.logit_rows, self.logit_row_of = logits
        self.no_path = np.empty((len(owner), 0), np.int32)
        self.ancestors: Ints | None = None  # (M, P) rows of the path, as in the plan; -1: none
        self.num_nodes: list[int] = []  # by row of the batch
        self.sampled: list[int] = []
        self.trees: dict[int, list[int]] = {}
        self.reads = False  # some sequence computes more than its last token

    @functools.cached_property
    def rows(self) -> list[tuple[int, ...]]:
        """Of each: owner, position, prefix, the position it is stored at, reach."""
        return list(zip(*self.each[[OWNER, POSITION, PREFIX, SLOT, REACH]].tolist(), strict=True))

    @functools.cached_property
    def places(self) -> list[int]:
        """As `order`."""
        return self.order.tolist()  # type: ignore[no-any-return]

    @functools.cached_property
    def owners(self) -> list[int]:
        return self.each[OWNER].tolist()  # type: ignore[no-any-return]


def _form(batch: Batch, draft: Draft) -> _Form:
    rows = batch.rows
    if not batch.only_decodes or draft.batch != len(rows):
        return _form_of([row.count for row in rows], [at for at, row in enumerate(rows) if row.samples], draft)
    if draft.is_even:
        return _even(len(rows), draft.width)
    if len(rows) <= FEW:
        return _known(len(rows), *(part.numpy().tobytes() for part in (draft.num_nodes, draft.parents, draft.depth)))
    return _decoding(draft)


@functools.lru_cache(64)
def _even(batch: int, width: int) -> _Form:
    return _form_of([1] * batch, list(range(batch)), Draft.even(torch.zeros(batch, width, dtype=torch.int64), 0))


@functools.lru_cache(256)
def _known(batch: int, *parts: bytes) -> _Form:
    num_nodes, parents, depth = (torch.from_numpy(np.frombuffer(part, np.int64).copy()) for part in parts)
    parents, depth = parents.view(batch, -1), depth.view(batch, -1)
    return _decoding(Draft(tokens=parents, parents=parents, depth=depth, num_nodes=num_nodes, source=num_nodes))


def _decoding(draft: Draft) -> _Form:
    """Where every sequence decodes: rows picked from those of drafts that have all the nodes there is width for."""
    batch, width = draft.batch, draft.width
    even, num_nodes = _even(batch, width), draft.num_nodes.numpy()
    used = np.arange(-1, width) < num_nodes[:, None]  # (B, N + 1)
    (picked,) = used.reshape(-1).nonzero()
    logit_rows, row_of = even.logit_rows.numpy()[: len(picked)], np.empty(used.shape, np.int64)
    row_of.fill(-1)
    row_of.reshape(-1)[picked] = logit_rows
    logits = torch.from_numpy(logit_rows), torch.from_numpy(row_of)
    form = _Form(even.each.take(picked, 1), even.owner.take(picked), even.order.take(picked), logits)
    form.num_nodes, form.sampled = num_nodes.tolist(), even.sampled
    _place_trees(form, draft, used[:, 1:], batch)
    return form


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
    each = np.zeros((TOKEN + 1, len(owner)), np.int32)
    each[POSITION], each[PREFIX], each[SLOT], each[OWNER] = stored, stored + 1, stored, owner
    each[REACH] = stored + 1
    order = np.empty_like(owner)
    own = len(owner) - np.count_nonzero(is_node)
    order[~is_node], order[is_node] = np.arange(own), own + np.flatnonzero(used)
    form = _Form(each, owner, order, (torch.from_numpy(np.flatnonzero(wanted)), torch.from_numpy(_logit_row_of(used))))
    form.num_nodes, form.sampled = num_nodes.tolist(), sampled
    form.reads = not len(counts) == own == len(sampled)
    _place_trees(form, draft, used, own)
    return form


def _place_trees(form: _Form, draft: Draft, used: Bools, own: int) -> None:
    """Nodes of trees see what is committed through the block table, and their drafted ancestors by slot.

    In a chain every ancestor lies where the block table says, so the rows of chains stand already. `own`: rows that are
    no nodes.
    """
    branches = np.logical_or.reduce(used & (draft.parents.numpy() < np.arange(-1, draft.width - 1)), 1)  # (B,)
    if not np.logical_or.reduce(branches):
        return
    (rows,) = (form.order >= own).nonzero()
    at = form.order.take(rows) - own  # of the draft's (B, N)
    of, depth = at // draft.width, draft.depth.numpy().reshape(-1).take(at)
    node = at - of * draft.width
    back = node - draft.parents.numpy().reshape(-1).take(at)  # rows to its parent: a draft's lie side by side
    kept = branches.take(of)
    if not np.logical_and.reduce(kept):
        rows, of, depth, node, back = (part[kept] for part in (rows, of, depth, node, back))
    each, deepest = form.each, int(np.maximum.reduce(depth))
    length = each[SLOT].take(rows) - node
    each[POSITION, rows], each[PREFIX, rows], each[REACH, rows] = length - 1 + depth, length, length + depth
    above = np.empty_like(form.order)
    above[rows] = rows - back
    form.ancestors = ancestors = np.empty((len(above), deepest), np.int64)
    ancestors.fill(-1)
    seen, place = rows, depth - 1
    while len(rows):
        ancestors[rows, place] = seen
        more = place > 0
        rows, seen, place = rows[more], above[seen[more]], place[more] - 1
    at_depth = np.bincount(of * deepest + depth - 1, minlength=draft.batch * deepest).reshape(-1, deepest).tolist()
    form.trees = {form.sampled[tree]: at_depth[tree] for tree in branches.nonzero()[0].tolist()}


def _own_tokens(rows: list[Row], form: _Form) -> list[int]:
    if form.reads:
        return list(chain.from_iterable([row.sequence.tokens[row.first : row.first + row.count] for row in rows]))
    return [row.sequence.tokens[row.first] for row in rows]


def _codes(draft: Draft) -> range:
    """For the tokens of a draft that the host has not seen."""
    return range(-1, -1 - draft.tokens.numel(), -1)


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
