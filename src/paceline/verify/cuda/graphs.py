"""Verification of a step as one CUDA graph, captured at start-up for every FilterSet and size that serving can have.

A step is padded: its rows of logits, its sequences and the width of its drafts to one of few sizes, and the columns of
its parameters to a `FilterSet`. All its numbers lie in one buffer of that size, which one copy from pinned memory
fills; tokens, trees and q that only the device knows are copied into it on the device. Padding rows belong to sequence
-1 and are skipped by the kernels, so they cost next to nothing and change no other row's bits. Logits are read from the
buffer that all passes share. Steps of other sizes run kernel by kernel, and no graph is captured while serving.
"""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from paceline.core.draft import Draft, Proposal
from paceline.core.verdict import Verdict
from paceline.platform.cuda_graph import CudaGraph, GraphRecorder, warn_uncaptured
from paceline.verify.processors import FilterSet, Nodes, SamplingMetadata
from paceline.verify.walk import DrawKeys

log = logging.getLogger("paceline")
Ints = np.ndarray[Any, np.dtype[np.int64]]
Verify = Callable[..., Verdict]
WIDTHS = (0, 16, 64)  # nodes of a row's draft, and the depth of its verdict
SAMPLED_WIDTH = 16  # width of drafts with a q
COLUMNS = ("key", "kind", "temperature", "top_k", "top_p", "min_p", "committed")
FLOATS = ("temperature", "top_p", "min_p")
TREE = ("tokens", "parents", "depth")  # may lie on the device


class StepKey(NamedTuple):
    filter_set: FilterSet
    rows: int  # rows of logits
    batch: int  # sequences
    width: int  # nodes of a draft
    sampled: bool = False  # chains with a q


class PinnedBuffers(Protocol):
    """Pinned buffers, used in turn (platform/staging.py)."""

    def buffer(self, size: int) -> Any: ...
    def send(self, buffer: Any, to: Tensor, size: int) -> None: ...
    def mark(self) -> None: ...


class StepInputs:
    """The input buffer of the graphs of one size: int64, each part aligned to 16 bytes, since Triton compiles kernels
    anew for unaligned pointers."""

    def __init__(self, rows: int, batch: int, width: int, device: torch.device) -> None:
        even, nodes, slots = batch + batch % 2, (batch, width), (batch, width + 1)
        shapes: dict[str, tuple[int, ...]] = {"columns": (len(COLUMNS), even), "num_nodes": (batch,)}
        shapes |= {"seq": (rows,), "node": (rows,), "row_of": slots, "q_row": slots}
        shapes |= {"tokens": nodes, "parents": nodes, "depth": nodes}
        self._at: dict[str, tuple[slice, tuple[int, ...]]] = {}
        self._views: dict[int, tuple[Ints, dict[str, Ints]]] = {}  # key: address of a pinned buffer
        self._plain = -1  # rows of the plain greedy step in the buffer; -1: another step
        end = 0
        for name, shape in shapes.items():
            size = math.prod(shape)
            self._at[name] = slice(end, end + size), shape
            end += size + size % 2
        self._blank: Ints = np.zeros(end, np.int64)
        blank = self._parts(self._blank)
        blank["seq"][:] = blank["node"][:] = -1
        if not width:
            blank["row_of"][:, 0] = np.arange(batch)
        self._ints = torch.from_numpy(self._blank).to(device, copy=True)
        self.at: dict[str, Tensor] = self._parts(self._ints)
        for row, name in enumerate(COLUMNS):
            column = self.at["columns"][row, :batch]
            self.at[name] = column.view(torch.float64) if name in FLOATS else column

    def _parts(self, ints: Any) -> dict[str, Any]:
        return {name: ints[place].reshape(shape) for name, (place, shape) in self._at.items()}

    def fill(self, columns: Ints, draft: Draft, row_of: Tensor, plain: bool, staging: PinnedBuffers) -> None:
        """Fill in a step. `columns` (7, B) as `COLUMNS`. A plain greedy step depends on its rows alone."""
        batch, width = draft.batch, draft.width
        if plain and batch == self._plain:
            return
        self._plain = batch if plain else -1
        buffer = staging.buffer(2 * len(self._blank))
        if buffer.address not in self._views:
            ints = buffer.ints[: 2 * len(self._blank)].view(np.int64)
            self._views[buffer.address] = ints, self._parts(ints)
        ints, at = self._views[buffer.address]
        ints[:] = self._blank
        at["columns"][:, :batch] = columns
        if width:
            rows = row_of.numpy()
            seq, slot = np.nonzero(rows >= 0)  # rows lie in order of sequence and slot
            at["seq"][: len(seq)], at["node"][: len(seq)] = seq, slot - 1
            at["row_of"][:batch, : width + 1] = rows
            at["num_nodes"][:batch] = draft.num_nodes.numpy()
            for name in TREE:
                if (part := getattr(draft, name)).is_cpu:
                    at[name][:batch, :width] = part.numpy()
            if draft.q is not None:
                at["q_row"][:batch, : width + 1] = draft.q.row_of.numpy()
        else:
            at["seq"][:batch] = np.arange(batch)
        staging.send(buffer, self._ints.view(torch.int32), 2 * len(ints))
        for name in TREE if width else ():
            if not (part := getattr(draft, name)).is_cpu:
                self.at[name][:batch, :width].copy_(part)


class GraphCache:
    """Graphs of verification by `StepKey`: one call at a time, on one stream. Enabled on CUDA devices."""

    def __init__(self, device: torch.device, staging: PinnedBuffers, recorder: GraphRecorder | None = None) -> None:
        self.enabled = device.type == "cuda"
        self._device, self._staging, self._recorder = device, staging, recorder or GraphRecorder()
        self._logits = self._q = torch.empty(0, 0)
        self._inputs: dict[tuple[int, int, int], StepInputs] = {}
        self._graphs: dict[StepKey, CudaGraph] = {}

    def __len__(self) -> int:
        return len(self._graphs)

    def key(self, filter_set: FilterSet, draft: Draft, logits: Tensor) -> StepKey | None:
        """Return the key of the step's graph; None: none was captured."""
        if not self.enabled or logits.data_ptr() != self._logits.data_ptr() or not logits.is_contiguous():
            return None
        rows, width = len(logits), next((width for width in WIDTHS if draft.width <= width), -1)
        sampled = draft.q is not None and filter_set is not FilterSet.GREEDY
        if sampled and not self._takes(draft.q, width):
            return None
        key = self._key(filter_set, rows, width, sampled)
        return key if key in self._graphs and draft.batch <= key.batch else None

    def verify(self, key: StepKey, columns: Ints, draft: Draft, row_of: Tensor) -> Verdict:
        """Verify a step with this key; the verdict stays valid when the next step is verified."""
        inputs = self._inputs[key[1:4]]
        plain = key.filter_set is FilterSet.GREEDY and not key.width
        inputs.fill(columns, draft, row_of, plain, self._staging)
        if key.sampled and draft.q is not None:
            self._q[: len(draft.q.probs)].copy_(draft.q.probs)
        graph = self._graphs[key]
        graph.replay()
        self._staging.mark()
        verdict = Verdict.blank(key.batch, key.width, self._device, graph.result.clone())
        return verdict if draft.batch == key.batch else verdict.first(draft.batch)

    def prepare(self, logits: Tensor, sequences: int, rows: int, q_rows: int) -> None:
        """Prepare for steps of up to these sequences, rows of logits, and rows of q (0: no drafter has q).

        `logits` is the whole buffer that passes write to.
        """
        self._logits, self._most = logits, rounded(sequences)
        self._q = torch.empty(q_rows, logits.shape[1], device=self._device)
        self._rows = min(max(rows, sequences), len(logits))

    def keys(self) -> Iterator[StepKey]:
        """Yield the keys that can occur in serving, the largest first: the graphs share scratch memory."""
        keys: dict[StepKey, None] = {}
        for rows in range(self._rows, 0, -1):
            for filter_set, width in itertools.product(FilterSet, WIDTHS):
                if rows > 1 if width else rows <= self._most:
                    keys[self._key(filter_set, rows, width, sampled=False)] = None
                if rows > 1 and width == SAMPLED_WIDTH and filter_set is not FilterSet.GREEDY and len(self._q):
                    keys[self._key(filter_set, rows, width, sampled=True)] = None
        yield from keys

    def kinds(self) -> list[StepKey]:
        """Return one key of each set of kernels."""
        return list({(key.filter_set, key.width, key.sampled): key for key in self.keys()}.values())

    def run(self, key: StepKey, verify: Verify) -> Verdict:
        """Run a made-up step kernel by kernel, which compiles and loads them."""
        if key[1:4] not in self._inputs:
            self._inputs[key[1:4]] = StepInputs(*key[1:4], self._device)
        return self._work(key, verify)()

    def capture(self, key: StepKey, verify: Verify) -> None:
        """Capture the graph of a key, after a `run` of it."""
        work = self._work(key, verify)
        self._graphs[key] = self._recorder.capture(lambda: work().pack())

    def capture_all(self, verify: Verify) -> None:
        started, before = time.perf_counter(), self._reserved_bytes()
        try:
            for key in self.keys():
                self.run(key, verify)
                self.capture(key, verify)
        except RuntimeError as problem:
            warn_uncaptured("verification", problem)
            self.enabled = False
        seconds, megabytes = time.perf_counter() - started, (self._reserved_bytes() - before) / 1e6
        log.info("captured %d graphs of verification in %.1f s, %.0f MB", len(self), seconds, megabytes)

    def _reserved_bytes(self) -> int:
        return torch.cuda.memory_reserved() if self._device.type == "cuda" else 0

    def _takes(self, q: Proposal | None, width: int) -> bool:
        if q is None:
            return False
        fits = q.probs.shape[1] == self._logits.shape[1] and q.probs.dtype == self._q.dtype
        return q.ids is None and fits and 0 < len(q.probs) <= len(self._q) and width == SAMPLED_WIDTH

    def _key(self, filter_set: FilterSet, rows: int, width: int, sampled: bool) -> StepKey:
        """Return the key of a step with these rows, padded."""
        padded = 1 << (rows - 1).bit_length() if width == WIDTHS[-1] else rounded(rows)
        padded = min(padded, len(self._logits))
        return StepKey(filter_set, padded, min(padded, self._most) if width else padded, width, sampled)

    def _work(self, key: StepKey, verify: Verify) -> Callable[[], Verdict]:
        at = self._inputs[key[1:4]].at
        kind = None if key.filter_set is FilterSet.GREEDY else at["kind"]
        draws = DrawKeys(key=at["key"], committed=at["committed"], kind=kind)
        filters = [at[name] for name in ("temperature", "top_k", "top_p", "min_p")]
        q = Proposal(probs=self._q, row_of=at["q_row"]) if key.sampled else None
        draft = Draft(
            tokens=at["tokens"],
            parents=at["parents"],
            depth=at["depth"],
            num_nodes=at["num_nodes"],
            q=q,
            depth_bound=key.width,
        )
        logits, seq, node = self._logits[: key.rows], at["seq"], at["node"]

        def work() -> Verdict:
            depth = torch.zeros_like(node)
            if key.width and kind is not None:
                depth = torch.where(node >= 0, draft.depth[seq, node.clamp_min(0)], 0)
            nodes = Nodes(seq=seq, node=node, depth=depth, path=node.new_empty(key.rows, 0))
            metadata = SamplingMetadata.of(key.filter_set, *filters)
            return verify(draft, logits, at["row_of"], nodes, metadata, draws, max_depth=key.width)

        return work


def rounded(rows: int) -> int:
    """Return the rows, rounded up to a power of two or one and a half of it."""
    step = 1 << max((rows - 1).bit_length() - 2, 0)
    return -(-rows // step) * step
