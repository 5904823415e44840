"""CUDA kernels of our own: a row's bits do not depend on the rows beside it, and a pass costs about what reading the
weights costs. The kernels themselves are in `models.triton`, one file per idea.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.config import ModelConfig
from paceline.models.backends.cuda import elementwise
from paceline.models.backends.cuda.attention.attention import Work, Workspace, attention, work_of
from paceline.models.backends.cuda.codes.codes import fits, keeps_codes, laid_out
from paceline.models.backends.cuda.greedy_chain import TritonChain, served
from paceline.models.backends.cuda.linear import FEW_ROWS, Rotary, linear
from paceline.models.chain import GreedyChain
from paceline.models.kernels import FLOAT32, Layer, LayerByLayer, RopeArgs, Stack, StackParams, Weights
from paceline.models.kv_cache import LayerCache
from paceline.models.plan import PassPlan
from paceline.models.quant.code_blocks import as_codes
from paceline.models.weights import Linear, StoredWeight, alike, in_one_kind, joined
from paceline.platform.launch import INTERPRETED, multiprocessors

log = logging.getLogger("paceline")


@functools.cache
def _warn_expanded(kinds: str) -> None:
    log.warning("weights stored as %s take the memory of bfloat16: the kernels here do not read them as stored", kinds)


class TritonKernels:
    name = "triton"
    exact = True
    captures = True
    torch_threads: int | None = 1
    activations = FLOAT32

    def __init__(self, device: torch.device) -> None:
        self.workspace, self.keeps_codes = Workspace(device), keeps_codes(device)
        self._last_work: tuple[PassPlan | None, Work | None] = (None, None)

    def pack(self, weight: Tensor | StoredWeight | Sequence[StoredWeight], bias: Tensor | None = None) -> Linear:
        """Codes and blocks stay codes where the kernels' layout fits, for activations in bf16."""
        bias = None if bias is None else bias.detach().contiguous()
        parts = [weight] if isinstance(weight, Tensor | StoredWeight) else weight
        stored = [StoredWeight.of(part) for part in parts]
        if any(part.kind.is_blocks or part.kind.has_scales for part in stored):
            return Linear(self._codes(stored), bias)
        one = in_one_kind(stored)
        return Linear(replace(one, data=one.data.contiguous()), bias)

    def _codes(self, stored: Sequence[StoredWeight]) -> StoredWeight:
        found = [as_codes(part) if part.kind.is_blocks else part for part in stored]
        codes = [part for part in found if part is not None and part.kind.has_scales]
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

    def greedy_chain(
        self, weights: Weights, shape: StackParams, caches: Sequence[LayerCache], block_size: int, config: ModelConfig
    ) -> GreedyChain | None:
        programs = multiprocessors(weights.embedding.device)
        if not served(weights, caches, config, programs):
            return None
        try:
            made = TritonChain(weights, shape, caches, block_size, config, programs)
            if not INTERPRETED:
                made.launch()  # compiles it
        except Exception as problem:  # it does not fit this GPU: drafts are made by passes
            log.warning("drafting by passes: %r", problem)
            return None
        return made

    def work(self, plan: PassPlan, q_heads: int, cache: LayerCache) -> Work:
        """Once per pass: a plan serves every layer."""
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
        """(M, Hq, D), k and v written to the cache; in one kernel unless q and k are normed between."""
        shape = self._shape
        if layer.q_norm is None:
            rotary = Rotary(plan.positions, plan.slots, shape.cos, shape.sin, cache.k, cache.v)
            return linear(hidden, layer.qkv, rotary=rotary).view(len(hidden), shape.q_heads, -1)
        qkv = linear(hidden, layer.qkv)
        return elementwise.rope_and_store(qkv, plan, shape.rope(layer), cache)


class FastKernels(TritonKernels):
    """`--numerics fast`: passes of many rows use the vendor's products, which choose their own order of sums.

    Up to 64 rows our products, which read weights as fast as memory allows, are still used. Beyond, a row's bits depend
    on the size of its pass: lossless in distribution, but a near-tie may resolve differently in a prefill than in a
    step.
    """

    name = "triton, fast"
    exact = False

    def linear(self, x: Tensor, weight: Linear) -> Tensor:
        if len(x) <= FEW_ROWS or weight.weight.kind.has_scales:
            return super().linear(x, weight)
        return F.linear(x, weight.weight.data, weight.bias)

    def logits(self, x: Tensor, weight: Linear, out: Tensor | None = None) -> Tensor:
        if len(x) <= FEW_ROWS or weight.weight.kind.has_scales:
            return super().logits(x, weight, out)
        logits = self.linear(x, weight).float()
        return logits if out is None else out.copy_(logits)

    def stack(self, layers: Sequence[Layer], caches: Sequence[LayerCache], shape: StackParams) -> Stack:
        return _FastStack(super().stack(layers, caches, shape), LayerByLayer(self, layers, caches, shape))


class _FastStack:
    def __init__(self, few: Stack, many: Stack) -> None:
        self.caches, self._few, self._many = few.caches, few, many

    def run(self, first: int, last: int, added: Tensor | None, residual: Tensor, plan: PassPlan) -> Tensor:
        stack = self._few if len(residual) <= FEW_ROWS else self._many
        return stack.run(first, last, added, residual, plan)
