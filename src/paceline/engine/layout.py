"""Layout of sequences and drafts as the flat rows of one target pass, on the host; the model takes them to its device.

Each scheduled sequence gives its uncomputed tokens and then its draft's nodes; only valid nodes become rows. Node j
of a sequence with L tokens is written to the slot of position L + j, whatever its depth, and has position L - 1 +
depth, which in a chain is L + j too. Positions, paths and tokens of a tree that only the device knows are written into
the pass on the device (`models.plan.DeviceTrees`).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from paceline.core.device_draft import DeviceDraft
from paceline.core.draft import UNKNOWN, Draft, DraftShape
from paceline.core.sequence import Sequence
from paceline.engine.batch import Batch, Bools, Ints
from paceline.models.kv_cache import slots_of
from paceline.models.plan import ROW_FIELDS, DeviceTrees, HostPlan, PassPlan

Int32s = np.ndarray[Any, np.dtype[np.int32]]
POSITION, PREFIX, SLOT, REACH, OWNER, TOKEN = range(len(ROW_FIELDS) + 1)  # rows of a plan's arrays
CACHED_ROWS = 4096  # rows; passes up to it have their shapes cached: a hundred larger ones with trees take gigabytes
FOLLOWS = np.array([[1], [1], [1], [1], [0], [0]])  # 1 for fields to which the sequence's first position is added


class PromptRows(NamedTuple):
    """Rows of the pass that predict the prompt tokens [first, first + size) of a sequence that asks for their logprobs;
    `row` is the first of them, which computes token `first` - 1."""

    sequence: Sequence
    first: int
    size: int
    row: int


class LayoutShape(NamedTuple):
    """The part of a layout that depends on row counts and draft shapes only; cached, and never written to."""

    owner: Ints  # (M,) row of the batch
    from_first: Ints  # (6, M) the numbers of a plan, from the first token of each row's sequence in the pass
    own: Ints  # rows of the pass that are no nodes
    nodes: Ints  # rows of the pass that are nodes
    used: Ints  # their indices in the (B, N) tokens of a draft
    num_nodes: Ints  # nodes, by row of the batch
    depths: Ints  # depth of the deepest node, by row of the batch
    begin: Ints  # first row of the pass, by row of the batch
    node_rows: Ints  # row of the first node in the pass, by row that samples
    logit_rows: Tensor  # rows whose logits are verified: each sampling sequence's last token and all its nodes
    logit_row_of: Tensor  # (B, N + 1) index into logit_rows by slot: 0 the last token, i + 1 node i; -1: padding
    logit_parents: Int32s  # (R,) index into logit_rows of the parent; -1: a last token
    no_path: Int32s  # (M, 0)
    path: Ints | None  # (M, D) rows of the pass: a node's ancestors and itself, -1 beyond; None: no draft branches
    beyond: Bools  # (M, D)
    trees: Ints  # (T, 1 + N) for drafts that branch: their row of the verdict, and the rows of their nodes in the pass


@dataclass
class PassLayout:
    tokens: Tensor  # (M,); -1 - u: token u of those that only the device knows
    tokens_on_device: bool  # some token is such a code, in rows other than trees that only the device knows
    plan: PassPlan
    prompts: list[PromptRows]
    depths: Ints  # depth of the deepest node, by row of the batch; a bound, where only the device knows
    shape: LayoutShape

    @property
    def is_tree(self) -> bool:
        """Return whether an accepted path may have to be moved into place."""
        return self.shape.path is not None

    @property
    def tree_slots(self) -> Tensor:
        """Return (T, 1 + N) for drafts that branch: their row of the verdict, and the slots of their nodes."""
        slots, trees = self.plan.host.each[SLOT], self.shape.trees
        return torch.from_numpy(np.column_stack((trees[:, 0], slots[trees[:, 1:]])))


def lay_out(batch: Batch, draft: Draft, block_size: int) -> PassLayout:
    """Return the pass of a batch and its draft. Tokens that only the device knows are codes below 0: by row of the
    verdict that the batch follows, or by node of the draft (B, N); a batch that follows an unread verdict has no draft.
    """
    make = cached_shape if batch.num_tokens <= CACHED_ROWS else layout_shape
    shape = make(batch.count.tobytes(), batch.samples.tobytes(), draft.shape, draft.max_depth)
    each = (shape.from_first + FOLLOWS * batch.first.take(shape.owner)).astype(np.int32)
    slots, tokens = each[SLOT], each[TOKEN]
    stored = slots_of(batch.tables, shape.owner, slots, block_size)
    if not batch.only_decodes:  # shared tokens that are computed once more are not written
        stored[slots < np.array([sequence.num_cached for sequence in batch.sequences])[shape.owner]] = -1
    slots[:] = stored
    tokens[shape.own] = _own_tokens(batch)
    path, depths, device_trees = shape.no_path, shape.depths, None
    tokens_on_device = draft.tokens_on_device and draft.width > 0
    if draft.width:
        tokens[shape.nodes] = -1 - shape.used if draft.tokens_on_device else draft.arrays.tokens.take(shape.used)
    if shape.path is not None:
        path = stored.take(shape.path)
        np.putmask(path, shape.beyond, -1)
        if isinstance(draft, DeviceDraft) and draft.device_parents is not None:
            in_draft = draft.arrays.num_nodes
            device_trees = _device_trees(draft, shape.node_rows, batch.sampled_lengths)
            unknown, depths = device_trees.numbers[:, 0], depths.copy()
            depths[batch.sampling[unknown]] = np.minimum(in_draft[unknown], draft.depth_bound)
            tokens_on_device = len(unknown) < int(np.count_nonzero(in_draft))
    host = HostPlan(each, path, batch.tables, known := torch.from_numpy(tokens))
    longest = int(np.maximum.reduce(each[REACH], initial=0)) + (0 if device_trees is None else device_trees.max_depth)
    return PassLayout(
        tokens=known,
        tokens_on_device=tokens_on_device,
        plan=PassPlan.on_host(host, block_size, longest, device_trees),
        prompts=[] if batch.only_decodes else _prompt_rows(batch, shape.begin),
        depths=depths,
        shape=shape,
    )


def layout_shape(counts: bytes, samples: bytes, drafts: DraftShape, max_depth: int) -> LayoutShape:
    count, sampling = np.frombuffer(counts, np.int64), np.flatnonzero(np.frombuffer(samples, np.bool_))
    parent, depth, drafted, width = drafts.parent, drafts.depth, drafts.count, drafts.parent.shape[1]
    num_nodes, deepest = np.zeros_like(count), np.zeros_like(count)
    used: Bools = np.arange(width) < drafted[:, None]
    if width:
        num_nodes[sampling], deepest[sampling] = drafted, np.where(used, depth, 0).max(1)
    size = count + num_nodes
    begin = size.cumsum() - size
    owner = np.arange(len(count)).repeat(size)
    offset = np.arange(len(owner)) - begin[owner]
    node = offset - count[owner]  # -1 the last token, before it the others
    wanted = node >= -1
    if len(sampling) < len(count):
        wanted &= np.isin(owner, sampling)
    own, nodes = np.flatnonzero(node < 0), np.flatnonzero(node >= 0)
    from_first = np.zeros((TOKEN + 1, len(owner)), np.int64)
    from_first[POSITION] = from_first[SLOT] = offset
    from_first[PREFIX] = from_first[REACH] = offset + 1
    from_first[OWNER] = owner
    slots = np.pad(used, ((0, 0), (1, 0)), constant_values=True)  # (B, N + 1) whose logits are verified, in order
    logit_row_of = np.where(slots, slots.cumsum().reshape(slots.shape) - 1, -1)
    path, trees = None, np.empty((0, 1 + width), np.int64)
    branching = np.zeros(len(drafted), np.bool_)
    if width:
        branching |= (used & (parent != np.arange(-1, width - 1))).any(1)
    if branching.any():
        at = np.full(used.shape, -1)  # (B, N) rows of the pass
        at[used] = nodes
        trees = np.column_stack((np.flatnonzero(branching), at[branching]))
        path = _place_trees(from_first, parent, depth, used & branching[:, None], at, count[sampling], max_depth)
    return LayoutShape(
        owner=owner,
        from_first=from_first,
        own=own,
        nodes=nodes,
        used=np.flatnonzero(used),
        num_nodes=num_nodes,
        depths=deepest,
        begin=begin,
        node_rows=(begin + count)[sampling],
        logit_rows=torch.from_numpy(np.flatnonzero(wanted)),
        logit_row_of=torch.from_numpy(logit_row_of),
        logit_parents=logit_parents(logit_row_of, np.where(used, parent, -1)),
        no_path=np.empty((len(owner), 0), np.int32),
        path=path,
        beyond=np.zeros(0, np.bool_) if path is None else path < 0,
        trees=trees,
    )


def logit_parents(row_of: Ints, parents: Ints) -> Int32s:
    """Return (R,) each verified row's parent among them, -1 for a last token, by `logit_row_of` (B, N + 1) and the
    draft's parents (B, N), which are -1 in the padding. A parent that is not known counts as the last token."""
    above = np.full(row_of.shape, -1)
    if parents.size:
        above[:, 1:] = np.take_along_axis(row_of, parents.clip(-1) + 1, 1)
    return above[row_of >= 0].astype(np.int32)


cached_shape = functools.lru_cache(128)(layout_shape)


def filled_in(codes: Tensor, tokens_on_device: Tensor) -> Tensor:
    """Return the tokens of a layout on the device: code -1 - u is replaced by token u of `tokens_on_device` (U,)."""
    return torch.where(codes < 0, tokens_on_device[(-1 - codes).clamp_min(0)], codes)


def _prompt_rows(batch: Batch, begin: Ints) -> list[PromptRows]:
    parts = []
    for index in batch.chunks:
        sequence, first = batch.sequences[index], int(batch.first[index])
        count = min(int(batch.ends[index]), sequence.num_prompt - 1) - first
        if sequence.lacks_prompt_logprobs and count > 0:
            parts.append(PromptRows(sequence, first + 1, count, int(begin[index])))
    return parts


def _own_tokens(batch: Batch) -> Any:
    """Return the tokens of all rows that are no nodes; one of an unread verdict is a code."""
    token_source = batch.token_source
    if token_source is not None and batch.only_decodes and token_source.min() >= 0:
        return -1 - token_source
    if token_source is None and batch.only_decodes:
        return [sequence.tokens[-1] for sequence in batch.sequences]
    codes = [-1] * len(batch) if token_source is None else token_source.tolist()
    parts = zip(batch.sequences, batch.first.tolist(), batch.count.tolist(), codes, strict=True)
    return list(
        chain.from_iterable(
            sequence.tokens[first : first + count] if row < 0 else (-1 - row,) for sequence, first, count, row in parts
        )
    )


def _place_trees(
    from_first: Ints, parents: Ints, depths: Ints, used: Bools, at: Ints, length: Ints, max_depth: int
) -> Ints:
    """Write the numbers of trees' nodes, and return their paths (M, max_depth): the rows that compute a node's drafted
    ancestors, which it reads by slot. Committed tokens are read through the block table.

    Nodes of a chain need no path: the block table lists their ancestors. `used` (B, N): nodes of trees; `at` (B, N):
    rows of the pass; `length` (B,) of the sequences, from the first token in the pass.
    """
    tree, node = np.nonzero(used)
    rows, depth = at[tree, node], depths[tree, node]
    from_first[POSITION, rows], from_first[PREFIX, rows] = length[tree] - 1 + depth, length[tree]
    from_first[REACH, rows] = length[tree] + depth
    path = np.full((from_first.shape[1], max_depth), -1)
    above = np.where(parents[tree, node] == UNKNOWN, -1, node)
    for back in range(int(depth.max(initial=0))):
        going = above >= 0
        rows, tree, above, depth = rows[going], tree[going], above[going], depth[going]
        path[rows, depth - 1 - back] = at[tree, above]
        above = parents[tree, above]
    return path


def _device_trees(draft: DeviceDraft, node_rows: Ints, length: Ints) -> DeviceTrees:
    """Return the rows of the draft whose tree only the device knows."""
    assert draft.device_parents is not None
    rows = np.flatnonzero(draft.arrays.parents[:, 0] == UNKNOWN)
    numbers = np.column_stack((rows, node_rows[rows], draft.arrays.num_nodes[rows], length[rows])).astype(np.int32)
    return DeviceTrees(numbers, draft.tokens, draft.device_parents, draft.max_depth)
