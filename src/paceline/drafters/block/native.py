"""A block drafter's draft on a CPU in one native call (native/block_draft.h): K/V of new hidden states are written, the
block is run, and trees are grown. Views that do not change between drafts are prepared once."""

from __future__ import annotations

import ctypes
import math
from array import array
from collections.abc import Sequence as SequenceOf
from ctypes import c_int64, c_void_p
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from paceline.drafters.base import DraftRequest
from paceline.models.backends.cpu.kernels import NativeKernels
from paceline.models.backends.cpu.stack import ContextKVView, NativeStack, address_of, check_in_place, check_status
from paceline.models.backends.cpu.weights import PackedRows, PackedWeight, ProductView, rows_view

Ints = np.ndarray[Any, np.dtype[np.int64]]
Floats = np.ndarray[Any, np.dtype[np.float32]]
SIZES = 64  # sizes of drafts whose views are cached


class DrafterView(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("layers", "context_kv", "columns", "masks", "norm")),
        *((name, ProductView) for name in ("embedding", "head")),
        *((name, c_int64) for name in ("num_layers", "first_row", "max_positions", "block_size")),
    )


class ForestView(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("ids", "anchor_rows", "w1", "w2")),
        *((name, c_int64) for name in ("vocab", "rank", "beam", "count", "nodes")),
        *((name, c_void_p) for name in ("tokens", "parents", "depths", "scores")),
    )


class DraftingView(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("states", "tokens")),
        *((name, c_int64) for name in ("capacity", "ring_width")),
        *((name, c_void_p) for name in ("rows", "tables", "least", "logits")),
        *((name, c_int64) for name in ("batch", "table_width", "size", "depth", "looked_at")),
        ("forest", ForestView),
    )


class BlockRow(NamedTuple):
    """A sequence to draft for, in the order in which native code reads its fields."""

    req_index: int
    length: int
    write_from: int  # positions whose K/V are written
    write_to: int
    first_block: int  # index of the first block of keys
    end: int  # positions that its blocks have slots for
    token: int = 0  # the last one, which native code reads off the ring


class PreparedDraft(NamedTuple):
    """Input and output of native code for drafts of one size."""

    view: DraftingView
    tree: Ints  # (3, B, nodes)
    scores: Floats  # (B, nodes)


class NativeBlocks:
    def __init__(
        self,
        kernels: NativeKernels,
        context_kv: ContextKVView,
        *,
        masks: Tensor,
        norm: Tensor,
        head: PackedWeight,
        embedding: Tensor | PackedRows,
        ids: Tensor,
        markov: tuple[Tensor, Tensor, Tensor] | None,
        beam: int,
        count: int,
        first_row: int,
        max_positions: int,
        block_size: int,
    ) -> None:
        """`masks` (block - 1, H); `markov`: rows of W1 for the target's vocabulary, W1 and W2 for the draft vocabulary;
        `first_row` of a block that drafts a token; `block_size` of the cache; `beam` and `count` as in `tree`."""
        if isinstance(embedding, Tensor):
            numbers = (torch.float32, torch.bfloat16, torch.float16)
            embedding = (embedding if embedding.dtype in numbers else embedding.float()).contiguous()
        self._kernels, self._rows = kernels, 1 + masks.shape[0]
        self._owners = context_kv, masks, norm, head, embedding, ids, markov  # the views below point into these
        self._first_row = first_row
        self._bound: tuple[NativeStack, Tensor, Tensor] | None = None
        for tensor in (masks, norm, *(markov or ())):
            check_in_place(tensor)
        self._view = DrafterView(
            context_kv=ctypes.addressof(context_kv),
            masks=masks.data_ptr(),
            norm=norm.data_ptr(),
            embedding=rows_view(embedding),
            head=head.view,
            first_row=first_row,
            max_positions=max_positions,
            block_size=block_size,
        )
        self._vocab = head.shape[0]
        rows = [None] * 3 if markov is None else [part.data_ptr() for part in markov]
        rank = 0 if markov is None else markov[2].shape[1]
        forest = ForestView(ids.data_ptr(), *rows, self._vocab, rank, beam, min(count, self._vocab))
        self._drafting = DraftingView(forest=forest, size=self._rows)  # the last draft; its forest is that of all
        self._prepared: dict[tuple[int, int], PreparedDraft] = {}  # key: sequences, nodes
        self._logits = torch.empty(0, self._vocab)

    def bind(self, stack: NativeStack, columns: Tensor, ring: tuple[Tensor, Tensor, int]) -> None:
        """Point the views at a stack and a ring (hidden states, tokens, positions of a request), of whose taps
        `columns` are the drafter's."""
        states, tokens, capacity = ring
        bound = self._bound
        if bound is None or bound[0] is not stack or bound[1] is not columns or bound[2] is not states:
            check_in_place(states)
            self._bound, view, drafting = (stack, columns, states), self._view, self._drafting
            (view.layers, view.num_layers), view.columns = stack.address, columns.data_ptr()
            drafting.states, drafting.tokens = states.data_ptr(), tokens.data_ptr()
            drafting.capacity, drafting.ring_width = capacity, states.stride(0)
            self._prepared.clear()

    def draft(
        self,
        rows: SequenceOf[BlockRow],
        tables: SequenceOf[SequenceOf[int]],
        requests: SequenceOf[DraftRequest],
        nodes: int,
    ) -> tuple[Ints, Floats]:
        """Return tokens, parents and depths (3, B, nodes), and log probabilities (B, nodes) of the nodes' paths.

        `tables`: blocks of the sequences.
        """
        view, tree, scores = self._prepared.get((len(rows), nodes)) or self._prepare(len(rows), nodes)
        numbers, blocks, width = array("q"), array("i"), max(map(len, tables))
        for row, table in zip(rows, tables, strict=True):
            numbers.extend(row)
            blocks.extend(table)
            blocks.extend((0,) * (width - len(table)))
        least = array(
            "f", [math.log(row.min_node_probability) if row.min_node_probability else -math.inf for row in requests]
        )
        view.rows, view.tables, view.least = (part.buffer_info()[0] for part in (numbers, blocks, least))
        view.table_width = width
        kernels, self._drafting = self._kernels, view
        check_status(kernels.draft_blocks(ctypes.addressof(self._view), ctypes.addressof(view), kernels.threads))
        return tree.copy(), scores.copy()

    def _prepare(self, batch: int, nodes: int) -> PreparedDraft:
        tree, scores = np.empty((3, batch, nodes), np.int64), np.empty((batch, nodes), np.float32)
        depth = min(self._rows - self._first_row, nodes)
        if len(self._logits) < batch * depth:
            self._logits = torch.empty(batch * depth, self._vocab)
            self._prepared.clear()
        elif len(self._prepared) == SIZES:
            self._prepared.clear()
        view = DraftingView.from_buffer_copy(self._drafting)
        view.batch, view.depth, view.logits = batch, depth, self._logits.data_ptr()
        forest, each, first = view.forest, batch * nodes * 8, address_of(tree)
        forest.nodes, forest.scores = nodes, address_of(scores)
        forest.tokens, forest.parents, forest.depths = first, first + each, first + 2 * each
        prepared = self._prepared[batch, nodes] = PreparedDraft(view, tree, scores)
        return prepared

    @property
    def logits(self) -> Tensor:
        """Return the last draft's logits (rows, V), ordered by group of levels and then by sequence."""
        return self._logits[: self._drafting.looked_at]
