"""Passes recorded once by shape and replayed: a step is one copy to the device and one launch.

A pass is padded to a bucket of (rows, tiles, path, logits). Everything that changes from pass to pass lies in one
packed int32 buffer of the bucket: filled in pinned memory, copied in one go, read by the kernels through fixed views.
Padding rows write to no cache slot and belong to no tile, so they change no other row's bits. The first pass of a
bucket runs eagerly, the second is captured.
"""

from __future__ import annotations

import bisect
import functools
import logging
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from paceline.models.kv_cache import LayerCache
from paceline.models.plan import ModelOutput, PassPlan
from paceline.models.rehearse import rehearsal, shapes

if TYPE_CHECKING:
    from paceline.models.decoder import Decoder

log = logging.getLogger("paceline")
MAX_GRAPHS = 96
STEPS = (1, 8, 16, 32, 64, 128, 192, 256, 384, 512)  # few: every bucket is captured once, and 8 rows cost what 1 does
TILES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
PATHS = (0, 8, 16, 32, 64)
SEQUENCES = 512  # block tables a bucket has room for, if it has that many rows
FEW = 64  # rows the logits' buffer has room for at least
ALIGNED = 4  # ints: every view starts at 16 bytes, as the kernels like it
ROW_FIELDS = ("tokens", "positions", "slots", "sequence", "prefix", "path_len")


@dataclass(frozen=True)
class Bucket:
    rows: int
    tiles: int
    tile: int
    path: int
    logits: int  # 0: of every row
    taps: tuple[int, ...]


class Placed:
    """A bucket's buffers, and its graph once there is one."""

    def __init__(self, bucket: Bucket, decoder: Decoder, caches: Sequence[LayerCache], block_size: int) -> None:
        from paceline.models.triton.attention import HEADER, Division, Work

        self.bucket, self.graph, self.output = bucket, None, None  # type: tuple[Any, Any, Any]
        self.runs = 0
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
        self.device_ints = torch.zeros(end, dtype=torch.int32, device=decoder.device)
        pinned = decoder.device.type == "cuda"
        self._ring = [(torch.zeros(end, dtype=torch.int32, pin_memory=pinned), Event(decoder.device)) for _ in "ab"]
        self.blank = np.zeros(self.at["tables"].start, np.int32)
        self.blank[self.at["slots"]] = -1
        view = {name: self.device_ints[place] for name, place in self.at.items()}
        kv_heads = decoder.config.num_kv_heads
        self.division = Division.of(bucket.tiles, bucket.tile, bucket.path, kv_heads, longest)
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

    def fill(self, tokens: Tensor, plan: PassPlan, logit_rows: Tensor, begin: Any, count: Any) -> None:
        """One packed copy of everything the pass is; tokens that are already on the device stay there."""
        from paceline.models.triton.attention import HEADER

        staged, event = self._ring[0]
        self._ring.reverse()
        event.wait()  # until the device has read what this buffer held before
        host, at, rows = staged.numpy(), self.at, len(plan.positions)
        host[: len(self.blank)] = self.blank
        tables = plan.block_tables.numpy()
        first = at["tiles"].start
        host[first : first + HEADER] = self.division.header(plan.max_len, tables.shape[1])
        host[first + HEADER : first + HEADER + len(begin)] = begin
        host[first + HEADER + self.bucket.tiles :][: len(count)] = count
        for name in ROW_FIELDS[1:]:
            host[at[name].start :][:rows] = getattr(plan, name).numpy()
        if tokens.device.type == "cpu":
            host[at["tokens"].start :][:rows] = tokens.numpy()
        if self.bucket.logits:
            host[at["logit_rows"].start :][: len(logit_rows)] = logit_rows.numpy()
        if self.bucket.path:
            host[at["path"]].reshape(self.bucket.rows, -1)[:rows, : plan.path.shape[1]] = plan.path.numpy()
        host[at["tables"].start :][: tables.size] = tables.reshape(-1)
        end = at["tables"].start + tables.size
        self.device_ints[:end].copy_(staged[:end], non_blocking=True)
        event.record()
        if tokens.device.type != "cpu":
            self.tokens[:rows].copy_(tokens)


class PassGraphs:
    """`decoder.compute` by bucket. One pass at a time: its logits stand until the next."""

    def __init__(self, decoder: Decoder, *, capture: bool = True) -> None:
        self._decoder, self.capture = decoder, capture
        self._caches: Sequence[LayerCache] | None = None
        self._passes: OrderedDict[Bucket, Placed] = OrderedDict()
        self._logits: Tensor | None = None
        self._pool: Any = None
        self._last_tiles: tuple[Any, tuple[int, Any, Any]] = (np.array([-1]), (0, None, None))
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
        if caches is not self._caches:
            self._caches = caches
            self._passes.clear()
        tile, begin, count = self._tiles(plan.sequence.numpy())
        rows, wanted = len(tokens), len(logit_rows)
        # The bucket's numbers may be equal where those asked for are not.
        logits = 0 if wanted == rows else up(wanted)
        bucket = Bucket(up(rows), up(len(begin), TILES), tile, path_up(plan.path.shape[1]), logits, taps)
        of = self._pass(bucket, caches, plan)
        of.fill(tokens, plan, logit_rows, begin, count)
        return of

    def _tiles(self, sequence: Any) -> tuple[int, Any, Any]:
        """From one step to the next rows mostly belong to sequences as before."""
        from paceline.models.triton.attention import tiles_of

        last, tiles = self._last_tiles
        if not np.array_equal(sequence, last):
            config = self._decoder.config
            tiles = tiles_of(sequence, config.num_heads // config.num_kv_heads)
            self._last_tiles = sequence.copy(), tiles
        return tiles

    def prepare(self, caches: Sequence[LayerCache], block_size: int, taps: tuple[int, ...], sequences: int) -> None:
        started = time.perf_counter()
        for shape in shapes(sequences, STEPS[-1]):
            tokens, plan, logit_rows = rehearsal(shape, block_size)
            for _ in range(2 if self.capture else 1):  # the second time it is recorded
                self.forward(tokens, plan, caches, logit_rows, taps)
        log.info("prepared %d shapes of passes in %.1f s", len(self._passes), time.perf_counter() - started)

    def _pass(self, bucket: Bucket, caches: Sequence[LayerCache], plan: PassPlan) -> Placed:
        of = self._passes.get(bucket)
        if of is None or plan.block_tables.numel() > of.table_ints:
            of = self._passes[bucket] = Placed(bucket, self._decoder, caches, plan.block_size)
            while len(self._passes) > MAX_GRAPHS:
                self._passes.popitem(last=False)
        self._passes.move_to_end(bucket)
        return of

    @property
    def device(self) -> torch.device:
        return self._decoder.device

    def is_warm(self, of: Placed) -> bool:
        """It will not be recorded first."""
        return of.graph is not None or not self.capture

    def run(self, of: Placed) -> ModelOutput:
        """What the bucket gives, padding included."""
        of.runs += 1
        if of.graph is None and of.runs > 1 and self.capture and self._decoder.device.type == "cuda":
            self._record(of)
        if of.graph is not None:
            of.graph.replay()
            result: ModelOutput = of.output
            return result
        return self._compute(of)

    def _compute(self, of: Placed) -> ModelOutput:
        assert self._caches is not None
        bucket = of.bucket
        out = self._logits_buffer(bucket.logits or bucket.rows)
        return self._decoder.compute(of.tokens, of.plan, self._caches, of.logit_rows, bucket.taps, out)

    def _record(self, of: Placed) -> None:
        started, before = time.perf_counter(), torch.cuda.memory_reserved()
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, pool=self._pool):
            of.output = self._compute(of)
        of.graph = graph
        of.kept = [of.output.logits, *self._scratch()]
        self.captured += 1
        grown = (torch.cuda.memory_reserved() - before) / 1e6
        log.info("captured %s in %.0f ms, %.0f MB", of.bucket, 1e3 * (time.perf_counter() - started), grown)

    def _scratch(self) -> list[Tensor]:
        workspace: Any = getattr(self._decoder.kernels, "workspace", None)
        return [] if workspace is None else workspace.tensors

    def _logits_buffer(self, rows: int) -> Tensor:
        if self._logits is None or len(self._logits) < rows:
            shape = (max(rows, FEW), self._decoder.config.vocab_size)
            self._logits = torch.empty(shape, dtype=torch.float32, device=self._decoder.device)
        return self._logits[:rows]


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


@functools.cache
def up(count: int, steps: tuple[int, ...] = STEPS) -> int:
    if count > steps[-1]:
        return -(-count // steps[-1]) * steps[-1]
    return steps[bisect.bisect_left(steps, count)] if count else 0


@functools.cache
def path_up(width: int) -> int:
    return PATHS[bisect.bisect_left(PATHS, width)] if width <= PATHS[-1] else width
