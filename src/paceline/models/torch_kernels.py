"""The reference kernels: plain torch, any device, any float dtype; the other kernels are tested against them.

Sums are taken in fp32 at least. torch's products may round differently for different numbers of rows, so these are
lossless in distribution but not bit-exact across passes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.config import ModelConfig
from paceline.models.chain import GreedyChain
from paceline.models.kernels import FLOAT32, Layer, LayerByLayer, Rope, Shape, Stack, Weights
from paceline.models.kv_cache import LayerCache
from paceline.models.plan import PassPlan
from paceline.models.weights import Linear, StoredWeight, WeightKind, in_one_kind

GATHER_LIMIT = 1 << 24  # elements of K copied at once; rows beyond are processed in further parts


class TorchKernels:
    name = "torch"
    exact = False
    captures = False
    torch_threads: int | None = None
    activations = FLOAT32

    def pack(self, weight: Tensor | StoredWeight | Sequence[StoredWeight], bias: Tensor | None = None) -> Linear:
        """On CPU half-precision weights are widened: activations are fp32 there."""
        stored = in_one_kind(weight)
        device = stored.data.device
        if device.type == "cpu" and _is_half(stored.kind.dtype):
            stored = stored.to(WeightKind.FLOAT32, device)
        return Linear(stored, None if bias is None else bias.detach().to(stored.kind.dtype))

    def embedding(self, weight: StoredWeight, packed: Linear | None) -> Tensor:
        if not weight.kind.is_blocks:
            return weight.data
        return weight.numbers() if packed is None else packed.weight.data

    def linear(self, x: Tensor, weight: Linear) -> Tensor:
        return F.linear(x, weight.weight.data, weight.bias)

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

    def rope_and_store(self, qkv: Tensor, plan: PassPlan, rope: Rope, cache: LayerCache) -> Tensor:
        _, kv_heads, dim = cache.k.shape
        heads = qkv.view(len(qkv), -1, dim)
        q, k, v = torch.tensor_split(heads, [heads.shape[1] - 2 * kv_heads, heads.shape[1] - kv_heads], dim=1)
        q = q if rope.q_norm is None else self.rms_norm(q, rope.q_norm, rope.eps)
        k = k if rope.k_norm is None else self.rms_norm(k, rope.k_norm, rope.eps)
        cos, sin = rope.cos[plan.positions][:, None], rope.sin[plan.positions][:, None]  # (M, 1, D / 2)
        writes = plan.slots >= 0
        slots = plan.slots[writes].long()
        cache.k[slots] = _rotate(k, cos, sin)[writes].to(cache.k.dtype)
        cache.v[slots] = v[writes].to(cache.v.dtype)
        return _rotate(q, cos, sin)

    def attention(self, q: Tensor, plan: PassPlan, cache: LayerCache, scale: float, window: int | None) -> Tensor:
        begin, seen = torch.zeros_like(plan.positions), plan.max_len
        if window is not None:
            begin = (plan.positions - window + 1).clamp(min=0)
            seen = int((plan.reach - begin).max()) if len(q) else 0
        step = max(1, GATHER_LIMIT // max(seen * cache.k[0].numel(), 1))
        turns = [torch.arange(at, min(at + step, len(q)), device=q.device) for at in range(0, len(q), step)]
        done = [self._attend(q[rows], plan, cache, scale, begin[rows], seen, rows) for rows in turns]
        return torch.cat(done) if done else q.flatten(1)

    def _attend(
        self, q: Tensor, plan: PassPlan, cache: LayerCache, scale: float, begin: Tensor, seen: int, rows: Tensor
    ) -> Tensor:
        """Up to `seen` keys of each row from `begin` (R,) on, gathered and padded with the row's last."""
        last = plan.reach[rows][:, None] - 1
        positions = begin[:, None] + torch.arange(seen, device=q.device)  # (R, seen)
        visible = positions <= last
        slots = _slots_of(plan, positions.minimum(last), rows).long()
        keys, values = (_widen(t[slots]).transpose(1, 2) for t in (cache.k, cache.v))  # (R, Hkv, seen, D)
        grouped = _widen(q).view(len(q), keys.shape[1], -1, q.shape[2])  # (R, Hkv, G, D)
        scores = (grouped * scale) @ keys.transpose(2, 3)
        weights = scores.masked_fill(~visible[:, None, None], float("-inf")).softmax(-1)
        return (weights @ values).flatten(1).to(q.dtype)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

    def stack(self, layers: Sequence[Layer], caches: Sequence[LayerCache], shape: Shape) -> Stack:
        return LayerByLayer(self, layers, caches, shape)

    def greedy_chain(
        self, weights: Weights, shape: Shape, caches: Sequence[LayerCache], block_size: int, config: ModelConfig
    ) -> GreedyChain | None:
        return None


def _slots_of(plan: PassPlan, positions: Tensor, rows: Tensor) -> Tensor:
    """The slots `rows` (R,) read logical `positions` (R, T) from."""
    blocks = (positions // plan.block_size).clamp(max=plan.block_tables.shape[1] - 1)
    paged = plan.block_tables[plan.sequence[rows][:, None], blocks] * plan.block_size + positions % plan.block_size
    if plan.path.shape[1] == 0:
        return paged
    ahead = positions - plan.prefix[rows][:, None]
    along_path = plan.path[rows].gather(1, ahead.clamp(0, plan.path.shape[1] - 1).long())
    return torch.where(ahead < 0, paged, along_path)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = _widen(x).chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


def _is_half(dtype: torch.dtype) -> bool:
    return dtype in (torch.bfloat16, torch.float16)


def _widen(x: Tensor) -> Tensor:
    return x.float() if _is_half(x.dtype) else x
