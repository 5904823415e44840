"""Passes captured once for each shape and replayed: a step is one copy to the device and one launch.

A pass is padded to a bucket of (rows, tiles, path, logits). Everything that changes from pass to pass lies in one
packed int32 buffer of the bucket: filled in pinned memory, copied as a whole, read by the kernels through fixed views.
Padding rows write to no cache slot and belong to no tile, so they change no other row's bits. The first pass with a new
set of kernels runs eagerly, which compiles them; from then on a bucket is captured when it first occurs.
"""

from __future__ import annotations

import logging
import math
import time
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from paceline.models.buckets import FEW, TILES, Bucket, path_up, up
from paceline.models.kv_cache import LayerCache
from paceline.models.plan import ROW_FIELDS, HostPlan, ModelOutput, PassPlan
from paceline.models.warmup import PassShape, warmup_pass
from paceline.platform.cuda_graph import CudaGraph, GraphRecorder
from paceline.platform.staging import Staging
from paceline.platform.triton import parallel_compile

if TYPE_CHECKING:
    from paceline.models.decoder import Decoder

log = logging.getLogger("paceline")
MAX_GRAPHS = 384  # graphs, about twice those of start-up (test_warmup.py); the least recently used is dropped
KNOWN = 256  # assignments of rows to sequences with cached tiles: the steps of a few answers
SEQUENCES = 512  # block tables for which a bucket has capacity at first, at most its rows
SEQUENCE, REACH = ROW_FIELDS.index("sequence"), ROW_FIELDS.index("reach")
ALIGNED = 4  # ints; every view starts at a multiple of 16 bytes, for vector loads


class Placed:
    """A bucket's buffers, and its graph once it is captured."""

    def __init__(
        self, bucket: Bucket, decoder: Decoder, caches: Sequence[LayerCache], block_size: int, table_ints: int
    ) -> None:
        """Allocate the buffers. `table_ints`: size of the first pass's block tables, which later ones rarely exceed."""
        from paceline.models.backends.cuda.attention.division import HEADER, Division, Work

        self.bucket = bucket
        self.graph: CudaGraph | None = None
        self.kept: list[object] = []  # tensors the graph points into
        longest = min(decoder.config.max_positions, caches[0].k.shape[0])
        self.table_ints = max(min(bucket.rows, SEQUENCES) * -(-longest // block_size), table_ints)
        config = decoder.config
        self.division = Division.of(
            bucket.rows * (config.layer.heads // config.layer.kv_heads),
            bucket.tiles,
            bucket.tile,
            bucket.path,
            config.layer.kv_heads,
            longest,
        )
        self.at, self.size = _places(bucket, HEADER, 4 * self.division.shares, self.table_ints)
        self._stages: dict[int, _StagingViews] = {}
        self.device_ints = torch.zeros(self.size, dtype=torch.int32, device=decoder.device)
        self._blank = np.zeros(self.at["tables"].start, np.int32)
        self._blank[self.at["slots"]] = -1
        self._blank[self.at["reach"]] = 1  # a padding row reads one key, so that its result is a number
        view = {name: self.device_ints[place] for name, place in self.at.items()}
        self.kernels = bucket.kernels(self.division.direct, self.division.tails)
        self.tokens, self.logit_rows = view["tokens"], view["logit_rows"] if bucket.logits else None
        self.tree_numbers = view["trees"]
        self.inputs = self.tokens
        if bucket.from_hidden:
            width, dtype = decoder.config.hidden_size, decoder.dtypes.compute
            self.inputs = torch.zeros(bucket.rows, width, dtype=dtype, device=decoder.device)
        self.header = self.device_ints[: self.at["shares"].stop]  # begins with the width of the block tables
        self.plan = PassPlan(
            positions=view["positions"],
            slots=view["slots"],
            sequence=view["sequence"],
            prefix=view["prefix"],
            path=view["path"].view(bucket.rows, bucket.path),
            reach=view["reach"],
            block_tables=view["tables"],  # the kernels read the tables' width from the header
            block_size=block_size,
            max_len=longest,
            work=Work(self.division, self.header),
        )

    def fill(self, tokens: Tensor, plan: PassPlan, logit_rows: Tensor, tiles: Any, staging: Staging) -> None:
        """Copy the whole pass to the device as one buffer; tokens and hidden states on the device stay there."""
        buffer, (each, path, tables, known) = staging.buffer(self.size), plan.host
        stage = self._stages.get(buffer.turn)
        if stage is None or stage.ints is not buffer.ints:
            stage = self._stages[buffer.turn] = _StagingViews(self, buffer.ints)
        rows, on_device = each.shape[1], self.bucket.from_hidden or not tokens.is_cpu
        stage.blank[:] = self._blank
        stage.header[:] = self.division.header(plan.max_len, tables.shape[1])
        begin, count = tiles
        stage.shares[:] = self.division.dealt(begin, count, each[REACH], plan.max_len)
        stage.rows[:, :rows] = each
        if tokens is not known and not on_device:
            stage.rows[-1, :rows] = tokens.numpy()
        if self.bucket.logits:
            stage.logit_rows[: len(logit_rows)] = logit_rows.numpy()
        if self.bucket.path:
            stage.path[:rows, : path.shape[1]] = path
        if plan.trees is not None:
            stage.trees[: plan.trees.numbers.size] = plan.trees.numbers.reshape(-1)
        stage.tables[: tables.size] = tables.reshape(-1)
        staging.send(buffer, self.device_ints, self.at["tables"].start + tables.size)
        if on_device:
            self.inputs[: len(tokens)].copy_(tokens)
        if plan.trees is not None:
            from paceline.models.backends.cuda.place import place_trees

            place_trees(self.plan, self.tokens, self.tree_numbers, plan.trees)


def _places(bucket: Bucket, header: int, shares: int, tables: int) -> tuple[dict[str, slice], int]:
    """Lay the parts of a bucket's input out in one buffer; return their places and the buffer's size, in ints."""
    sizes = {"header": header, "shares": shares} | dict.fromkeys((*ROW_FIELDS, "tokens"), bucket.rows)
    sizes |= {"logit_rows": bucket.logits, "path": bucket.rows * bucket.path}
    # Four numbers for each tree that only the device knows; such a tree has two rows at least.
    sizes |= {"trees": 2 * bucket.rows if bucket.path else 0, "tables": tables}
    places, end = {}, 0
    for name, size in sizes.items():
        places[name] = slice(end, end + size)
        end = -(-(end + size) // ALIGNED) * ALIGNED
    return places, end


class _StagingViews:
    """Views of a pinned buffer, one for each part of a bucket's input."""

    def __init__(self, placed: Placed, ints: Any) -> None:
        self.ints = ints
        at, rows = placed.at, placed.bucket.rows
        self.blank = ints[: at["tables"].start]
        self.header, self.shares = ints[at["header"]], ints[at["shares"]]
        # All row fields have the same width: the rows, and the alignment of the next field.
        self.rows = ints[at["positions"].start : at["logit_rows"].start].reshape(len(ROW_FIELDS) + 1, -1)
        self.logit_rows, self.path = ints[at["logit_rows"]], ints[at["path"]].reshape(rows, -1)
        self.trees, self.tables = ints[at["trees"]], ints[at["tables"]]


class PassGraphs:
    """Graphs of `decoder.run` by bucket. Logits and taps of a pass are valid until the next one."""

    def __init__(self, decoder: Decoder, *, capture: bool = True) -> None:
        self._decoder, self.capture = decoder, capture
        self._caches: Sequence[LayerCache] | None = None
        self._passes: OrderedDict[Bucket, Placed] = OrderedDict()
        self._logits: Tensor | None = None  # all passes share both, so that a graph keeps none of its own
        self._taps: Tensor | None = None
        self._staging = Staging(decoder.device)
        self._compiled: set[object] = set()  # sets of kernels that passes have used
        self._recorder = GraphRecorder()
        self._known: dict[Hashable, tuple[Bucket, Any]] = {}
        self._starting = False
        self.captured = self.late_captures = 0  # graphs; of them those captured after start-up

    def forward(
        self,
        tokens: Tensor,
        plan: PassPlan,
        caches: Sequence[LayerCache],
        logit_rows: Tensor,
        taps: tuple[int, ...],
    ) -> ModelOutput:
        placed = self.place(tokens, plan, caches, logit_rows, taps)
        warm, output = self.is_warm(placed), self.run(placed)
        tapped = None if output.taps is None else output.taps[: len(tokens)]
        return ModelOutput(output.logits[: len(logit_rows)], tapped, warm)

    def place(
        self,
        tokens: Tensor,
        plan: PassPlan,
        caches: Sequence[LayerCache],
        logit_rows: Tensor,
        taps: tuple[int, ...] = (),
    ) -> Placed:
        """Copy a pass into its bucket's buffers, to be run once or more; kernels may write into it."""
        placed, tiles = self._pass(plan, caches, logit_rows, taps, tokens.dim() == 2)
        placed.fill(tokens, plan, logit_rows, tiles, self._staging)
        return placed

    @contextmanager
    def starting(self) -> Iterator[None]:
        """Do not count graphs that are captured in the block as late."""
        self._starting = True
        try:
            yield
        finally:
            self._starting = False

    def prepare(
        self,
        caches: Sequence[LayerCache],
        block_size: int,
        taps: tuple[int, ...],
        shapes: Iterable[PassShape],
        *,
        from_hidden: bool = False,
    ) -> None:
        """Compile and capture passes of these shapes, the largest first: smaller ones share its scratch."""
        started, before = time.perf_counter(), self._reserved()
        passes = {}
        for shape in sorted(set(shapes), key=lambda shape: -shape.rows):
            tokens, plan, logit_rows = warmup_pass(shape, block_size)
            if from_hidden:
                tokens = torch.zeros(len(tokens), self._decoder.config.hidden_size)
            placed, tiles = self._pass(plan, caches, logit_rows, taps, from_hidden)
            if placed.graph is None:
                passes[placed] = tokens, plan, logit_rows, tiles
        if self._captures:
            self._compile(
                {placed.kernels: placed for placed in passes if placed.kernels not in self._compiled}.values()
            )
            if (with_paths := next((placed for placed in passes if placed.bucket.path), None)) is not None:
                from paceline.models.backends.cuda.place import compile_place

                compile_place(with_paths.plan, with_paths.tokens, with_paths.tree_numbers)
        with self.starting():
            for placed, content in passes.items():
                if placed.kernels not in self._compiled:
                    placed.fill(*content, self._staging)
                    self.run(placed)  # loads the kernels
                if self._captures:
                    self._capture(placed)
        took, grown = time.perf_counter() - started, (self._reserved() - before) / 1e6
        log.info("prepared %d shapes of passes in %.1f s, %.0f MB", len(self._passes), took, grown)

    def _compile(self, passes: Iterable[Placed]) -> None:
        with parallel_compile():
            for placed in passes:
                self.compute(placed)

    def _bucket(self, plan: HostPlan, wanted: int, taps: tuple[int, ...], from_hidden: bool) -> tuple[Bucket, Any]:
        """Return the bucket, and first row and number of rows of each tile; cached by the assignment of rows to
        sequences, which rarely changes between steps."""
        sequence = plan.each[SEQUENCE]
        key = sequence.tobytes(), plan.path.shape[1], wanted, taps, from_hidden
        known = self._known.get(key)
        if known is None:
            from paceline.models.backends.cuda.attention.division import tiles_of

            config = self._decoder.config
            tile, begin, count = tiles_of(sequence, config.layer.heads // config.layer.kv_heads)
            rows = plan.each.shape[1]
            # Unpadded numbers: padded ones may be equal although not every row has logits. Where no row needs them, as
            # in a prompt that goes on, one row has them: a head over all rows is slow, and its buffer large.
            logits = 0 if wanted == rows else up(max(wanted, 1))
            if len(self._known) == KNOWN:
                self._known.clear()
            path = path_up(plan.path.shape[1])
            bucket = Bucket(up(rows), up(len(begin), TILES), tile, path, logits, taps, from_hidden)
            known = self._known[key] = bucket, (begin, count)
        return known

    def _pass(
        self,
        plan: PassPlan,
        caches: Sequence[LayerCache],
        logit_rows: Tensor,
        taps: tuple[int, ...],
        from_hidden: bool,
    ) -> tuple[Placed, Any]:
        """Return the pass of the plan's bucket, and its tiles."""
        if caches is not self._caches:
            self._caches = caches
            self._passes.clear()
        host = plan.host
        bucket, tiles = self._bucket(host, logit_rows.shape[0], taps, from_hidden)
        placed = self._passes.get(bucket)
        if placed is None or host.block_tables.size > placed.table_ints:
            placed = Placed(bucket, self._decoder, caches, plan.block_size, host.block_tables.size)
            self._passes[bucket] = placed
            while len(self._passes) > MAX_GRAPHS:
                self._passes.popitem(last=False)
        self._passes.move_to_end(bucket)
        return placed, tiles

    @property
    def _captures(self) -> bool:
        return self.capture and self._decoder.device.type == "cuda"

    @property
    def logits(self) -> Tensor:
        """Return the buffer that all passes write their logits to; only a larger pass than any before replaces it."""
        assert self._logits is not None, "no pass was prepared"
        return self._logits

    @property
    def device(self) -> torch.device:
        return self._decoder.device

    def is_warm(self, placed: Placed) -> bool:
        """Return whether the pass runs without being captured first."""
        return placed.graph is not None or not self.capture

    def run(self, placed: Placed) -> ModelOutput:
        """Run the bucket; return its output, padding included."""
        if placed.graph is None and placed.kernels in self._compiled and self._captures:
            self._capture(placed)
        if placed.graph is not None:
            placed.graph.replay()
            output: ModelOutput = placed.graph.result
        else:
            self._compiled.add(placed.kernels)
            output = self.compute(placed)
        self._staging.mark()
        return output

    def compute(self, placed: Placed) -> ModelOutput:
        """Launch a placed pass; a drafter captures these launches together with its own."""
        assert self._caches is not None
        bucket = placed.bucket
        out, out_taps = self._logits_buffer(bucket.logits or bucket.rows), self._taps_buffer(bucket)
        residual = self._decoder.embed(placed.inputs)
        return self._decoder.run(residual, placed.plan, self._caches, placed.logit_rows, bucket.taps, out, out_taps)

    def _capture(self, placed: Placed) -> None:
        started, before = time.perf_counter(), self._reserved()
        assert self._caches is not None
        self._decoder.stack(self._caches, placed.plan.max_len)  # copies tables to the device, which no capture may do
        placed.graph = self._recorder.capture(lambda: self.compute(placed))
        placed.kept = [placed.graph.result, *self.scratch()]
        self.captured += 1
        self.late_captures += not self._starting
        if self.late_captures == 1 and not self._starting:
            log.warning("a pass was captured after start-up: %s; later ones are counted, not logged", placed.bucket)
        grown = (self._reserved() - before) / 1e6
        log.debug("captured %s in %.0f ms, %.0f MB", placed.bucket, 1e3 * (time.perf_counter() - started), grown)

    def _reserved(self) -> int:
        return torch.cuda.memory_reserved() if self._decoder.device.type == "cuda" else 0

    def launched(self) -> None:
        """Record that the pass placed last was launched in a capture of another class."""
        self._staging.mark()

    def scratch(self) -> list[Tensor]:
        """Return the tensors that captured passes point into."""
        workspace: Any = getattr(self._decoder.kernels, "workspace", None)
        return [] if workspace is None else workspace.tensors

    def _logits_buffer(self, rows: int) -> Tensor:
        if self._logits is None or len(self._logits) < rows:
            shape = (max(rows, FEW), self._decoder.config.vocab_size)
            self._logits = torch.empty(shape, dtype=torch.float32, device=self._decoder.device)
        return self._logits[:rows]

    def _taps_buffer(self, bucket: Bucket) -> Tensor | None:
        """Return the buffer of taps, (rows, T, H)."""
        if not bucket.taps:
            return None
        shape = bucket.rows, len(bucket.taps), self._decoder.config.hidden_size
        size = math.prod(shape)
        if self._taps is None or self._taps.numel() < size:
            self._taps = torch.empty(size, dtype=self._decoder.dtypes.compute, device=self._decoder.device)
        return self._taps[:size].view(shape)
