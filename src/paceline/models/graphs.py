"""Passes recorded once by shape and replayed: a step is one copy to the device and one launch.

A pass is padded to a bucket of (rows, tiles, path, logits). Everything that changes from pass to pass lies in one
packed int32 buffer of the bucket: filled in pinned memory, copied in one go, read by the kernels through fixed views.
Padding rows write to no cache slot and belong to no tile, so they change no other row's bits. The first pass that
takes some set of kernels runs eagerly, which compiles them; buckets are captured when they first occur after that.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from paceline.models.buckets import FEW, TILES, Bucket, path_up, up
from paceline.models.kv_cache import LayerCache
from paceline.models.plan import ModelOutput, PassPlan
from paceline.models.rehearse import Shape, rehearsal

if TYPE_CHECKING:
    from paceline.models.decoder import Decoder

log = logging.getLogger("paceline")
MAX_GRAPHS = 384  # the least recently used gives way
KNOWN_TILES = 256  # ways rows belong to sequences that are remembered
SEQUENCES = 512  # block tables a bucket has room for, if it has that many rows
ALIGNED = 4  # ints: every view starts at 16 bytes, as the kernels like it
ROW_FIELDS = ("tokens", "positions", "slots", "sequence", "prefix", "path_len")


class Placed:
    """A bucket's buffers, and its graph once there is one."""

    def __init__(self, bucket: Bucket, decoder: Decoder, caches: Sequence[LayerCache], block_size: int) -> None:
        from paceline.models.triton.attention import HEADER, Division, Work

        self.bucket, self.graph, self.output = bucket, None, None  # type: tuple[Any, Any, Any]
        self.kept: list[Tensor] = []  # scratch the graph points into
        longest = min(decoder.config.max_positions, caches[0].k.shape[0])
        self.table_ints = min(bucket.rows, SEQUENCES) * -(-longest // block_size)
        sizes = {"tiles": HEADER + 2 * bucket.tiles, **dict.fromkeys(ROW_FIELDS, bucket.rows)}
        sizes |= {"logit_rows": bucket.logits, "path": bucket.rows * bucket.path, "tables": self.table_ints}
        self.at: dict[str, slice] = {}
        end = 0
        for name, size in sizes.items():
            self.at[name] = slice(end, end + size)
            end = -(-(end + size) // ALIGNED) * ALIGNED
        self.row_fields = slice(self.at["positions"].start, self.at["logit_rows"].start)  # each as wide as the others
        self.size = end
        self.device_ints = torch.zeros(end, dtype=torch.int32, device=decoder.device)
        self.blank = np.zeros(self.at["tables"].start, np.int32)
        self.blank[self.at["slots"]] = -1
        view = {name: self.device_ints[place] for name, place in self.at.items()}
        kv_heads = decoder.config.num_kv_heads
        self.division = Division.of(bucket.tiles, bucket.tile, bucket.path, kv_heads, longest)
        self.kernels = bucket.kernels(self.division.direct, self.division.tails)
        self.tokens, self.logit_rows = view["tokens"], view["logit_rows"] if bucket.logits else None
        self.header = view["tiles"]  # begins with the width of the block tables
        self.plan = PassPlan(
            positions=view["positions"],
            slots=view["slots"],
            sequence=view["sequence"],
            prefix=view["prefix"],
            path=view["path"].view(bucket.rows, bucket.path),
            path_len=view["path_len"],
            block_tables=view["tables"],  # the kernels read the tables' width from the header
            block_size=block_size,
            max_len=longest,
            work=Work(self.division, view["tiles"]),
        )

    def fill(
        self, tokens: Tensor, plan: PassPlan, logit_rows: Tensor, begin: Any, count: Any, staging: _Staging
    ) -> None:
        """One packed copy of everything the pass is; tokens that are already on the device stay there."""
        staged, host, event = staging.buffer(self.size)
        at, rows = self.at, plan.positions.shape[0]
        host[: len(self.blank)] = self.blank
        tables = plan.block_tables.numpy()
        header = self.division.header(plan.max_len, tables.shape[1])
        first = at["tiles"].start + len(header)
        host[first - len(header) : first] = header
        host[first : first + len(begin)] = begin
        first += self.bucket.tiles
        host[first : first + len(count)] = count
        if plan.packed is not None:
            host[self.row_fields].reshape(len(ROW_FIELDS) - 1, -1)[:, :rows] = plan.packed.numpy()
        else:
            for name in ROW_FIELDS[1:]:
                host[at[name].start :][:rows] = getattr(plan, name).numpy()
        if tokens.is_cpu:
            first = at["tokens"].start
            host[first : first + rows] = tokens.numpy()
        if self.bucket.logits:
            host[at["logit_rows"].start :][: len(logit_rows)] = logit_rows.numpy()
        if self.bucket.path:
            host[at["path"]].reshape(self.bucket.rows, -1)[:rows, : plan.path.shape[1]] = plan.path.numpy()
        first = at["tables"].start
        end = first + tables.size
        host[first:end] = tables.reshape(-1)
        self.device_ints[:end].copy_(staged[:end], non_blocking=True)
        event.record()
        if not tokens.is_cpu:
            self.tokens[:rows].copy_(tokens)


class PassGraphs:
    """`decoder.compute` by bucket. One pass at a time: its logits stand until the next."""

    def __init__(self, decoder: Decoder, *, capture: bool = True) -> None:
        self._decoder, self.capture = decoder, capture
        self._caches: Sequence[LayerCache] | None = None
        self._passes: OrderedDict[Bucket, Placed] = OrderedDict()
        self._logits: Tensor | None = None
        self._staging = _Staging(decoder.device)
        self._compiled: set[object] = set()  # sets of kernels that passes have used
        self._pool, self._stream = None, None  # type: tuple[Any, Any]
        self._known_tiles: dict[bytes, tuple[int, Any, Any]] = {}
        self.captured = 0

    def forward(
        self,
        tokens: Tensor,
        plan: PassPlan,
        caches: Sequence[LayerCache],
        logit_rows: Tensor,
        taps: tuple[int, ...],
    ) -> ModelOutput:
        of = self.place(tokens, plan, caches, logit_rows, taps)
        warm = self.is_warm(of)
        output = self.run(of)
        taken = None if output.taps is None else output.taps[: len(tokens)]
        return ModelOutput(output.logits[: len(logit_rows)], taken, warm)

    def place(
        self,
        tokens: Tensor,
        plan: PassPlan,
        caches: Sequence[LayerCache],
        logit_rows: Tensor,
        taps: tuple[int, ...] = (),
    ) -> Placed:
        """A pass where its bucket's kernels will read it, to be run once or more; kernels may write into it."""
        of, begin, count = self._pass(plan, caches, logit_rows, taps)
        of.fill(tokens, plan, logit_rows, begin, count, self._staging)
        return of

    def prepare(
        self, caches: Sequence[LayerCache], block_size: int, taps: tuple[int, ...], shapes: Iterable[Shape]
    ) -> None:
        """Compile and record what passes of these shapes take, the largest first: smaller ones share its scratch."""
        started, before = time.perf_counter(), self._reserved()
        passes = {}
        for shape in sorted(set(shapes), key=lambda shape: -shape.rows):
            tokens, plan, logit_rows = rehearsal(shape, block_size)
            of, begin, count = self._pass(plan, caches, logit_rows, taps)
            if of.graph is None:
                passes[of] = tokens, plan, logit_rows, begin, count
        if self._captures:
            self._compile({of.kernels: of for of in passes if not self._is_compiled(of)}.values())
        for of, content in passes.items():
            if not self._is_compiled(of):
                of.fill(*content, self._staging)
                self.run(of)  # the kernels get loaded
            if self._captures:
                self._record(of)
        took, grown = time.perf_counter() - started, (self._reserved() - before) / 1e6
        log.info("prepared %d shapes of passes in %.1f s, %.0f MB", len(self._passes), took, grown)

    def _compile(self, passes: Iterable[Placed]) -> None:
        from paceline.models.triton.together import compiled_together

        with compiled_together():
            for of in passes:
                self._compute(of)

    def _tiles(self, sequence: Any) -> tuple[int, Any, Any]:
        """From one step to the next rows mostly belong to sequences as before, or as not long before."""
        key = sequence.tobytes()
        tiles = self._known_tiles.get(key)
        if tiles is None:
            from paceline.models.triton.attention import tiles_of

            config = self._decoder.config
            if len(self._known_tiles) == KNOWN_TILES:
                self._known_tiles.clear()
            tiles = self._known_tiles[key] = tiles_of(sequence, config.num_heads // config.num_kv_heads)
        return tiles

    def _pass(
        self, plan: PassPlan, caches: Sequence[LayerCache], logit_rows: Tensor, taps: tuple[int, ...]
    ) -> tuple[Placed, Any, Any]:
        """The pass of its bucket, and where tiles begin and how many rows they have."""
        if caches is not self._caches:
            self._caches = caches
            self._passes.clear()
            self._pool = None  # it ends with the last graph that was recorded in it
        tile, begin, count = self._tiles(plan.sequence.numpy())
        rows, wanted = plan.positions.shape[0], logit_rows.shape[0]
        # The bucket's numbers may be equal where those asked for are not.
        logits = 0 if wanted == rows else up(wanted)
        bucket = Bucket(up(rows), up(len(begin), TILES), tile, path_up(plan.path.shape[1]), logits, taps)
        of = self._passes.get(bucket)
        if of is None or plan.block_tables.numel() > of.table_ints:
            of = self._passes[bucket] = Placed(bucket, self._decoder, caches, plan.block_size)
            while len(self._passes) > MAX_GRAPHS:
                self._passes.popitem(last=False)
        self._passes.move_to_end(bucket)
        return of, begin, count

    @property
    def _captures(self) -> bool:
        return self.capture and self._decoder.device.type == "cuda"

    def _is_compiled(self, of: Placed) -> bool:
        return of.kernels in self._compiled

    @property
    def device(self) -> torch.device:
        return self._decoder.device

    def is_warm(self, of: Placed) -> bool:
        """It will not be recorded first."""
        return of.graph is not None or not self.capture

    def run(self, of: Placed) -> ModelOutput:
        """What the bucket gives, padding included."""
        if of.graph is None and self._is_compiled(of) and self._captures:
            self._record(of)
        if of.graph is not None:
            of.graph.replay()
            result: ModelOutput = of.output
            return result
        self._compiled.add(of.kernels)
        return self._compute(of)

    def _compute(self, of: Placed) -> ModelOutput:
        assert self._caches is not None
        bucket = of.bucket
        out = self._logits_buffer(bucket.logits or bucket.rows)
        return self._decoder.compute(of.tokens, of.plan, self._caches, of.logit_rows, bucket.taps, out)

    def _record(self, of: Placed) -> None:
        """Without `torch.cuda.graph`, which empties the allocator's caches first: that takes longer than recording."""
        started, before = time.perf_counter(), self._reserved()
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
            self._stream = self._stream or torch.cuda.Stream()  # type: ignore[no-untyped-call]
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                of.output = self._compute(of)
            finally:
                graph.capture_end()
        torch.cuda.current_stream().wait_stream(self._stream)
        of.graph = graph
        of.kept = [of.output.logits, *self._scratch()]
        self.captured += 1
        grown = (self._reserved() - before) / 1e6
        log.debug("captured %s in %.0f ms, %.0f MB", of.bucket, 1e3 * (time.perf_counter() - started), grown)

    def _reserved(self) -> int:
        return torch.cuda.memory_reserved() if self._decoder.device.type == "cuda" else 0

    def _scratch(self) -> list[Tensor]:
        workspace: Any = getattr(self._decoder.kernels, "workspace", None)
        return [] if workspace is None else workspace.tensors

    def _logits_buffer(self, rows: int) -> Tensor:
        if self._logits is None or len(self._logits) < rows:
            shape = (max(rows, FEW), self._decoder.config.vocab_size)
            self._logits = torch.empty(shape, dtype=torch.float32, device=self._decoder.device)
        return self._logits[:rows]


class _Staging:
    """Two buffers of the host, in turn: one is filled while the device reads the other."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._ring: list[tuple[Tensor, Any, Event]] = []

    def buffer(self, size: int) -> tuple[Tensor, Any, Event]:
        """One of at least so many ints that the device has read, the same as an array, and the event to record when it
        is copied from."""
        if len(self._ring) < 2:
            self._ring.append((*self._made(size), Event(self._device)))
        buffer, array, event = self._ring.pop()
        event.wait()
        if len(array) < size:
            buffer, array = self._made(size)
        self._ring.insert(0, (buffer, array, event))
        return buffer, array, event

    def _made(self, size: int) -> tuple[Tensor, Any]:
        buffer = torch.zeros(size, dtype=torch.int32, pin_memory=self._device.type == "cuda")
        return buffer, buffer.numpy()


class Event:
    """When the device has read a staging buffer; nothing to wait for on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def record(self) -> None:
        if self._event is not None:
            self._event.record()

    def wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()
