"""Paged attention for prefill chunks, decodes and token trees in one batch, with one order of summation.

A row sees the logical keys [0, reach): blocks of 64 keys, in chunks of 8 blocks (of 4 early in the context, so that a
short one fills the GPU too). Every block gives a softmax of its own (maximum, sum, weighted values); blocks are folded
in order into their chunk, chunks in order into the result, by one arithmetic. So a row's bits are a function of its
keys alone, while the division of work suits the batch: a program takes a block, some of the chunks or the whole
context.

Rows of one sequence share a tile and read keys through the block table. A tree node's last blocks, from the one its
committed context ends in, hold its own ancestors: they are read by explicit slots, one program per node, and folded in
behind the shared ones.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from paceline.models.backends.cuda.attention.division import CHUNK, EARLY, KEYS, TILE, Division, Work, tiles_of, work_of
from paceline.models.backends.cuda.attention.merge import merge_states
from paceline.models.backends.cuda.attention.shared import attend_shared
from paceline.models.backends.cuda.attention.tail import attend_tail
from paceline.models.kv_cache import LayerCache
from paceline.models.plan import PassPlan
from paceline.platform.launch import INTERPRETED, overlapped, unfused

try:
    from paceline.models.backends.cuda.attention import pipelined
except ImportError:  # a Triton without Gluon
    pipelined = None  # type: ignore[assignment]

__all__ = ["Division", "Work", "Workspace", "attention", "tiles_of", "work_of"]

MOST_INT = (1 << 31) - 1  # elements of a cache addressed with 32 bits
CHUNKS = {"KEYS": KEYS, "EARLY": EARLY, "CHUNK": CHUNK}


class Workspace:
    """Scratch for partial results, shared by all layers and passes; grows to the largest pass seen."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: dict[str, Tensor] = {}

    def floats(self, name: str, count: int) -> Tensor:
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < count:
            buffer = self._buffers[name] = torch.empty(count, dtype=torch.float32, device=self._device)
        return buffer

    @property
    def tensors(self) -> list[Tensor]:
        """Return the tensors that a captured graph points into and keeps alive: a larger pass replaces them here."""
        return list(self._buffers.values())


def attention(
    q: Tensor,
    plan: PassPlan,
    work: Work,
    cache: LayerCache,
    scale: float,
    window: int | None,
    workspace: Workspace,
    softcap: float = 0.0,
) -> Tensor:
    """Attend (M, Hq, D) -> (M, Hq * D)."""
    rows, q_heads, dim = q.shape
    kv_heads, division = cache.k.shape[1], work.division
    out = q.new_empty((rows, q_heads * dim))
    if rows == 0:
        return out
    padded = max(triton.next_power_of_2(dim), 16)
    heads = {"DIM": dim, "GROUP": q_heads // kv_heads, "KV_HEADS": kv_heads, "BLOCK_SIZE": plan.block_size}
    parts = {"PADDED": padded, "PARTS": 2 if padded >= 32 else 1, "WINDOW": window or 0}
    capped = {"CAP": softcap / scale}
    options = {**overlapped(), **unfused()}
    sums = workspace.floats("sums", rows * q_heads * division.units * dim)
    stats = workspace.floats("stats", rows * q_heads * division.units * 2)
    log2_scale = scale * 1.4426950408889634
    _shared(q, plan, work, cache, (sums, stats, out), log2_scale, window, heads, parts | capped, options)
    if division.direct:
        return out
    tail_sums, tail_stats = sums, stats
    if division.tails:
        tail_sums = workspace.floats("tail sums", rows * q_heads * division.tails * dim)
        tail_stats = workspace.floats("tail stats", rows * q_heads * division.tails * 2)
        attend_tail[(rows, kv_heads, division.tails)](
            q, cache.k, cache.v, plan.positions, plan.sequence, plan.prefix, plan.reach, plan.path, plan.block_tables,
            work.shares, tail_sums, tail_stats, log2_scale, rows, plan.path.shape[1],
            TILE=64, KEYS=KEYS,
            num_warps=4, num_stages=1, **heads, **parts, **capped, **options,
        )  # fmt: skip
    merge_states[(rows, q_heads)](
        plan.positions, plan.prefix, plan.reach, work.shares, sums, stats, tail_sums, tail_stats, out, rows,
        DIM=dim, PADDED=padded, HEADS=q_heads, WINDOW=window or 0, TAILS=division.tails,
        num_warps=1, **CHUNKS, **options,
    )  # fmt: skip
    return out


def _shared(
    q: Tensor,
    plan: PassPlan,
    work: Work,
    cache: LayerCache,
    results: tuple[Tensor, Tensor, Tensor],
    log2_scale: float,
    window: int | None,
    heads: dict[str, int],
    parts: dict[str, Any],
    options: dict[str, bool],
) -> None:
    """Launch the kernel of keys that tiles read through block tables; `results`: sums, stats and out."""
    rows, kv_heads, division = len(q), heads["KV_HEADS"], work.division
    wide, tree = cache.k.numel() > MOST_INT, division.tails > 0
    sums, stats, out = results
    plain = window is None and not parts["CAP"]
    if not division.direct and plain and cache.k.dtype == q.dtype and pipelines(q):
        tile = max(division.tile, TILE)
        pipelined.attend_pipelined[(division.shares * kv_heads,)](
            q, cache.k, cache.v, plan.sequence, plan.prefix, plan.reach, plan.block_tables, work.shares, sums, stats,
            log2_scale, rows, division.shares,
            TILE=tile, TREE=tree, WIDE=wide, num_warps=tile // 16,
            maxnreg=128 if tile > TILE else None,  # so that two programs share a multiprocessor
            **heads, **CHUNKS, **options,
        )  # fmt: skip
        return
    attend_shared[(division.shares * kv_heads,)](
        q, cache.k, cache.v, plan.positions, plan.sequence, plan.prefix, plan.reach, plan.block_tables, work.shares,
        sums, stats, out, log2_scale, rows, division.shares,
        TREE=tree, WIDE=wide,
        **shape_of(division, parts["PADDED"], q.element_size()), **heads, **parts, **CHUNKS, **options,
    )  # fmt: skip


def pipelines(q: Tensor) -> bool:
    """Return whether `attend_pipelined` supports this dtype on this device."""
    return (
        pipelined is not None
        and not INTERPRETED
        and q.dtype in (torch.bfloat16, torch.float16)
        and q.shape[-1] in (64, 128)
        and torch.cuda.get_device_capability(q.device)[0] == 9
    )


def shape_of(division: Division, padded: int, element_size: int) -> dict[str, Any]:
    """Return the tiles of `attend_shared` and its launch options."""
    tile = max(division.tile, TILE)
    light = padded * element_size <= 256
    flat, wide = division.direct and tile == TILE and light, tile > TILE and light
    stages = 2 if padded * element_size <= 512 else 1
    if flat and padded > 64:
        stages = 3  # the third is the block table's
    return {
        "TILE": tile,
        "DIRECT": division.direct,
        "FLAT": flat,
        "LAST_STAGES": stages if wide else 1,
        "num_warps": tile // 16,
        "num_stages": stages,
        "maxnreg": 128 if wide else None,  # so that two programs share a multiprocessor
    }
