"""A block drafter's K/V of the target's hidden states: joined into one vector a position, then keys and values of every
layer. No row attends, so a prompt costs a few products. On a GPU this is captured for some numbers of positions."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from paceline.drafters.block.config import TAP_NORM, DSparkConfig
from paceline.drafters.hidden_states import TapBatch
from paceline.models.backends.cpu.kernels import NativeKernels
from paceline.models.backends.cpu.stack import ContextKVView, NativeStack
from paceline.models.decoder import Decoder
from paceline.models.kernels import RopeArgs
from paceline.models.kv_cache import LayerCache
from paceline.models.plan import PassPlan
from paceline.platform.cuda_graph import CudaGraph, GraphRecorder, warn_uncaptured
from paceline.platform.triton import compile_together

POSITIONS = (8, 16, 32, 64, 128, 256, 512)  # positions of a captured batch; larger batches are written in parts


class ContextKV:
    def __init__(
        self, config: DSparkConfig, tensors: Mapping[str, Tensor], decoder: Decoder, store: Callable[[Tensor], Any]
    ) -> None:
        """`store`: returns a matrix in the drafter's kind of weights."""
        self._config, self._decoder = config, decoder
        self._caches: SequenceOf[LayerCache] = ()
        kernels, dtypes, device = decoder.kernels, decoder.dtypes, decoder.device

        def vector(name: str) -> Tensor:
            return tensors[name].to(device, dtypes.compute).contiguous()

        self._fc, self._norm = kernels.pack(store(tensors["fc.weight"])), vector("hidden_norm.weight")
        layers = range(config.body.num_layers)
        # Keys and values of all layers are one product.
        names = [f"layers.{layer}.self_attn.{part}_proj.weight" for layer in layers for part in "kv"]
        self._kv = kernels.pack([store(tensors[name]) for name in names])
        self._tap_norm = vector(TAP_NORM) if config.tap_norm else None
        self.view: ContextKVView | None = None  # points into the tensors above
        if isinstance(kernels, NativeKernels):
            tap_norm = None if self._tap_norm is None else self._tap_norm.data_ptr()
            pointers = tap_norm, self._norm.data_ptr()
            self.view = ContextKVView(
                *pointers, self._fc.view, self._kv.view, len(config.taps), config.body.rms_norm_eps
            )
        self._graphs: dict[int, CudaGraph] = {}
        self._scratch: list[Tensor] = []  # scratch of kernels, which graphs point into
        self._taps = self._at = torch.empty(0)  # (positions, T, H) and (2, positions), inputs of the graphs

    def bind(self, caches: SequenceOf[LayerCache], recorder: GraphRecorder | None) -> None:
        """Receive the caches; with a `recorder`, capture batches of usual sizes."""
        self._caches = caches
        graphs, device = self._decoder.graphs, self._decoder.device
        if recorder is None or graphs is None:
            return
        most, dtype = POSITIONS[-1], self._decoder.dtypes.compute
        shape = most, len(self._config.taps), self._config.body.hidden_size
        self._taps = torch.zeros(shape, dtype=dtype, device=device)
        self._at = torch.full((2, most), -1, dtype=torch.int32, device=device)
        self._at[0] = 0
        try:
            compile_together(device, (functools.partial(self._work, count) for count in POSITIONS))
            for count in reversed(POSITIONS):
                work = functools.partial(self._work, count)
                work()  # loads its kernels
                self._graphs[count] = recorder.capture(work)
            self._scratch = graphs.scratch()
        except RuntimeError as problem:
            self._graphs = {}
            warn_uncaptured("writing K/V of hidden states", problem)

    def __call__(self, batch: TapBatch) -> None:
        positions = batch.positions.clamp(0, self._decoder.config.max_positions - 1)
        if not self._graphs:
            self._store(batch.taps, positions.int(), batch.slots.int(), batch.end)
            return
        for first in range(0, len(positions), POSITIONS[-1]):
            part = slice(first, first + POSITIONS[-1])
            taps = batch.taps[part]
            count = next(count for count in POSITIONS if count >= len(taps))
            self._taps[: len(taps)] = taps
            self._at[0, : len(taps)], self._at[1, : len(taps)] = positions[part], batch.slots[part]
            self._at[1, len(taps) : count] = -1
            self._graphs[count].replay()

    def _work(self, count: int) -> None:
        self._store(self._taps[:count], self._at[0, :count], self._at[1, :count], self._caches[0].k.shape[0])

    def joined(self, taps: Tensor) -> Tensor:
        """Return one vector a position (A, H) from hidden states (A, T, H)."""
        kernels, eps = self._decoder.kernels, self._config.body.rms_norm_eps
        taps = taps.to(self._decoder.dtypes.compute)
        if self._tap_norm is not None:
            taps = F.rms_norm(taps, taps.shape[-1:], eps=eps) * self._tap_norm
        return kernels.rms_norm(kernels.linear(taps.flatten(1), self._fc), self._norm, eps)

    def _store(self, taps: Tensor, positions: Tensor, slots: Tensor, end: int) -> None:
        kernels, layers, shape = self._decoder.kernels, self._decoder.layers, self._decoder.shape(end)
        nothing = slots[:, None]
        plan = PassPlan(
            positions=positions,
            slots=slots,
            sequence=slots,
            prefix=slots,
            reach=slots,
            path=nothing[:, :0],
            block_tables=nothing[:1],
            block_size=1,
            max_len=end,
        )
        stack = self._decoder.stack(self._caches, end)
        if isinstance(stack, NativeStack):
            assert self.view is not None
            stack.write_context_kv(taps, plan, self.view)
            return
        kv = kernels.linear(self.joined(taps), self._kv).view(len(taps), len(layers), -1)
        each = kv.transpose(0, 1).contiguous()  # (layers, A, 2 kv)
        for index, (layer, cache, part) in enumerate(zip(layers, self._caches, each, strict=True)):
            # Rows have keys and values alone: there are no queries to norm or rotate.
            rope = RopeArgs(*shape.tables[index], layer.k_norm, layer.k_norm, shape.eps)
            kernels.rope_and_store(part, plan, rope, cache)
