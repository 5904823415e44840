"""Paged attention for prefill chunks, decodes and token trees in one batch, with one order of summation.

A row sees the logical positions 0..t. They are cut into blocks of 64 keys, blocks into chunks of 8. Every block gives a
softmax of its own (maximum, sum, weighted values); blocks are folded in order into their chunk, chunks in order into
the result, always by `fold`. So a row's bits are a function of t and of what it sees alone, while the work can be cut
where it suits the batch: a program may take a block, a chunk or everything.

Rows of one sequence share a tile and read keys through the block table. A tree node's last blocks, from the one its
committed context ends in, hold its own ancestors: they are read by explicit slots, one program per node, and folded in
behind the shared ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.models.kv_cache import LayerCache
from paceline.models.plan import PassPlan
from paceline.models.triton.launch import overlapped, release, wait

KEYS = 64  # of a block
CHUNK = 8  # blocks
SPLIT_BLOCKS = 80  # a pass of no more blocks than this, over all tiles, is cut block by block
PROGRAMS = 528  # about four for every multiprocessor
MOST_SPLITS = 36
MOST_INT = (1 << 31) - 1  # elements of a cache addressed with 32 bits
HEADER = 4  # ints before the tiles: width of the block tables, blocks of a unit


@dataclass(frozen=True)
class Division:
    """How the work of a pass is cut: these numbers shape the kernels' grids. What changes from pass to pass (`Work`) is
    read from memory, so one division serves many passes and a captured graph all of its own."""

    tile: int  # q rows (tokens x heads of a group) of a tile
    num_tiles: int
    direct: bool  # a program walks all of its tile's context, and there is nothing to merge
    units: int  # parts a row's context may be cut into
    tails: int  # blocks at the end of a tree node's context that are its own
    splits: int  # programs a tile's units are dealt out to

    @staticmethod
    def of(num_tiles: int, tile: int, path_width: int, kv_heads: int, max_len: int) -> Division:
        """`max_len`: of the longest context these grids and their scratch are to serve."""
        blocks = max(-(-max_len // KEYS), 1)
        direct = path_width == 0 and num_tiles * kv_heads >= PROGRAMS // 4
        units = 1 if direct else max(-(-blocks // CHUNK), min(blocks, SPLIT_BLOCKS // max(num_tiles, 1)))
        tails = -(-(KEYS - 1 + path_width) // KEYS) if path_width else 0
        splits = 1 if direct else max(min(PROGRAMS // max(num_tiles * kv_heads, 1), MOST_SPLITS), 1)
        return Division(tile, num_tiles, direct, units, tails, splits)

    def header(self, max_len: int, table_width: int) -> list[int]:
        """What the kernels read of a pass beside its tiles: HEADER ints."""
        blocks = -(-max_len // KEYS)
        return [table_width, 1 if blocks * self.num_tiles <= SPLIT_BLOCKS else CHUNK, 0, 0]


@dataclass(frozen=True)
class Work:
    division: Division
    tiles: Tensor  # (HEADER + 2 * num_tiles,) int32: header, then first row and number of rows of each tile


def work_of(plan: PassPlan, group: int, kv_heads: int) -> Work:
    """The work of a pass whose plan may lie on the device: it is read back."""
    tile, begin, count = tiles_of(plan.sequence.cpu().numpy(), group)
    division = Division.of(len(begin), tile, plan.path.shape[1], kv_heads, plan.max_len)
    header = division.header(plan.max_len, plan.block_tables.shape[1])
    numbers = torch.from_numpy(np.concatenate([np.array(header), begin, count]).astype(np.int32))
    return Work(division, numbers.to(plan.sequence.device))


def tiles_of(sequence: np.ndarray[Any, Any], group: int) -> tuple[int, np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """(tile, first row of each tile, its number of rows): runs of rows of one sequence, cut to fit.

    `group` q heads share a K/V head.
    """
    starts = np.flatnonzero(np.diff(sequence, prepend=-1))
    lengths = np.diff(starts, append=len(sequence))
    tile = 128 if int(lengths.max(initial=0)) * group > 64 else 64
    if group > tile:
        raise ValueError(f"{group} query heads for one K/V head: at most {tile} are supported")
    per_tile = tile // group
    parts = -(-lengths // per_tile)
    within = (np.arange(int(parts.sum())) - np.repeat(np.cumsum(parts) - parts, parts)) * per_tile
    return tile, np.repeat(starts, parts) + within, np.minimum(np.repeat(lengths, parts) - within, per_tile)


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
        """What a captured graph points into: it must keep them, for a larger pass replaces them here."""
        return list(self._buffers.values())


def attention(
    q: Tensor,
    plan: PassPlan,
    work: Work,
    cache: LayerCache,
    scale: float,
    window: int | None,
    workspace: Workspace,
    *,
    overlap: bool = False,
) -> Tensor:
    """(M, Hq, D) -> (M, Hq * D)."""
    rows, q_heads, dim = q.shape
    kv_heads = cache.k.shape[1]
    division = work.division
    out = q.new_empty((rows, q_heads * dim))
    if rows == 0:
        return out
    padded = max(triton.next_power_of_2(dim), 16)
    stages = 3 if padded * q.element_size() <= 512 else 1
    shape = {
        "DIM": dim,
        "PADDED": padded,
        "GROUP": q_heads // kv_heads,
        "KV_HEADS": kv_heads,
        "BLOCK_SIZE": plan.block_size,
        "KEYS": KEYS,
        "CHUNK": CHUNK,
        "WINDOW": window or 0,
        "TREE": division.tails > 0,
        **overlapped(overlap),
    }
    sums = workspace.floats("sums", rows * q_heads * division.units * dim)
    stats = workspace.floats("stats", rows * q_heads * division.units * 2)
    log2_scale = scale * 1.4426950408889634
    _shared[(division.num_tiles * kv_heads, division.splits)](
        q,
        cache.k,
        cache.v,
        plan.positions,
        plan.sequence,
        plan.prefix,
        plan.block_tables,
        work.tiles,
        sums,
        stats,
        out,
        log2_scale,
        rows,
        division.num_tiles,
        TILE=division.tile,
        DIRECT=division.direct,
        SPLITS=division.splits,
        WIDE=cache.k.numel() > MOST_INT,
        num_warps=division.tile // 16,
        num_stages=stages,
        **shape,
    )
    if division.direct:
        return out
    tail_sums, tail_stats = sums, stats
    if division.tails:
        tail_sums = workspace.floats("tail sums", rows * q_heads * division.tails * dim)
        tail_stats = workspace.floats("tail stats", rows * q_heads * division.tails * 2)
        _tail[(rows, kv_heads, division.tails)](
            q,
            cache.k,
            cache.v,
            plan.positions,
            plan.sequence,
            plan.prefix,
            plan.path,
            plan.block_tables,
            work.tiles,
            tail_sums,
            tail_stats,
            log2_scale,
            rows,
            plan.path.shape[1],
            TILE=64,
            num_warps=4,
            num_stages=1,
            **shape,
        )
    _merge[(rows, q_heads)](
        plan.positions,
        plan.prefix,
        work.tiles,
        sums,
        stats,
        tail_sums,
        tail_stats,
        out,
        rows,
        DIM=dim,
        PADDED=padded,
        HEADS=q_heads,
        KEYS=KEYS,
        CHUNK=CHUNK,
        WINDOW=window or 0,
        TAILS=division.tails,
        num_warps=1,
        **overlapped(overlap),
    )
    return out


@triton.jit
def fold(high, total, sums, more_high, more_total, more_sums):
    """Softmax states of two disjoint sets of keys as one. Empty ones (maximum -inf) change nothing, not a bit."""
    top = tl.maximum(high, more_high)
    level = tl.where(top == float("-inf"), 0.0, top)
    keep = tl.exp2(high - level)
    add = tl.exp2(more_high - level)
    return top, tl.fma(total, keep, more_total * add), tl.fma(sums, keep[:, None], more_sums * add[:, None])


@triton.jit
def fold_one(high, total, sums, more_high, more_total, more_sums):
    """`fold` of a single row."""
    top = tl.maximum(high, more_high)
    level = tl.where(top == float("-inf"), 0.0, top)
    keep = tl.exp2(high - level)
    add = tl.exp2(more_high - level)
    return top, tl.fma(total, keep, more_total * add), tl.fma(sums, keep, more_sums * add)


@triton.jit
def one_block(q, k, v, visible, log2_scale):
    """(TILE, D) rows against one block of keys: each row's maximum, sum and weighted values. k is (D, KEYS)."""
    scores = tl.dot(q, k, input_precision="ieee") * log2_scale
    scores = tl.where(visible, scores, float("-inf"))
    high = tl.max(scores, 1)
    weights = tl.exp2(scores - tl.where(high == float("-inf"), 0.0, high)[:, None])
    return high, tl.sum(weights, 1), tl.dot(weights.to(v.dtype), v, input_precision="ieee")


@triton.jit(do_not_specialize=["rows", "num_tiles"])
def _shared(
    q,
    k_cache,
    v_cache,
    positions,
    sequence,
    prefix,
    tables,
    tiles,
    sums,
    stats,
    out,
    log2_scale,
    rows,
    num_tiles,
    TILE: tl.constexpr,
    DIRECT: tl.constexpr,
    SPLITS: tl.constexpr,
    WIDE: tl.constexpr,
    DIM: tl.constexpr,
    PADDED: tl.constexpr,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr,
    CHUNK: tl.constexpr,
    WINDOW: tl.constexpr,
    TREE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    tile = tl.program_id(0) // KV_HEADS
    kv_head = tl.program_id(0) % KV_HEADS
    release(OVERLAP)
    table_width = tl.load(tiles)
    unit_blocks = CHUNK if DIRECT else tl.load(tiles + 1)
    begin = tl.load(tiles + 4 + tile)
    count = tl.load(tiles + 4 + num_tiles + tile)
    lane = tl.arange(0, TILE)
    used = (lane // GROUP) < count
    row = (begin + lane // GROUP).to(tl.int64)
    position = tl.load(positions + row, mask=used, other=-1)
    end = position + 1  # keys a row reads through the block table: its tail blocks excepted
    if TREE:
        shared = tl.load(prefix + row, mask=used, other=0)
        end = tl.where(shared < end, shared // KEYS * KEYS, end)
    last = tl.max(end)
    first_chunk = 0
    if WINDOW > 0:
        start = tl.min(tl.where(used, position - WINDOW + 1, 2147483647))
        first_chunk = tl.maximum(start, 0) // (KEYS * CHUNK)
    table = tables + tl.load(sequence + begin, mask=count > 0, other=0).to(tl.int64) * table_width
    dim = tl.arange(0, PADDED)
    within = dim < DIM
    heads = KV_HEADS * GROUP
    q_row = row * heads + kv_head * GROUP + lane % GROUP
    stride = tl.cast(rows, tl.int64) * heads
    num_blocks = tl.cdiv(last, KEYS)
    num_units = tl.cdiv(num_blocks, unit_blocks)
    first_unit = first_chunk * CHUNK // unit_blocks
    wait(OVERLAP)
    queries = tl.load(q + q_row[:, None] * DIM + dim[None, :], mask=used[:, None] & within[None, :], other=0.0)
    whole_high = tl.full((TILE,), float("-inf"), tl.float32)
    whole_total = tl.zeros((TILE,), tl.float32)
    for unit in range(first_unit + tl.program_id(1), num_units, SPLITS):
        high = tl.full((TILE,), float("-inf"), tl.float32)
        total = tl.zeros((TILE,), tl.float32)
        values = tl.zeros((TILE, PADDED), tl.float32)
        for block in range(unit * unit_blocks, tl.minimum((unit + 1) * unit_blocks, num_blocks)):
            key = block * KEYS + tl.arange(0, KEYS)
            there = key < last
            page = tl.load(table + key // BLOCK_SIZE, mask=there, other=0)
            if WIDE:
                page = page.to(tl.int64)
            at = (page * BLOCK_SIZE + key % BLOCK_SIZE) * (KV_HEADS * DIM) + kv_head * DIM
            k = tl.load(k_cache + at[None, :] + dim[:, None], mask=there[None, :] & within[:, None], other=0.0)
            v = tl.load(v_cache + at[:, None] + dim[None, :], mask=there[:, None] & within[None, :], other=0.0)
            visible = key[None, :] < end[:, None]
            if WINDOW > 0:
                visible = visible & (key[None, :] > position[:, None] - WINDOW)
            more_high, more_total, more_values = one_block(queries, k, v, visible, log2_scale)
            high, total, values = fold(high, total, values, more_high, more_total, more_values)
        if DIRECT:
            place = sums + q_row[:, None] * DIM + dim[None, :]
            mask = used[:, None] & within[None, :]
            if num_units > first_unit + 1:
                before = tl.load(place, mask=mask & (tl.where(unit > first_unit, DIM, 0) > dim)[None, :], other=0.0)
                whole_high, whole_total, values = fold(whole_high, whole_total, before, high, total, values)
                if unit < num_units - 1:
                    tl.store(place, values, mask=mask)
                    tl.debug_barrier()
            else:
                whole_total = total
            if unit == num_units - 1:
                result = values / whole_total[:, None]
                tl.store(out + q_row[:, None] * DIM + dim[None, :], result.to(out.dtype.element_ty), mask=mask)
        else:
            part = unit * stride + q_row
            tl.store(sums + part[:, None] * DIM + dim[None, :], values, mask=used[:, None] & within[None, :])
            tl.store(stats + part * 2, high, mask=used)
            tl.store(stats + part * 2 + 1, total, mask=used)


@triton.jit(do_not_specialize=["rows", "path_width"])
def _tail(
    q,
    k_cache,
    v_cache,
    positions,
    sequence,
    prefix,
    path,
    tables,
    tiles,
    sums,
    stats,
    log2_scale,
    rows,
    path_width,
    TILE: tl.constexpr,
    DIM: tl.constexpr,
    PADDED: tl.constexpr,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr,
    CHUNK: tl.constexpr,
    WINDOW: tl.constexpr,
    TREE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    nth = tl.program_id(2)
    release(OVERLAP)
    position = tl.load(positions + row)
    shared = tl.load(prefix + row)
    block = shared // KEYS + nth
    key = block * KEYS + tl.arange(0, KEYS)
    there = tl.where(shared <= position, position, -1) >= key  # the row is a tree node, and the key one it sees
    table = tables + tl.load(sequence + row).to(tl.int64) * tl.load(tiles)
    page = tl.load(table + key // BLOCK_SIZE, mask=there & (key < shared), other=0).to(tl.int64)
    own = tl.load(path + row * path_width + key - shared, mask=there & (key >= shared), other=0).to(tl.int64)
    slot = tl.where(key < shared, page * BLOCK_SIZE + key % BLOCK_SIZE, own)
    wait(OVERLAP)
    if (block * KEYS <= position) & (shared <= position):
        lane = tl.arange(0, TILE)
        used = lane < GROUP
        dim = tl.arange(0, PADDED)
        within = dim < DIM
        heads = KV_HEADS * GROUP
        q_row = row * heads + kv_head * GROUP + lane
        queries = tl.load(q + q_row[:, None] * DIM + dim[None, :], mask=used[:, None] & within[None, :], other=0.0)
        at = slot * (KV_HEADS * DIM) + kv_head * DIM
        k = tl.load(k_cache + at[None, :] + dim[:, None], mask=there[None, :] & within[:, None], other=0.0)
        v = tl.load(v_cache + at[:, None] + dim[None, :], mask=there[:, None] & within[None, :], other=0.0)
        visible = used[:, None] & there[None, :]
        if WINDOW > 0:
            visible = visible & (key > position - WINDOW)[None, :]
        high, total, values = one_block(queries, k, v, visible, log2_scale)
        part = nth * tl.cast(rows, tl.int64) * heads + q_row
        tl.store(sums + part[:, None] * DIM + dim[None, :], values, mask=used[:, None] & within[None, :])
        tl.store(stats + part * 2, high, mask=used)
        tl.store(stats + part * 2 + 1, total, mask=used)


@triton.jit
def fold_stored(high, total, values, sums, stats, part, there, dim, DIM: tl.constexpr):
    """Fold in a stored state, if it is there."""
    within = tl.where(there, DIM, 0) > dim
    more_high = tl.load(stats + part * 2, mask=there, other=float("-inf"))
    more_total = tl.load(stats + part * 2 + 1, mask=there, other=0.0)
    more_values = tl.load(sums + part * DIM + dim, mask=within, other=0.0)
    return fold_one(high, total, values, more_high, more_total, more_values)


@triton.jit(do_not_specialize=["rows"])
def _merge(
    positions,
    prefix,
    tiles,
    sums,
    stats,
    tail_sums,
    tail_stats,
    out,
    rows,
    DIM: tl.constexpr,
    PADDED: tl.constexpr,
    HEADS: tl.constexpr,
    KEYS: tl.constexpr,
    CHUNK: tl.constexpr,
    WINDOW: tl.constexpr,
    TAILS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    q_row = row * HEADS + tl.program_id(1)
    release(OVERLAP)
    position = tl.load(positions + row)
    by_block = tl.load(tiles + 1) == 1
    shared_blocks = position // KEYS + 1
    if TAILS > 0:
        shared = tl.load(prefix + row)
        tail_blocks = tl.where(shared <= position, shared_blocks - shared // KEYS, 0)
        shared_blocks -= tail_blocks
    first_chunk = 0
    if WINDOW > 0:
        first_chunk = tl.maximum(position - WINDOW + 1, 0) // (KEYS * CHUNK)
    stride = tl.cast(rows, tl.int64) * HEADS
    dim = tl.arange(0, PADDED)
    wait(OVERLAP)
    high = tl.full((), float("-inf"), tl.float32)
    total = 0.0
    values = tl.zeros((PADDED,), tl.float32)
    end_chunk = position // (KEYS * CHUNK) + 1
    if by_block:
        for chunk in range(first_chunk, end_chunk):
            part_high = tl.full((), float("-inf"), tl.float32)
            part_total = 0.0
            part_values = tl.zeros((PADDED,), tl.float32)
            for nth in tl.static_range(CHUNK):
                unit = chunk * CHUNK + nth
                there = shared_blocks > unit
                part_high, part_total, part_values = fold_stored(
                    part_high, part_total, part_values, sums, stats, unit * stride + q_row, there, dim, DIM
                )
            for nth in tl.static_range(TAILS):
                there = tl.where(tail_blocks > nth, (shared_blocks + nth) // CHUNK, -1) == chunk
                part_high, part_total, part_values = fold_stored(
                    part_high, part_total, part_values, tail_sums, tail_stats, nth * stride + q_row, there, dim, DIM
                )
            high, total, values = fold_one(high, total, values, part_high, part_total, part_values)
    else:
        for chunk in tl.range(first_chunk, end_chunk, loop_unroll_factor=4):
            part_high = tl.full((), float("-inf"), tl.float32)
            part_total = 0.0
            part_values = tl.zeros((PADDED,), tl.float32)
            there = shared_blocks > chunk * CHUNK
            part_high, part_total, part_values = fold_stored(
                part_high, part_total, part_values, sums, stats, chunk * stride + q_row, there, dim, DIM
            )
            for nth in tl.static_range(TAILS):
                there = tl.where(tail_blocks > nth, (shared_blocks + nth) // CHUNK, -1) == chunk
                part_high, part_total, part_values = fold_stored(
                    part_high, part_total, part_values, tail_sums, tail_stats, nth * stride + q_row, there, dim, DIM
                )
            high, total, values = fold_one(high, total, values, part_high, part_total, part_values)
    tl.store(out + q_row * DIM + dim, (values / total).to(out.dtype.element_ty), mask=dim < DIM)
