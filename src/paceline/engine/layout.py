"""From sequences and drafts to the flat rows of one target pass, on the host; the model takes them to its device.

Each scheduled sequence gives its uncomputed tokens and then its draft's nodes; only valid nodes become rows. Node j
of a sequence with L tokens is written to the slot of position L + j, whatever its depth, and stands at position L - 1
+ depth: in a chain that is the same. A tree that only the device knows is laid out all but its positions, paths and
tokens, which are written into the pass on the device (`models.plan.DeviceTrees`).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from paceline.draft import UNKNOWN, Draft
from paceline.engine.batch import Batch, Bools, Ints
from paceline.models.plan import ROW_FIELDS, DeviceTrees, HostPlan, PassPlan, slots_of
from paceline.sequence import Sequence

Int32s = np.ndarray[Any, np.dtype[np.int32]]
POSITION, PREFIX, SLOT, OWNER, REACH, TOKEN = range(len(ROW_FIELDS) + 1)  # rows of a plan's arrays


class PromptRows(NamedTuple):
    """Rows of the pass that predict the prompt tokens [first, first + size) of a sequence that asks how likely they
    are; `row` is the first of them, which computes token `first` - 1."""

    sequence: Sequence
    first: int
    size: int
    row: int


@dataclass
class Layout:
    tokens: Tensor  # (M,); -1 - u: token u of those the host has not seen
    unseen: bool  # such codes are left to fill in, beside those of trees that only the device knows
    plan: PassPlan
    logit_rows: Tensor  # rows whose logits are verified: each sampling sequence's last token and all its nodes
    logit_row_of: Tensor  # (B, N + 1) index into logit_rows by slot: 0 the last token, i + 1 node i; -1 = padding
    prompts: list[PromptRows]  # rows whose logits are only looked at
    num_nodes: Ints  # by row of the batch
    depths: Ints  # by row of the batch: of its deepest node; a bound, where only the device knows
    begin: Ints  # by row of the batch: where its rows of the pass begin
    node_rows: Ints  # by row that samples: where those of its nodes begin
    tree_slots: (
        Tensor | None
    )  # (T, 1 + N) of drafts that branch: their row of the verdict, and the slots of their nodes

    @property
    def is_tree(self) -> bool:
        """Some accepted path may have to be moved into place."""
        return self.tree_slots is not None


def lay_out(batch: Batch, draft: Draft, block_size: int) -> Layout:
    """Tokens the host has not seen are codes below 0: by row of the verdict the batch follows, or by node of the draft
    (B, N). A batch that follows an unread verdict has no drafts, so the two never meet."""
    in_draft = draft.num_nodes.numpy()
    of = _shape(batch.count.tobytes(), batch.samples.tobytes(), in_draft.tobytes(), draft.width)
    count, sampling, owner, used = batch.count, batch.sampling, of.owner, of.used
    depths = np.zeros(len(batch), np.int64)
    if draft.width:
        depths[sampling] = np.where(used, draft.depth.numpy(), 0).max(1)
    stored = batch.first[owner] + of.offset  # the position whose slot a row is written to
    each = np.empty((TOKEN + 1, len(owner)), np.int32)
    each[POSITION], each[OWNER] = stored, owner
    each[PREFIX] = each[REACH] = stored + 1
    each[SLOT] = slots_of(batch.tables, owner, stored, block_size)
    if not batch.only_decodes:  # shared tokens that are computed once more are not written
        each[SLOT][stored < np.array([sequence.num_cached for sequence in batch.sequences])[owner]] = -1
    each[TOKEN][of.own] = _own_tokens(batch)
    path, trees, device_trees = np.empty((len(owner), 0), np.int32), None, None
    unseen = draft.unseen and draft.width > 0
    if draft.width:
        drafted = -1 - np.arange(used.size) if draft.unseen else draft.tokens.numpy().reshape(-1)
        each[TOKEN][of.nodes] = drafted[used.reshape(-1)]
        branching: Bools = (used & (draft.parents.numpy() != np.arange(-1, draft.width - 1))).any(1)
        if branching.any():
            at = np.full(used.shape, -1)  # (B, N) rows of the pass
            at[used] = of.nodes
            length = batch.first[sampling] + count[sampling]
            path = _place_trees(each, draft, used & branching[:, None], at, length)
            trees = torch.from_numpy(np.column_stack((np.flatnonzero(branching), each[SLOT][at[branching]])))
            if draft.device_parents is not None:
                device_trees = _device_trees(draft, at, length)
                unknown = device_trees.numbers[:, 0]
                depths[sampling[unknown]] = np.minimum(in_draft[unknown], draft.depth_bound)
                unseen = len(unknown) < int(np.count_nonzero(in_draft))
    host = HostPlan(each, path, batch.tables, tokens := torch.from_numpy(each[TOKEN]))
    longest = int(each[REACH].max(initial=0)) + (0 if device_trees is None else device_trees.max_depth)
    return Layout(
        tokens=tokens,
        unseen=unseen,
        plan=PassPlan.on_host(host, block_size, longest, device_trees),
        logit_rows=of.logit_rows,
        logit_row_of=of.logit_row_of,
        prompts=[] if batch.only_decodes else _prompt_rows(batch, of.begin),
        num_nodes=of.num_nodes,
        depths=depths,
        begin=of.begin,
        node_rows=of.node_rows,
        tree_slots=trees,
    )


class _Shape(NamedTuple):
    """What of a layout depends on numbers of tokens and nodes alone: steps have the same again and again."""

    owner: Ints  # (M,) row of the batch
    offset: Ints  # (M,) within its sequence's rows
    own: Ints  # rows of the pass that are no nodes, and those that are
    nodes: Ints
    used: Bools  # (B, N)
    num_nodes: Ints  # by row of the batch
    begin: Ints
    node_rows: Ints
    logit_rows: Tensor
    logit_row_of: Tensor


@functools.lru_cache(256)
def _shape(counts: bytes, samples: bytes, in_draft: bytes, width: int) -> _Shape:
    """Never written to: it serves many steps."""
    count, sampling = np.frombuffer(counts, np.int64), np.flatnonzero(np.frombuffer(samples, np.bool_))
    num_nodes = np.zeros(len(count), np.int64)
    used = np.arange(width) < np.frombuffer(in_draft, np.int64)[:, None]
    if width:
        num_nodes[sampling] = np.frombuffer(in_draft, np.int64)
    size = count + num_nodes
    begin = size.cumsum() - size
    owner = np.arange(len(count)).repeat(size)
    offset = np.arange(len(owner)) - begin[owner]
    node = offset - count[owner]  # -1 the last token, before it the others
    wanted = node >= -1
    if len(sampling) < len(count):
        wanted &= np.isin(owner, sampling)
    logit_rows, row_of = torch.from_numpy(np.flatnonzero(wanted)), torch.from_numpy(_logit_row_of(used))
    own, nodes = np.flatnonzero(node < 0), np.flatnonzero(node >= 0)
    node_rows = (begin + count)[sampling]
    return _Shape(owner, offset, own, nodes, used, num_nodes, begin, node_rows, logit_rows, row_of)


def filled_in(codes: Tensor, unseen: Tensor) -> Tensor:
    """Tokens of a layout, on the device: code -1 - u stands for the u-th of those the host has not seen (U,)."""
    return torch.where(codes < 0, unseen[(-1 - codes).clamp_min(0)], codes)


def _prompt_rows(batch: Batch, begin: Ints) -> list[PromptRows]:
    asking = [index for index in batch.chunks if batch.sequences[index].lacks_prompt_logprobs]
    parts = []
    for index in asking:
        sequence, first = batch.sequences[index], int(batch.first[index])
        count = min(first + int(batch.count[index]), sequence.num_prompt - 1) - first
        if count > 0:
            parts.append(PromptRows(sequence, first + 1, count, int(begin[index])))
    return parts


def _own_tokens(batch: Batch) -> Any:
    """Of all rows that are no nodes; a token of an unread verdict is a code."""
    behind = batch.behind
    if behind is not None and batch.only_decodes and behind.min() >= 0:
        return -1 - behind
    if behind is None and batch.only_decodes:
        return [sequence.tokens[-1] for sequence in batch.sequences]
    codes = [-1] * len(batch) if behind is None else behind.tolist()
    parts = zip(batch.sequences, batch.first.tolist(), batch.count.tolist(), codes, strict=True)
    return list(
        chain.from_iterable(
            sequence.tokens[first : first + count] if row < 0 else (-1 - row,) for sequence, first, count, row in parts
        )
    )


def _place_trees(each: Int32s, draft: Draft, used: Bools, at: Ints, length: Ints) -> Int32s:
    """Nodes of trees see what is committed through the block table, and their drafted ancestors by slot: (M, P).

    In a chain every ancestor lies where the block table says, so the rows of chains stand already. `used` (B, N): nodes
    of trees; `at` (B, N): rows of the pass.
    """
    parents = draft.parents.numpy()
    tree, node = np.nonzero(used)
    rows, depth = at[tree, node], draft.depth.numpy()[tree, node]
    each[POSITION, rows], each[PREFIX, rows] = length[tree] - 1 + depth, length[tree]
    each[REACH, rows] = length[tree] + depth
    path = np.full((each.shape[1], draft.max_depth), -1, np.int32)
    above = np.where(parents[tree, node] == UNKNOWN, -1, node)
    for back in range(int(depth.max(initial=0))):
        going = above >= 0
        rows, tree, above, depth = rows[going], tree[going], above[going], depth[going]
        path[rows, depth - 1 - back] = each[SLOT, at[tree, above]]
        above = parents[tree, above]
    return path


def _device_trees(draft: Draft, at: Ints, length: Ints) -> DeviceTrees:
    """Of the rows of the draft whose tree only the device knows."""
    assert draft.device_parents is not None
    rows = np.flatnonzero(draft.parents.numpy()[:, 0] == UNKNOWN)
    numbers = np.column_stack((rows, at[rows, 0], draft.num_nodes.numpy()[rows], length[rows])).astype(np.int32)
    return DeviceTrees(numbers, draft.tokens, draft.device_parents, draft.max_depth)


def _logit_row_of(used: Bools) -> Ints:
    """(B, N + 1): rows of logits lie in order of sequence and slot."""
    batch, width = used.shape
    slots = np.ones((batch, width + 1), np.bool_)
    slots[:, 1:] = used
    return np.where(slots, slots.cumsum().reshape(slots.shape) - 1, -1)
