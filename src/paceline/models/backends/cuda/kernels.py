"""Triton's kernels as `Kernels`: a row's bits do not depend on the other rows of its pass, and a pass of few rows takes
about the time to read the weights. The kernels are in this folder, one file for each idea.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from paceline.models.backends.cuda import elementwise
from paceline.models.backends.cuda.attention.attention import Work, Workspace, attention, work_of
from paceline.models.backends.cuda.codes.codes import fits, keeps_codes, laid_out
from paceline.models.backends.cuda.linear import Rotary, linear
from paceline.models.kernels import FLOAT32, Layer, RopeArgs, Stack, StackParams
from paceline.models.kv_cache import LayerCache
from paceline.models.plan import PassPlan
from paceline.models.quant.code_blocks import as_codes
from paceline.models.weights import Linear, StoredWeight, alike, in_one_kind, joined

log = logging.getLogger("paceline")


@functools.cache
def _warn_expanded(kinds: str) -> None:
    log.warning("weights stored as %s take the memory of bfloat16: the kernels here do not read them as stored", kinds)


class TritonKernels:
    """Kernels of a CUDA device."""

    name = "triton"
    exact = True
    captures = True
    torch_threads: int | None = 1
    activations = FLOAT32

    def __init__(self, device: torch.device) -> None:
        self.workspace, self.keeps_codes = Workspace(device), keeps_codes(device)
        self._last_work: tuple[PassPlan | None, Work | None] = (None, None)

    def pack(self, weight: Tensor | StoredWeight | Sequence[StoredWeight], bias: Tensor | None = None) -> Linear:
        """Lay weights out; codes and blocks stay codes where the kernels' layout fits."""
        bias = None if bias is None else bias.detach().contiguous()
        parts = [weight] if isinstance(weight, Tensor | StoredWeight) else weight
        stored = [StoredWeight.of(part) for part in parts]
        if any(part.kind.is_blocks or part.kind.has_scales for part in stored):
            return Linear(self._codes(stored), bias)
        one = in_one_kind(stored)
        return Linear(replace(one, data=one.data.contiguous()), bias)

    def _codes(self, stored: Sequence[StoredWeight]) -> StoredWeight:
        parts = [as_codes(part) if part.kind.is_blocks else part for part in stored]
        codes = [part for part in parts if part is not None and part.kind.has_scales]
        if len(codes) == len(stored) and alike(codes) and fits(codes) and self.keeps_codes:
            return laid_out(joined(codes))
        _warn_expanded(", ".join(sorted({part.kind.label for part in stored})))
        return in_one_kind(stored)

    def embedding(self, weight: StoredWeight, packed: Linear | None) -> Tensor:
        return weight.numbers()

    def linear(self, x: Tensor, weight: Linear) -> Tensor:
        return linear(x, weight)

    def logits(self, x: Tensor, weight: Linear, out: Tensor | None = None) -> Tensor:
        return linear(x, weight, out_dtype=torch.float32, out=out)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return elementwise.rms_norm(x.contiguous(), None, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        return elementwise.rms_norm(residual, x, weight, eps)

    def rope_and_store(self, qkv: Tensor, plan: PassPlan, rope: RopeArgs, cache: LayerCache) -> Tensor:
        return elementwise.rope_and_store(qkv.contiguous(), plan, rope, cache)

    def attention(self, q: Tensor, plan: PassPlan, cache: LayerCache, scale: float, window: int | None) -> Tensor:
        work = self.work(plan, q.shape[1], cache)
        return attention(q, plan, work, cache, scale, window, self.workspace)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return elementwise.silu_mul(gate_up)

    def stack(self, layers: Sequence[Layer], caches: Sequence[LayerCache], shape: StackParams) -> Stack:
        return TritonStack(self, layers, caches, shape)

    def work(self, plan: PassPlan, q_heads: int, cache: LayerCache) -> Work:
        """Divide the work of a pass; the division is cached for all of its layers."""
        if isinstance(plan.work, Work):
            return plan.work
        last, work = self._last_work
        if plan is not last or work is None:
            work = work_of(plan, q_heads // cache.k.shape[1], cache.k.shape[1])
            self._last_work = plan, work
        return work


class TritonStack:
    """The layers as a stream of kernels, eight to a layer: RoPE, cache write and SiLU * up are fused into products."""

    def __init__(
        self, kernels: TritonKernels, layers: Sequence[Layer], caches: Sequence[LayerCache], shape: StackParams
    ) -> None:
        self.caches, self._kernels, self._layers, self._shape = caches, kernels, layers, shape

    def run(self, first: int, last: int, added: Tensor | None, residual: Tensor, plan: PassPlan) -> Tensor:
        kernels, shape = self._kernels, self._shape
        work = kernels.work(plan, shape.q_heads, self.caches[0])
        for layer, cache in zip(self._layers[first:last], self.caches[first:last], strict=True):
            hidden = elementwise.rms_norm(residual, added, layer.input_norm, shape.eps)
            q = self._queries(hidden, layer, cache, plan)
            attended = attention(q, plan, work, cache, shape.scale, layer.window, kernels.workspace)
            added = linear(attended, layer.output, in_segments=True)
            hidden = elementwise.rms_norm(residual, added, layer.mlp_norm, shape.eps)
            gated = linear(hidden, layer.gate_up, gated=True)
            added = linear(gated, layer.down, in_segments=layer is not self._layers[last - 1])
        assert added is not None, "a stack runs at least one layer"
        return added

    def _queries(self, hidden: Tensor, layer: Layer, cache: LayerCache, plan: PassPlan) -> Tensor:
        """Return q (M, Hq, D) and write k and v to the cache: one kernel, unless q and k are normed between."""
        shape = self._shape
        if layer.q_norm is None:
            rotary = Rotary(plan.positions, plan.slots, shape.cos, shape.sin, cache.k, cache.v)
            return linear(hidden, layer.qkv, rotary=rotary).view(len(hidden), shape.q_heads, -1)
        qkv = linear(hidden, layer.qkv)
        return elementwise.rope_and_store(qkv, plan, shape.rope(layer), cache)
