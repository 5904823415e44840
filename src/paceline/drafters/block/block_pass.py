"""The pass of a block drafter: `size` rows a sequence from its last token on, which see the sequence and each other.

Positions, slots and reach follow from the sequences' lengths, which only the device may know. On a GPU the whole of a
draft, from embeddings to trees, is captured for some numbers of sequences; a draft is one copy and one launch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from paceline.core.draft import packed_to
from paceline.models.decoder import Decoder
from paceline.models.graphs import Placed
from paceline.models.kv_cache import LayerCache
from paceline.models.plan import ROW_FIELDS, HostPlan, PassPlan, padded_tables
from paceline.platform.cuda_graph import CudaGraph, GraphRecorder, warn_uncaptured
from paceline.platform.triton import compile_together

SEQUENCES = (1, 2, 4, 8, 16, 32, 64)  # sequences of a captured draft; more are drafted in parts
ENDS, STARTS = ROW_FIELDS.index("positions"), ROW_FIELDS.index("prefix")  # their fields in a placed pass


class BlockRows(NamedTuple):
    """Sequences to draft for. A sequence's keys begin at `starts`, and its blocks in `tables` with them."""

    anchors: Tensor  # (B,) the last tokens, on the device
    lengths: Tensor  # (B,) on the device
    starts: list[int]
    ends: list[int]  # positions that its blocks have slots for
    tables: SequenceOf[SequenceOf[int]]  # block ids


class BlockPasses:
    def __init__(
        self,
        decoder: Decoder,
        caches: SequenceOf[LayerCache],
        block_size: int,
        size: int,
        embed: Callable[[Tensor], Tensor],
        finish: Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor | None]],
        most: int,
        recorder: GraphRecorder | None,
    ) -> None:
        """`embed`: anchors (B,) to the rows (B * size, H) of a block. `finish`: logits (B * size, V), anchors and a
        number of nodes to a tensor of drafts (parts, B, nodes) and, where the host may read them, their nodes' log
        probabilities. `most`: nodes of a draft that `recorder` captures."""
        self._decoder, self._caches, self._block_size, self._size = decoder, caches, block_size, size
        self._embed, self._finish, self._most = embed, finish, most
        self._captured: dict[int, tuple[Placed, CudaGraph]] = {}
        self._known = torch.empty(0, dtype=torch.int64)  # (2, most sequences) anchors and lengths, which graphs read
        self._blank = torch.empty(0)  # (most rows, H), what a pass is placed with before its embeddings are known
        device = decoder.device
        if recorder is not None:
            self._known = torch.ones(2, SEQUENCES[-1], dtype=torch.int64, device=device)
            shape = SEQUENCES[-1] * size, decoder.config.hidden_size
            self._blank = torch.zeros(shape, dtype=decoder.dtypes.compute, device=device)
            self._capture_all(recorder)

    def run(self, rows: BlockRows, nodes: int) -> tuple[Tensor, Tensor | None]:
        """Return the drafts of `finish` (parts, B, nodes) and their log probabilities (B, nodes), or None. A captured
        pass always returns `most` nodes, and no probabilities."""
        if not self._captured:
            output = self._decoder.run(self._embed(rows.anchors), self._planned(rows), self._caches, None)
            return self._finish(output.logits, rows.anchors, nodes)
        most = SEQUENCES[-1]
        parts = [self._replayed(rows, at, min(at + most, len(rows.starts))) for at in range(0, len(rows.starts), most)]
        return (parts[0] if len(parts) == 1 else torch.cat(parts, 1)), None

    def _planned(self, rows: BlockRows) -> PassPlan:
        device, columns = self._decoder.device, torch.tensor([rows.starts, rows.ends])
        tables, (starts, ends) = packed_to(device, padded_tables(rows.tables).long(), columns)
        at = rows.lengths, starts, ends, tables, tables.shape[1], self._size, self._block_size
        position, slots, reach = (part.int() for part in placed(*at))
        owner = torch.arange(len(rows.starts), device=device, dtype=torch.int32).repeat_interleave(self._size)
        return PassPlan(
            positions=position,
            slots=slots,
            sequence=owner,
            prefix=reach,
            reach=reach,
            path=owner.new_empty(len(owner), 0),
            block_tables=tables.int(),
            block_size=self._block_size,
            max_len=max(rows.ends),
        )

    # -- captured

    def _capture_all(self, recorder: GraphRecorder) -> None:
        """Run and capture every number of sequences once, so that no draft waits for compiling or capturing."""
        graphs = self._decoder.graphs
        assert graphs is not None
        try:
            with graphs.starting():
                passes = ((self._place(count, [], [], []), count) for count in SEQUENCES)
                compile_together(self._decoder.device, (functools.partial(self._work, *one) for one in passes))
                for count in reversed(SEQUENCES):
                    block = self._place(count, [], [], [])
                    work = functools.partial(self._work, block, count)
                    work()  # loads its kernels
                    graph = recorder.capture(work)
                    block.kept = [graph.result, *graphs.scratch()]
                    self._captured[count] = block, graph
        except RuntimeError as problem:
            self._captured = {}
            warn_uncaptured("a block drafter", problem)

    def _place(self, count: int, starts: list[int], ends: list[int], tables: SequenceOf[SequenceOf[int]]) -> Placed:
        """Copy a pass of `count` sequences to the device: block tables, and where keys begin and slots end."""
        size, graphs = self._size, self._decoder.graphs
        assert graphs is not None
        each = np.zeros((len(ROW_FIELDS) + 1, count * size), np.int32)
        each[ROW_FIELDS.index("sequence")] = np.repeat(np.arange(count), size)
        each[ENDS, : len(ends) * size] = np.repeat(ends, size)
        each[ROW_FIELDS.index("reach")] = each[ENDS]  # until the device knows it: attention's work is dealt by it
        each[STARTS, : len(starts) * size] = np.repeat(starts, size)
        blocks = np.zeros((count, max(map(len, tables), default=1)), np.int32)
        for row, ids in enumerate(tables):
            blocks[row, : len(ids)] = ids
        host = HostPlan(each, np.zeros((count * size, 0), np.int32), blocks)
        plan = PassPlan.on_host(host, self._block_size, max(ends, default=2))
        return graphs.place(self._blank[: count * size], plan, self._caches, torch.arange(count * size))

    def _work(self, block: Placed, count: int) -> Tensor:
        """Launch the rest of a draft that `_place` began."""
        graphs, plan, rows = self._decoder.graphs, block.plan, count * self._size
        assert graphs is not None
        anchors, lengths = self._known[0, :count], self._known[1, :count]
        ends, starts = (part[:rows].view(count, -1)[:, 0].long() for part in (plan.positions, plan.prefix))
        at = lengths, starts, ends, plan.block_tables, block.header[0], self._size, self._block_size
        position, slots, reach = placed(*at)
        for into, part in ((plan.positions, position), (plan.slots, slots), (plan.prefix, reach), (plan.reach, reach)):
            into[:rows] = part
        block.inputs[:rows] = self._embed(anchors)
        logits = graphs.compute(block).logits[:rows]
        return self._finish(logits, anchors, self._most)[0]

    def _replayed(self, rows: BlockRows, first: int, last: int) -> Tensor:
        count = next(count for count in SEQUENCES if count >= last - first)
        part = slice(first, last)
        self._known[:, : last - first] = torch.stack((rows.anchors[part], rows.lengths[part]))
        block = self._place(count, rows.starts[part], rows.ends[part], rows.tables[part])
        recorded, graph = self._captured[count]
        assert block is recorded, "a captured pass is never replaced: its tables are as large as the cache"
        graph.replay()
        graphs = self._decoder.graphs
        assert graphs is not None
        graphs.launched()
        result: Tensor = graph.result
        return result[:, : last - first].clone()  # the next draft overwrites it


def placed(
    lengths: Tensor, starts: Tensor, ends: Tensor, tables: Tensor, width: int | Tensor, size: int, block_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return positions, slots and reach (B * size,) of blocks behind sequences of these lengths, without a host sync.

    A row for which there is no slot, behind `ends`, is not stored, and its tokens are arbitrary.
    """
    first, ends = (lengths - 1)[:, None], ends[:, None]
    position = first + torch.arange(size, device=lengths.device)
    inside = position < ends
    position = torch.minimum(position, ends - 1).clamp_min(0)
    at = (position - starts[:, None]).clamp_min(0)
    row = torch.arange(len(lengths), device=lengths.device)[:, None]
    block = tables.reshape(-1).take(row * width + at // block_size)
    slots = torch.where(inside, block * block_size + at % block_size, -1)
    reach = (torch.minimum(first + size, ends) - starts[:, None]).clamp_min(1)
    return position.flatten(), slots.flatten(), reach.expand_as(slots).flatten()
