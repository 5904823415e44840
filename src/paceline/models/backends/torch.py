"""The reference kernels: plain torch, any device, any float dtype; the other kernels are tested against them.

Sums are taken in fp32 at least. torch's products round differently for different numbers of rows, so these are lossless
in distribution but not bit-exact across passes. What all layers of a pass share is worked out once (`torch_reads`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.models.backends.torch_reads import Part, PassReads
from paceline.models.kernels import FLOAT32, Layer, LayerByLayer, RopeArgs, Stack, StackParams
from paceline.models.kv_cache import LayerCache
from paceline.models.plan import PassPlan
from paceline.models.weights import Linear, StoredWeight, WeightKind, in_one_kind

FEW_ROWS = 7  # MKL multiplies (N, K) by (K, M) up to three times as fast as (M, K) by (K, N) up to here


class TorchKernels:
    name = "torch"
    exact = False
    captures = False
    keeps_codes = False
    torch_threads: int | None = None
    activations = FLOAT32

    def __init__(self) -> None:
        self._last: tuple[PassPlan | None, PassReads | None] = None, None

    def pack(self, weight: Tensor | StoredWeight | Sequence[StoredWeight], bias: Tensor | None = None) -> Linear:
        """On CPU half-precision weights are widened: activations are fp32 there."""
        stored = in_one_kind(weight)
        device = stored.data.device
        if device.type == "cpu" and _is_half(stored.kind.dtype):
            stored = stored.to(WeightKind.FLOAT32, device)
        return Linear(stored, None if bias is None else bias.detach().to(stored.kind.dtype))

    def embedding(self, weight: StoredWeight, packed: Linear | None) -> Tensor:
        if not weight.kind.is_blocks:
            return weight.numbers()
        return weight.numbers() if packed is None else packed.weight.data

    def linear(self, x: Tensor, weight: Linear) -> Tensor:
        matrix, bias = weight.weight.data, weight.bias
        if not 1 < len(x) <= FEW_ROWS or x.device.type != "cpu":
            return F.linear(x, matrix, bias)
        product = (matrix @ x.t()).t().contiguous()
        return product if bias is None else product.add_(bias)

    def logits(self, x: Tensor, weight: Linear, out: Tensor | None = None) -> Tensor:
        logits = self.linear(x, weight).float()
        return logits if out is None else out.copy_(logits)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = _widen(x)
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return (wide * scale).to(x.dtype) * weight

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        residual += x
        return self.rms_norm(residual, weight, eps)

    def rope_and_store(self, qkv: Tensor, plan: PassPlan, rope: RopeArgs, cache: LayerCache) -> Tensor:
        _, kv_heads, dim = cache.k.shape
        heads = qkv.view(len(qkv), -1, dim)
        q, k, v = torch.tensor_split(heads, [heads.shape[1] - 2 * kv_heads, heads.shape[1] - kv_heads], dim=1)
        q = q if rope.q_norm is None else self.rms_norm(q, rope.q_norm, rope.eps)
        k = k if rope.k_norm is None else self.rms_norm(k, rope.k_norm, rope.eps)
        reads = self._reads(plan)
        cos, sin = reads.rotation(rope)
        k, v = _rotate(k, cos, sin), v
        if reads.writing is not None:
            k, v = k[reads.writing], v[reads.writing]
        cache.k.index_copy_(0, reads.slots, k.to(cache.k.dtype))
        cache.v.index_copy_(0, reads.slots, v.to(cache.v.dtype))
        return _rotate(q, cos, sin)

    def attention(self, q: Tensor, plan: PassPlan, cache: LayerCache, scale: float, window: int | None) -> Tensor:
        out = torch.empty_like(q)
        for part in self._reads(plan).parts(window, q.shape[1], cache):
            out[part.rows] = _attend(q[part.rows], part, cache, scale).to(q.dtype)
        return out.flatten(1)

    def _reads(self, plan: PassPlan) -> PassReads:
        """Kept for the plan of the last call: the layers of a pass come one after the other."""
        last, reads = self._last
        if reads is None or last is not plan:
            reads = PassReads(plan)
            self._last = plan, reads
        return reads

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

    def stack(self, layers: Sequence[Layer], caches: Sequence[LayerCache], shape: StackParams) -> Stack:
        return LayerByLayer(self, layers, caches, shape)


def _attend(q: Tensor, part: Part, cache: LayerCache, scale: float) -> Tensor:
    """S sequences of R rows each: (S, R, Hq, D) in, the same out. Keys of the sequence first, then the row's own."""
    shape = q.shape
    heads = cache.k.shape[1]
    grouped = _widen(q).view(*shape[:2], heads, -1, shape[3]).permute(0, 2, 3, 1, 4) * scale  # (S, Hkv, G, R, D)
    keys, values = (_widen(t[part.slots]).permute(0, 2, 1, 3)[:, :, None] for t in (cache.k, cache.v))
    scores = grouped @ keys.transpose(-1, -2)  # (S, Hkv, G, R, T)
    if part.hidden is not None:
        scores.masked_fill_(part.hidden[:, None, None], float("-inf"))
    if part.path is None or part.path_hidden is None:
        mixed = scores.softmax(-1) @ values
    else:
        shared = scores.shape[-1]
        ahead, ahead_values = (_widen(t[part.path]).permute(0, 3, 1, 2, 4) for t in (cache.k, cache.v))  # (S,Hkv,R,P,D)
        along = torch.einsum("shgrd,shrpd->shgrp", grouped, ahead)
        along.masked_fill_(part.path_hidden[:, None, None], float("-inf"))
        weights = torch.cat([scores, along], -1).softmax(-1)
        mixed = weights[..., :shared] @ values + torch.einsum("shgrp,shrpd->shgrd", weights[..., shared:], ahead_values)
    return mixed.permute(0, 3, 1, 2, 4).reshape(shape)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = _widen(x).chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


def _is_half(dtype: torch.dtype) -> bool:
    return dtype in (torch.bfloat16, torch.float16)


def _widen(x: Tensor) -> Tensor:
    return x.float() if _is_half(x.dtype) else x
