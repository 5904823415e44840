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
from paceline.models.spec import PARALLEL, PRE, SILU
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

    def cap(self, logits: Tensor, softcap: float) -> Tensor:
        return logits.div_(softcap).tanh_().mul_(softcap)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, centred: bool = False) -> Tensor:
        return elementwise.rms_norm(x.contiguous(), None, weight, eps, centred)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, centred: bool = False) -> Tensor:
        return elementwise.rms_norm(residual, x, weight, eps, centred)

    def rope_and_store(self, qkv: Tensor, plan: PassPlan, rope: RopeArgs, cache: LayerCache) -> Tensor:
        return elementwise.rope_and_store(qkv.contiguous(), plan, rope, cache)

    def attention(
        self, q: Tensor, plan: PassPlan, cache: LayerCache, scale: float, window: int | None, softcap: float = 0.0
    ) -> Tensor:
        work = self.work(plan, q.shape[1], cache)
        return attention(q, plan, work, cache, scale, window, self.workspace, softcap)

    def gate(self, gate_up: Tensor, activation: str = SILU) -> Tensor:
        return elementwise.gate(gate_up, activation)

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
    """The layers as a stream of kernels, eight to a layer: RoPE, cache write and the gate are fused into products."""

    def __init__(
        self, kernels: TritonKernels, layers: Sequence[Layer], caches: Sequence[LayerCache], shape: StackParams
    ) -> None:
        self.caches, self._kernels, self._layers, self._shape = caches, kernels, layers, shape

    def run(self, first: int, last: int, added: Tensor | None, residual: Tensor, plan: PassPlan) -> Tensor:
        work = self._kernels.work(plan, self._layers[0].spec.heads, self.caches[0])
        for index in range(first, last):
            layer, cache, spec = self._layers[index], self.caches[index], self._layers[index].spec
            hidden = self._enter(added, residual, layer.input_norm)
            q = self._queries(hidden, index, plan)
            workspace = self._kernels.workspace
            attended = attention(q, plan, work, cache, spec.scale, spec.window, workspace, spec.softcap)
            # Sums of segments are added by the norm of the stream that follows.
            added = linear(attended, layer.output, in_segments=spec.norms == PRE)
            added = self._normed(added, layer.attention_norm)
            if spec.norms != PARALLEL:
                hidden = self._enter(added, residual, layer.mlp_norm)
            gated = linear(hidden, layer.gate_up, gated=spec.activation)
            out = linear(gated, layer.down, in_segments=spec.norms == PRE and index < last - 1)
            out = self._normed(out, layer.down_norm)
            added = added + out if spec.norms == PARALLEL else out
        assert added is not None, "a stack runs at least one layer"
        return added

    def _enter(self, added: Tensor | None, residual: Tensor, norm: Tensor | None) -> Tensor:
        """Add the output before to the residual stream; return the input of a layer's half."""
        if norm is not None:
            return elementwise.rms_norm(residual, added, norm, self._shape.eps, self._shape.centred)
        return residual if added is None else residual.add_(added)

    def _normed(self, x: Tensor, norm: Tensor | None) -> Tensor:
        return x if norm is None else elementwise.rms_norm(x, None, norm, self._shape.eps, self._shape.centred)

    def _queries(self, hidden: Tensor, index: int, plan: PassPlan) -> Tensor:
        """Return q (M, Hq, D) and write k and v to the cache: one kernel, unless q and k are normed between."""
        layer, cache, rope = self._layers[index], self.caches[index], self._shape.rope(index, self._layers[index])
        if layer.q_norm is None:
            rotary = Rotary(plan.positions, plan.slots, rope.cos, rope.sin, cache.k, cache.v)
            return linear(hidden, layer.qkv, rotary=rotary).view(len(hidden), layer.spec.heads, -1)
        return elementwise.rope_and_store(linear(hidden, layer.qkv), plan, rope, cache)
