"""The pass of a block drafter: `size` rows a sequence from its last token on, which see the sequence and each other.

Positions, slots and reach follow from the sequences' lengths, which only the device may know. On a GPU the whole of a
draft, from embeddings to trees, is captured for some numbers of sequences; a draft is one copy and one launch.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from paceline.core.draft import packed_to
from paceline.models.decoder import Decoder
from paceline.models.graphs import Placed
from paceline.models.kv_cache import LayerCache
from paceline.models.plan import ROW_FIELDS, HostPlan, PassPlan
from paceline.platform.cuda_graph import CudaGraph, GraphRecorder
from paceline.platform.triton import compile_together

log = logging.getLogger("paceline")
SEQUENCES = (1, 2, 4, 8, 16, 32, 64)  # sequences of a captured draft; more are drafted in parts
PLACED = ("positions", "slots", "prefix", "reach", "sequence")
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
        """Return what `finish` does: (parts, B, nodes) and (B, nodes); captured drafts have `most` nodes."""
        if not self._captured:
            return self._eagerly(rows, nodes)
        most = SEQUENCES[-1]
        parts = [self._replayed(rows, at, min(at + most, len(rows.starts))) for at in range(0, len(rows.starts), most)]
        return (parts[0] if len(parts) == 1 else torch.cat(parts, 1)), None

    def _eagerly(self, rows: BlockRows, nodes: int) -> tuple[Tensor, Tensor | None]:
        on_host = self._decoder.device.type == "cpu"
        plan = self._planned_on_host(rows) if on_host else self._planned_on_device(rows)
        output = self._decoder.run(self._embed(rows.anchors), plan, self._caches, None)
        return self._finish(output.logits, rows.anchors, nodes)

    def _planned_on_host(self, rows: BlockRows) -> PassPlan:
        """Plan in numpy, which takes a fraction of torch's time for a few numbers."""
        tables, count = _padded(rows.tables), len(rows.starts)
        columns = rows.lengths.numpy(), np.array(rows.starts), np.array(rows.ends)
        position, slots, reach = placed(*columns, tables, tables.shape[1], self._size, self._block_size)
        each = np.zeros((len(ROW_FIELDS) + 1, count * self._size), np.int32)
        owner = np.arange(count).repeat(self._size)
        for name, part in zip(PLACED, (position, slots, reach, reach, owner), strict=True):
            each[ROW_FIELDS.index(name)] = part
        host = HostPlan(each, np.empty((len(owner), 0), np.int32), tables.astype(np.int32))
        return PassPlan.on_host(host, self._block_size, max(rows.ends))

    def _planned_on_device(self, rows: BlockRows) -> PassPlan:
        device, columns = self._decoder.device, torch.tensor([rows.starts, rows.ends])
        tables, columns = packed_to(device, torch.from_numpy(_padded(rows.tables)), columns)
        position, slots, reach = placed(
            rows.lengths, columns[0], columns[1], tables, tables.shape[1], self._size, self._block_size
        )
        owner = torch.arange(len(rows.starts), device=device, dtype=torch.int32).repeat_interleave(self._size)
        return PassPlan(
            positions=position.int(),
            slots=slots.int(),
            sequence=owner,
            prefix=reach.int(),
            reach=reach.int(),
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
            reason = str(problem).partition("\n")[0]
            log.warning("a block drafter cannot be captured, and runs kernel by kernel: %s", reason)

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


def _padded(tables: SequenceOf[SequenceOf[int]]) -> np.ndarray[Any, np.dtype[np.int64]]:
    width = max(map(len, tables))
    return np.array([[*row, *[0] * (width - len(row))] for row in tables], np.int64)


def placed(
    lengths: Any, starts: Any, ends: Any, tables: Any, width: Any, size: int, block_size: int
) -> tuple[Any, Any, Any]:
    """Return positions, slots and reach (B * size,) of blocks behind sequences of these lengths, from tensors without a
    host sync, or from numpy arrays.

    A row for which there is no slot, behind `ends`, is not stored, and its tokens are arbitrary.
    """
    xp: Any = torch if isinstance(lengths, Tensor) else np
    arange = functools.partial(torch.arange, device=lengths.device) if xp is torch else np.arange
    first = (lengths - 1)[:, None]
    position = first + arange(size)
    inside = position < ends[:, None]
    position = xp.clip(xp.minimum(position, ends[:, None] - 1), 0, None)
    at = xp.clip(position - starts[:, None], 0, None)
    block = tables.reshape(-1).take(arange(len(lengths))[:, None] * width + at // block_size)
    slots = xp.where(inside, block * block_size + at % block_size, -1)
    reach = xp.clip(xp.minimum(first + size, ends[:, None]) - starts[:, None], 1, None)
    return position.reshape(-1), slots.reshape(-1), xp.broadcast_to(reach, slots.shape).reshape(-1)
