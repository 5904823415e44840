"""From sequences and drafts to the flat rows of one target pass, on the host; the model takes them to its device.

Each scheduled sequence gives its uncomputed tokens and then its draft's nodes; only valid nodes become rows. Node j
of a sequence with L tokens is written to the slot of position L + j, whatever its depth, and stands at position L - 1
+ depth.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.draft import Draft
from paceline.engine.batch import Batch, Row
from paceline.models.plan import PassPlan
from paceline.sequence import Sequence


def slot(sequence: Sequence, position: int, block_size: int) -> int:
    block, offset = divmod(position, block_size)
    return sequence.blocks[block] * block_size + offset


@dataclass
class Span:
    """Where one sequence's rows lie in the pass: its tokens from `begin`, then its nodes from `nodes`."""

    row: Row
    begin: int
    nodes: int
    num_nodes: int
    is_chain: bool
    depths: list[int]  # of its nodes


@dataclass
class Layout:
    tokens: Tensor  # (M,)
    plan: PassPlan
    logit_rows: Tensor  # rows whose logits are needed: each sampling sequence's last token and all its nodes
    logit_row_of: Tensor  # (B, N + 1) index into logit_rows by slot: 0 the last token, i + 1 node i; -1 = padding
    spans: list[Span]
    sampled: list[int]  # which spans sample, in the order of the draft's rows
    is_tree: bool  # some accepted path may have to be moved into place


@dataclass
class _Rows:
    tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    sequence: list[int] = field(default_factory=list)
    prefix: list[int] = field(default_factory=list)
    paths: list[list[int]] = field(default_factory=list)


def lay_out(batch: Batch, draft: Draft, block_size: int) -> Layout:
    rows = _Rows()
    spans: list[Span] = []
    sampled: list[int] = []
    logit_rows: list[int] = []
    logit_row_of: list[list[int]] = []
    counts = draft.num_nodes.tolist() if draft.width else [0] * draft.batch
    trees = []
    if draft.width:
        trees = list(zip(draft.tokens.tolist(), draft.parents.tolist(), draft.depth.tolist(), strict=True))
    for index, row in enumerate(batch.rows):
        begin = len(rows.tokens)
        _add_tokens(rows, row, index, block_size)
        span = Span(row, begin, len(rows.tokens), 0, True, [])
        if row.samples:
            span.num_nodes = counts[len(sampled)]
            if span.num_nodes:
                tokens, parents, depths = trees[len(sampled)]
                span.depths = depths[: span.num_nodes]
                span.is_chain = all(parents[node] == node - 1 for node in range(span.num_nodes))
                _add_nodes(rows, span, index, tokens, parents, block_size)
            wanted = range(span.nodes - 1, span.nodes + span.num_nodes)
            logit_row_of.append(
                [*range(len(logit_rows), len(logit_rows) + len(wanted)), *[-1] * (draft.width - span.num_nodes)]
            )
            logit_rows.extend(wanted)
            sampled.append(index)
        spans.append(span)
    return Layout(
        tokens=_array(rows.tokens, np.int64),
        plan=_plan(rows, batch, block_size),
        logit_rows=_array(logit_rows, np.int64),
        logit_row_of=_array(logit_row_of, np.int64).view(len(sampled), draft.width + 1),
        spans=spans,
        sampled=sampled,
        is_tree=not all(span.is_chain for span in spans),
    )


def _add_tokens(rows: _Rows, row: Row, index: int, block_size: int) -> None:
    sequence = row.sequence
    positions = range(row.first, row.first + row.count)
    rows.tokens += sequence.tokens[row.first : row.first + row.count]
    rows.positions += positions
    rows.slots += [-1 if at < sequence.num_cached else slot(sequence, at, block_size) for at in positions]
    rows.sequence += [index] * row.count
    rows.prefix += [at + 1 for at in positions]
    rows.paths += [[]] * row.count


def _add_nodes(rows: _Rows, span: Span, index: int, tokens: list[int], parents: list[int], block_size: int) -> None:
    sequence = span.row.sequence
    length = len(sequence.tokens)
    paths: list[list[int]] = []
    for node in range(span.num_nodes):
        own = slot(sequence, length + node, block_size)
        paths.append([*(paths[parents[node]] if parents[node] >= 0 else []), own])
        position = length - 1 + span.depths[node]
        rows.tokens.append(tokens[node])
        rows.positions.append(position)
        rows.slots.append(own)
        rows.sequence.append(index)
        # In a chain every node's ancestors already lie where the block table says.
        rows.prefix.append(position + 1 if span.is_chain else length)
        rows.paths.append([] if span.is_chain else paths[-1])


def _plan(rows: _Rows, batch: Batch, block_size: int) -> PassPlan:
    width = max((len(row.sequence.blocks) for row in batch.rows), default=0)
    tables = [row.sequence.blocks + [-1] * (width - len(row.sequence.blocks)) for row in batch.rows]
    deepest = max(map(len, rows.paths), default=0)
    paths = [path + [-1] * (deepest - len(path)) for path in rows.paths] if deepest else []
    # One array for all that is one number a row: making a small tensor costs more than filling it.
    lengths = [len(path) for path in rows.paths]
    each = _array([rows.positions, rows.slots, rows.sequence, rows.prefix, lengths], np.int32).view(5, len(rows.tokens))
    return PassPlan(
        positions=each[0],
        slots=each[1],
        sequence=each[2],
        prefix=each[3],
        path=_array(paths, np.int32) if deepest else each.new_empty((len(rows.tokens), 0)),
        path_len=each[4],
        block_tables=_array(tables, np.int32),
        block_size=block_size,
        max_len=max(rows.positions, default=-1) + 1,
    )


def _array(values: list[int] | list[list[int]], dtype: type[np.integer[Any]]) -> Tensor:
    """Through numpy: after a pass has swept the caches, torch.tensor takes several times as long."""
    return torch.from_numpy(np.array(values, dtype=dtype))
