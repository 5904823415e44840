"""The reference kernels: plain torch, any device, any float dtype; the other kernels are tested against them.

Sums are taken in fp32 at least. torch's products round differently for different numbers of rows, so these are lossless
in distribution but not bit-exact across passes. What all layers of a pass share is computed once (`PassReads`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.models.kernels import FLOAT32, Layer, LayerByLayer, RopeArgs, Stack, StackParams
from paceline.models.kv_cache import LayerCache, slots_of
from paceline.models.plan import PassPlan
from paceline.models.spec import SILU
from paceline.models.weights import Linear, StoredWeight, WeightKind, in_one_kind

FEW_ROWS = 7  # rows M up to which MKL multiplies (N, K) by (K, M) faster than (M, K) by (K, N)
LIMIT = 1 << 24  # numbers that a group gathers or computes at once; larger groups are divided


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
        """Widen half-precision weights on a CPU, where activations are fp32."""
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

    def cap(self, logits: Tensor, softcap: float) -> Tensor:
        return _capped(logits, softcap)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, centred: bool = False) -> Tensor:
        wide = _widen(x)
        if centred:
            wide = wide - wide.mean(-1, keepdim=True)
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return (wide * scale).to(x.dtype) * weight

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, centred: bool = False) -> Tensor:
        residual += x
        return self.rms_norm(residual, weight, eps, centred)

    def rope_and_store(self, qkv: Tensor, plan: PassPlan, rope: RopeArgs, cache: LayerCache) -> Tensor:
        _, kv_heads, dim = cache.k.shape
        heads = qkv.view(len(qkv), -1, dim)
        q, k, v = torch.tensor_split(heads, [heads.shape[1] - 2 * kv_heads, heads.shape[1] - kv_heads], dim=1)
        q = q if rope.q_norm is None else self._normed_heads(q, rope.q_norm, rope.eps)
        k = k if rope.k_norm is None else self._normed_heads(k, rope.k_norm, rope.eps)
        reads = self._reads(plan)
        cos, sin = reads.rotation(rope)
        k, v = _rotate(k, cos, sin), v
        if reads.writing is not None:
            k, v = k[reads.writing], v[reads.writing]
        cache.write(reads.slots, k, v)
        return _rotate(q, cos, sin)

    def _normed_heads(self, heads: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Norm each head of (M, H, D), or with a weight of (H * D,) all of them as one."""
        if len(weight) == heads.shape[-1]:
            return self.rms_norm(heads, weight, eps)
        return self.rms_norm(heads.flatten(1), weight, eps).view(heads.shape)

    def attention(
        self, q: Tensor, plan: PassPlan, cache: LayerCache, scale: float, window: int | None, softcap: float = 0.0
    ) -> Tensor:
        out = torch.empty_like(q)
        for group in self._reads(plan).groups(window, q.shape[1], cache):
            out[group.rows] = _attend(q[group.rows], group, cache, scale, softcap).to(q.dtype)
        return out.flatten(1)

    def _reads(self, plan: PassPlan) -> PassReads:
        """Return the reads of a plan; they are cached for the layers of its pass."""
        last, reads = self._last
        if reads is None or last is not plan:
            reads = PassReads(plan)
            self._last = plan, reads
        return reads

    def gate(self, gate_up: Tensor, activation: str = SILU) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return (F.silu(gate) if activation == SILU else F.gelu(gate, approximate="tanh")) * up

    def stack(self, layers: Sequence[Layer], caches: Sequence[LayerCache], shape: StackParams) -> Stack:
        return LayerByLayer(self, layers, caches, shape)


def _attend(q: Tensor, group: SequenceGroup, cache: LayerCache, scale: float, softcap: float) -> Tensor:
    """Attend (S, R, Hq, D), S sequences of R rows each, to the keys of the sequence, then to the row's own."""
    shape = q.shape
    heads = cache.k.shape[1]
    grouped = _widen(q).view(*shape[:2], heads, -1, shape[3]).permute(0, 2, 3, 1, 4) * scale  # (S, Hkv, G, R, D)
    keys, values = (_widen(t).permute(0, 2, 1, 3)[:, :, None] for t in cache.read(group.slots))
    scores = _capped(grouped @ keys.transpose(-1, -2), softcap)  # (S, Hkv, G, R, T)
    if group.hidden is not None:
        scores.masked_fill_(group.hidden[:, None, None], float("-inf"))
    if group.path is None or group.path_hidden is None:
        mixed = scores.softmax(-1) @ values
    else:
        shared = scores.shape[-1]
        ahead, ahead_values = (_widen(t).permute(0, 3, 1, 2, 4) for t in cache.read(group.path))  # (S, Hkv, R, P, D)
        along = _capped(torch.einsum("shgrd,shrpd->shgrp", grouped, ahead), softcap)
        along.masked_fill_(group.path_hidden[:, None, None], float("-inf"))
        weights = torch.cat([scores, along], -1).softmax(-1)
        mixed = weights[..., :shared] @ values + torch.einsum("shgrp,shrpd->shgrd", weights[..., shared:], ahead_values)
    return mixed.permute(0, 3, 1, 2, 4).reshape(shape)


def _capped(scores: Tensor, cap: float) -> Tensor:
    return scores.div_(cap).tanh_().mul_(cap) if cap else scores


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = _widen(x).chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


def _is_half(dtype: torch.dtype) -> bool:
    return dtype in (torch.bfloat16, torch.float16)


def _widen(x: Tensor) -> Tensor:
    return x.float() if _is_half(x.dtype) else x


class SequenceGroup(NamedTuple):
    """S sequences with R rows each."""

    rows: Tensor  # (S, R) rows of the pass
    slots: Tensor  # (S, T) of the keys that rows of a sequence share, padded
    hidden: Tensor | None  # (S, R, T) shared keys that a row does not see; None: all are seen
    path: Tensor | None  # (S, R, P) slots of a row's drafted ancestors; None where no row has any
    path_hidden: Tensor | None  # (S, R, P)


class PassReads:
    """Tensors that the layers of a pass share: rotations, slots to write, and the keys that each row reads.

    Sequences of equally many rows are a group: their keys are gathered once for all rows of a sequence, not per row.
    """

    def __init__(self, plan: PassPlan) -> None:
        self.plan = plan
        self.positions, self.sequence, self.prefix, self.reach = (  # (M,)
            tensor.long() for tensor in (plan.positions, plan.sequence, plan.prefix, plan.reach)
        )
        writes = plan.slots >= 0
        self.writing = None if bool(writes.all()) else writes  # (M,) bool
        self.slots = (plan.slots if self.writing is None else plan.slots[writes]).long()
        self._rotation: tuple[Tensor | None, Tensor, Tensor] | None = None
        self._groups: dict[tuple[int | None, int, int], list[SequenceGroup]] = {}

    def rotation(self, rope: RopeArgs) -> tuple[Tensor, Tensor]:
        """Return cos and sin of the rows' positions, (M, 1, D / 2)."""
        if self._rotation is None or self._rotation[0] is not rope.cos:
            at = self.positions
            self._rotation = rope.cos, rope.cos[at][:, None], rope.sin[at][:, None]
        return self._rotation[1], self._rotation[2]

    def groups(self, window: int | None, heads: int, cache: LayerCache) -> list[SequenceGroup]:
        """Return the groups for layers of this window, number of query heads and size of a key."""
        key = window, heads, cache.k[0].numel()
        if key not in self._groups:
            self._groups[key] = list(self._divide(*key))
        return self._groups[key]

    def _divide(self, window: int | None, heads: int, key_size: int) -> Iterator[SequenceGroup]:
        begin = torch.zeros_like(self.positions)
        if window is not None:
            begin = (self.positions - window + 1).clamp(min=0)
        order = torch.argsort(self.sequence, stable=True)
        counts = torch.unique_consecutive(self.sequence[order], return_counts=True)[1]
        ends = counts.cumsum(0)
        for count in counts.unique().tolist():
            starts = (ends - counts)[counts == count]
            rows = order[starts[:, None] + torch.arange(count, device=starts.device)]  # (S, R)
            seen = max(int((self.reach[rows].amax(1) - begin[rows].amin(1)).max()), 1)
            for together in torch.split(rows, max(1, LIMIT // (seen * max(key_size, count * heads)))):
                for piece in torch.split(together, max(1, LIMIT // (seen * heads)), dim=1):
                    yield self._group(piece, begin)

    def _group(self, rows: Tensor, begin: Tensor) -> SequenceGroup:
        plan = self.plan
        prefix, reach, begin = self.prefix[rows], self.reach[rows], begin[rows]  # (S, R)
        first, end = begin.amin(1, keepdim=True), prefix.amax(1, keepdim=True)  # (S, 1)
        positions = first + torch.arange(max(int((end - first).max()), 0), device=rows.device)  # (S, T)
        hidden = (positions[:, None] >= prefix[..., None]) | (positions[:, None] < begin[..., None])
        owner, last = self.sequence[rows], self._last_keys(rows)
        paged = slots_of(plan.block_tables, owner[:, :1], positions.minimum(end - 1).clamp(min=0), plan.block_size)
        slots = torch.where(positions < end, paged, last[:, :1]).long()
        path = path_hidden = None
        if bool((reach > prefix).any()):
            ahead = prefix[..., None] + torch.arange(plan.path.shape[1], device=rows.device)  # (S, R, P)
            path = torch.where(ahead < reach[..., None], plan.path[rows], last[..., None]).long()
            path_hidden = (ahead >= reach[..., None]) | (ahead < begin[..., None])
        return SequenceGroup(rows, slots, hidden if bool(hidden.any()) else None, path, path_hidden)

    def _last_keys(self, rows: Tensor) -> Tensor:
        """Return the slot of the last key that each row sees (S, R), to pad with: unwritten slots may hold NaN."""
        plan = self.plan
        prefix, reach = self.prefix[rows], self.reach[rows]
        paged: Tensor = slots_of(plan.block_tables, self.sequence[rows], (prefix - 1).clamp(min=0), plan.block_size)
        if not plan.path.shape[1]:
            return paged
        own = plan.path[rows].gather(2, (reach - prefix - 1).clamp(min=0)[..., None].long())[..., 0]
        return torch.where(reach > prefix, own, paged)
