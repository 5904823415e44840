"""A block drafter's draft on a CPU in one native call (native/block_draft.h): new hidden states are absorbed, the block
is run, and trees are grown. What does not change between drafts is prepared once."""

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
SIZES = 64  # of drafts whose views are kept


class DrafterView(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("heads", "layers", "absorbed", "columns", "masks", "norm")),
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
    """A sequence to draft for, as native code reads it."""

    req_index: int
    length: int
    absorb_from: int  # positions whose hidden states are absorbed
    absorb_to: int
    first_block: int  # where its keys begin
    end: int  # positions that its blocks have slots for
    token: int = 0  # its last, which native code reads off the ring


class Prepared(NamedTuple):
    """Drafts of one size: what native code is given, and what it writes to."""

    given: DraftingView
    tree: Ints  # (3, B, nodes)
    scores: Floats  # (B, nodes)


class NativeBlocks:
    def __init__(
        self,
        kernels: NativeKernels,
        absorbed: ContextKVView,
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
        `first_row` of a block that drafts a token; `block_size` of the cache. As `block_tree`: `beam`, `count`."""
        if isinstance(embedding, Tensor):
            numbers = (torch.float32, torch.bfloat16, torch.float16)
            embedding = (embedding if embedding.dtype in numbers else embedding.float()).contiguous()
        self._kernels, self._rows = kernels, 1 + masks.shape[0]
        self._kept = absorbed, masks, norm, head, embedding, ids, markov  # the views below point into these
        self._first_row = first_row
        self._bound: tuple[NativeStack, Tensor, Tensor] | None = None
        for tensor in (masks, norm, *(markov or ())):
            check_in_place(tensor)
        self._view = DrafterView(
            absorbed=ctypes.addressof(absorbed),
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
        self._drafting = DraftingView(forest=forest, size=self._rows)  # of the last draft; the forest is that of all
        self._prepared: dict[tuple[int, int], Prepared] = {}  # by sequences and nodes
        self._logits = torch.empty(0, self._vocab)

    def bind(self, stack: NativeStack, columns: Tensor, ring: tuple[Tensor, Tensor, int]) -> None:
        """`columns` of the ring's taps are the drafter's; `ring`: its hidden states, tokens and positions of a
        sequence."""
        states, tokens, capacity = ring
        bound = self._bound
        if bound is None or bound[0] is not stack or bound[1] is not columns or bound[2] is not states:
            check_in_place(states)
            self._bound, view, given = (stack, columns, states), self._view, self._drafting
            (view.heads, view.layers, view.num_layers), view.columns = stack.addresses, columns.data_ptr()
            given.states, given.tokens = states.data_ptr(), tokens.data_ptr()
            given.capacity, given.ring_width = capacity, states.stride(0)
            self._prepared.clear()

    def draft(
        self,
        rows: SequenceOf[BlockRow],
        tables: SequenceOf[SequenceOf[int]],
        asked: SequenceOf[DraftRequest],
        nodes: int,
    ) -> tuple[Ints, Floats]:
        """(3, B, nodes) tokens, parents and depths, and (B, nodes) log probabilities of their paths. `tables`: blocks
        of the sequences."""
        given, tree, scores = self._prepared.get((len(rows), nodes)) or self._prepare(len(rows), nodes)
        numbers, blocks, width = array("q"), array("i"), max(map(len, tables))
        for row, table in zip(rows, tables, strict=True):
            numbers.extend(row)
            blocks.extend(table)
            blocks.extend((0,) * (width - len(table)))
        least = array(
            "f", [math.log(row.min_node_probability) if row.min_node_probability else -math.inf for row in asked]
        )
        given.rows, given.tables, given.least = (part.buffer_info()[0] for part in (numbers, blocks, least))
        given.table_width = width
        kernels, self._drafting = self._kernels, given
        check_status(kernels.draft_blocks(ctypes.addressof(self._view), ctypes.addressof(given), kernels.threads))
        return tree.copy(), scores.copy()

    def _prepare(self, batch: int, nodes: int) -> Prepared:
        tree, scores = np.empty((3, batch, nodes), np.int64), np.empty((batch, nodes), np.float32)
        depth = min(self._rows - self._first_row, nodes)
        if len(self._logits) < batch * depth:
            self._logits = torch.empty(batch * depth, self._vocab)
            self._prepared.clear()
        elif len(self._prepared) == SIZES:
            self._prepared.clear()
        given = DraftingView.from_buffer_copy(self._drafting)
        given.batch, given.depth, given.logits = batch, depth, self._logits.data_ptr()
        forest, each, first = given.forest, batch * nodes * 8, address_of(tree)
        forest.nodes, forest.scores = nodes, address_of(scores)
        forest.tokens, forest.parents, forest.depths = first, first + each, first + 2 * each
        found = self._prepared[batch, nodes] = Prepared(given, tree, scores)
        return found

    @property
    def logits(self) -> Tensor:
        """(rows, V) of the last draft, in groups of a few levels, each sequence by sequence."""
        return self._logits[: self._drafting.looked_at]
