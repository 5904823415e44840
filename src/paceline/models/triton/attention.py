"""Paged attention for prefill chunks, decodes and token trees in one batch, with one order of summation.

A row sees the logical positions 0..t. They are cut into blocks of 64 keys, blocks into chunks of 8 (of 4 early in the
context, so that a short one fills the chip too). Every block gives a softmax of its own (maximum, sum, weighted
values); blocks are folded in order into their chunk, chunks in order into the result, always by the same arithmetic. So
a row's bits are a function of t and of what it sees alone, while the work can be cut where it suits the batch: a
program may take a block, a chunk or everything.

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
from paceline.models.triton.launch import overlapped, release, unfused, wait

KEYS = 64  # of a block
EARLY = 16  # blocks, in chunks of half the size
CHUNK = 8  # blocks
SPLIT_BLOCKS = 40  # a pass of no more blocks than this, over all its tiles of 64 rows, is cut block by block
PROGRAMS = 512  # about four for every multiprocessor
MOST_SPLITS = 68
NARROW = 16  # q rows of a tile where every sequence has one token: more of them are cut block by block
TILE = 64
WIDE_FROM = 64  # q rows of a sequence: more take tiles of twice as many
MOST_INT = (1 << 31) - 1  # elements of a cache addressed with 32 bits
HEADER = 4  # ints before the tiles: width of the block tables, whether a unit is a block, most units of a tile


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
        units = 1 if direct else max(chunks_of(blocks), min(blocks, SPLIT_BLOCKS // max(num_tiles * tile // 64, 1)))
        tails = -(-(KEYS - 1 + path_width) // KEYS) if path_width else 0
        splits = 1 if direct else max(min(PROGRAMS // max(num_tiles * kv_heads, 1), MOST_SPLITS), 1)
        return Division(tile, num_tiles, direct, units, tails, splits)

    def header(self, max_len: int, table_width: int) -> list[int]:
        """What the kernels read of a pass beside its tiles: HEADER ints."""
        blocks = -(-max_len // KEYS)
        by_block = blocks * self.num_tiles * self.tile // 64 <= SPLIT_BLOCKS
        return [table_width, int(by_block), blocks if by_block else chunks_of(blocks), 0]


def chunks_of(blocks: int) -> int:
    """Of as many blocks: how many chunks."""
    half = CHUNK // 2
    return -(-min(blocks, EARLY) // half) + -(-max(blocks - EARLY, 0) // CHUNK)


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
    longest = int(lengths.max(initial=0))
    tile = TILE if longest * group <= WIDE_FROM else 2 * TILE
    if longest == 1 < len(lengths) and group <= NARROW:
        tile = NARROW
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
    tile = max(division.tile, TILE)
    light = padded * q.element_size() <= 256
    flat, wide = division.direct and tile == TILE and light, tile > TILE and light
    stages = 2 if padded * q.element_size() <= 512 else 1
    if flat and padded > 64:
        stages = 3  # the third is the block table's
    shape = {
        "DIM": dim,
        "PADDED": padded,
        "GROUP": q_heads // kv_heads,
        "KV_HEADS": kv_heads,
        "BLOCK_SIZE": plan.block_size,
        "KEYS": KEYS,
        "EARLY": EARLY,
        "CHUNK": CHUNK,
        "WINDOW": window or 0,
        "TREE": division.tails > 0,
        "PARTS": 2 if padded >= 32 else 1,
        **overlapped(overlap),
        **unfused(),
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
        TILE=tile,
        DIRECT=division.direct,
        FLAT=flat,
        WIDE=cache.k.numel() > MOST_INT,
        LAST_STAGES=stages if wide else 1,
        num_warps=tile // 16,
        num_stages=stages,
        maxnreg=128 if wide else None,  # so that two programs share a multiprocessor
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
        EARLY=EARLY,
        CHUNK=CHUNK,
        WINDOW=window or 0,
        TAILS=division.tails,
        num_warps=1,
        **overlapped(overlap),
        **unfused(),
    )
    return out


@triton.jit
def joined(several, one):
    return several + (one,)  # noqa: RUF005 (a kernel's tuples know no unpacking)


@triton.jit
def chunk_of(block, EARLY: tl.constexpr, CHUNK: tl.constexpr):
    return tl.where(block < EARLY, block // (CHUNK // 2), block // CHUNK + EARLY // CHUNK)


@triton.jit
def first_of(chunk, EARLY: tl.constexpr, CHUNK: tl.constexpr):
    """A chunk's first block."""
    return tl.where(chunk < 2 * EARLY // CHUNK, chunk * (CHUNK // 2), chunk * CHUNK - EARLY)


@triton.jit
def levels(high, more_high):
    """Of two softmax states: their maximum, and what each is multiplied with under it."""
    top = tl.maximum(high, more_high)
    level = tl.where(top == float("-inf"), 0.0, top)
    return top, tl.exp2(high - level), tl.exp2(more_high - level)


@triton.jit
def one_block(
    high,
    total,
    values,
    queries,
    k_cache,
    v_cache,
    at,
    there,
    visible,
    log2_scale,
    DIM: tl.constexpr,
    PADDED: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Fold one more block of keys into the states of a tile's rows.

    `at`: where its keys begin in the cache; `there`: whether they exist; `visible` (TILE, KEYS). These may be None for
    a block all rows see all of. Keys and values are taken in PARTS of their dimensions, to spare registers.
    """
    width: tl.constexpr = PADDED // PARTS
    lane = tl.arange(0, width)
    place = at[:, None] + lane[None, :]
    scores = tl.zeros((high.shape[0], at.shape[0]), tl.float32)
    for part in tl.static_range(PARTS):
        k = load_part(k_cache + place + part * width, there, part * width + lane, DIM, PADDED)
        scores = tl.dot(queries[part], tl.trans(k), scores, input_precision="ieee")
    if visible is not None:
        scores = tl.where(visible, scores, float("-inf"))
    more_high = tl.max(scores, 1) * log2_scale
    weights = tl.exp2(tl.fma(scores, log2_scale, -tl.where(more_high == float("-inf"), 0.0, more_high)[:, None]))
    top, keep, add = levels(high, more_high)
    total = tl.fma(total, keep, tl.sum(weights, 1) * add)
    weights = weights.to(queries[0].dtype)
    folded = ()
    for part in tl.static_range(PARTS):
        v = load_part(v_cache + place + part * width, there, part * width + lane, DIM, PADDED)
        more = tl.dot(weights, v, input_precision="ieee")
        folded = joined(folded, tl.fma(values[part], keep[:, None], more * add[:, None]))
    return top, total, folded


@triton.jit
def load_part(places, there, dim, DIM: tl.constexpr, PADDED: tl.constexpr):
    if there is not None:
        part = tl.load(places, mask=there[:, None] & (dim < DIM)[None, :], other=0.0)
    elif DIM < PADDED:
        part = tl.load(places, mask=(dim < DIM)[None, :], other=0.0)
    else:
        part = tl.load(places)
    return part


@triton.jit
def load_queries(q, q_row, used, DIM: tl.constexpr, PADDED: tl.constexpr, PARTS: tl.constexpr):
    queries = ()
    for part in tl.static_range(PARTS):
        dim = part * (PADDED // PARTS) + tl.arange(0, PADDED // PARTS)
        queries = joined(queries, load_part(q + q_row[:, None] * DIM + dim[None, :], used, dim, DIM, PADDED))
    return queries


@triton.jit
def nothing(TILE: tl.constexpr, PADDED: tl.constexpr, PARTS: tl.constexpr):
    """The states of rows that have seen no key yet."""
    values = ()
    for _ in tl.static_range(PARTS):
        values = joined(values, tl.zeros((TILE, PADDED // PARTS), tl.float32))
    return tl.full((TILE,), float("-inf"), tl.float32), tl.zeros((TILE,), tl.float32), values


@triton.jit
def store_states(sums, stats, part_row, used, high, total, values, DIM: tl.constexpr, PADDED: tl.constexpr):
    parts: tl.constexpr = len(values)
    for part in tl.static_range(parts):
        dim = part * (PADDED // parts) + tl.arange(0, PADDED // parts)
        place = sums + part_row[:, None] * DIM + dim[None, :]
        tl.store(place, values[part], mask=used[:, None] & (dim < DIM)[None, :])
    tl.store(stats + part_row * 2, high, mask=used)
    tl.store(stats + part_row * 2 + 1, total, mask=used)


@triton.jit
def fold_tiles(high, total, values, more_high, more_total, more_values):
    """Of every row of a tile: the states of two disjoint sets of keys as one."""
    top, keep, add = levels(high, more_high)
    folded = ()
    parts: tl.constexpr = len(values)
    for part in tl.static_range(parts):
        folded = joined(folded, tl.fma(values[part], keep[:, None], more_values[part] * add[:, None]))
    return top, tl.fma(total, keep, more_total * add), folded


@triton.jit
def walk(
    q_row,
    position,
    end,
    used,
    first_block,
    last,
    table,
    queries,
    k_cache,
    v_cache,
    out,
    kv_head,
    log2_scale,
    DIM: tl.constexpr,
    PADDED: tl.constexpr,
    PARTS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr,
    EARLY: tl.constexpr,
    CHUNK: tl.constexpr,
    WINDOW: tl.constexpr,
    WIDE: tl.constexpr,
):
    """All of a tile's context in one loop, states in registers: loads never pause where a chunk ends."""
    empty = nothing(used.shape[0], PADDED, PARTS)
    whole_high, whole_total, whole_values = empty
    high, total, values = empty
    for block in range(first_block, tl.cdiv(last, KEYS)):
        key = block * KEYS + tl.arange(0, KEYS)
        there = key < last
        page = tl.load(table + key // BLOCK_SIZE, mask=there, other=0)
        if WIDE:
            page = page.to(tl.int64)
        at = (page * BLOCK_SIZE + key % BLOCK_SIZE) * (KV_HEADS * DIM) + kv_head * DIM
        visible = key[None, :] < end[:, None]
        if WINDOW > 0:
            visible = visible & (key[None, :] > position[:, None] - WINDOW)
        high, total, values = one_block(
            high, total, values, queries, k_cache, v_cache, at, there, visible, log2_scale, DIM, PADDED, PARTS
        )
        if first_of(chunk_of(block, EARLY, CHUNK) + 1, EARLY, CHUNK) == block + 1:
            whole_high, whole_total, whole_values = fold_tiles(
                whole_high, whole_total, whole_values, high, total, values
            )
            high, total, values = empty
    whole_high, whole_total, whole_values = fold_tiles(whole_high, whole_total, whole_values, high, total, values)
    for part in tl.static_range(PARTS):
        at_dim = part * (PADDED // PARTS) + tl.arange(0, PADDED // PARTS)
        place = out + q_row[:, None] * DIM + at_dim[None, :]
        result = (whole_values[part] / whole_total[:, None]).to(out.dtype.element_ty)
        tl.store(place, result, mask=used[:, None] & (at_dim < DIM)[None, :])


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
    FLAT: tl.constexpr,
    WIDE: tl.constexpr,
    LAST_STAGES: tl.constexpr,
    DIM: tl.constexpr,
    PADDED: tl.constexpr,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr,
    EARLY: tl.constexpr,
    CHUNK: tl.constexpr,
    WINDOW: tl.constexpr,
    TREE: tl.constexpr,
    PARTS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if tl.program_id(1) >= tl.load(tiles + 2):
        return
    tile = tl.program_id(0) // KV_HEADS
    kv_head = tl.program_id(0) % KV_HEADS
    table_width = tl.load(tiles)
    by_block = False if DIRECT else tl.load(tiles + 1) == 1
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
    first_unit = 0
    if WINDOW > 0:
        start = tl.maximum(tl.min(tl.where(used, position - WINDOW + 1, 2147483647)), 0) // KEYS
        first_chunk = chunk_of(start, EARLY, CHUNK)
        first_unit = tl.where(by_block, first_of(first_chunk, EARLY, CHUNK), first_chunk)
    table = tables + tl.load(sequence + begin, mask=count > 0, other=0).to(tl.int64) * table_width
    heads = KV_HEADS * GROUP
    q_row = row * heads + kv_head * GROUP + lane % GROUP
    stride = tl.cast(rows, tl.int64) * heads
    num_blocks = tl.cdiv(last, KEYS)
    num_units = tl.where(by_block, num_blocks, chunk_of(num_blocks - 1, EARLY, CHUNK) + 1)
    wait(OVERLAP)
    queries = load_queries(q, q_row, used, DIM, PADDED, PARTS)
    full = tl.min(tl.where(used, end, 2147483647)) // KEYS  # blocks all rows of the tile see all of
    if WINDOW > 0:
        full = 0
    release(OVERLAP)  # not before: programs of the next kernel would take the place of some of this one's
    if FLAT:
        walk(
            q_row,
            position,
            end,
            used,
            first_of(first_unit, EARLY, CHUNK),
            last,
            table,
            queries,
            k_cache,
            v_cache,
            out,
            kv_head,
            log2_scale,
            DIM,
            PADDED,
            PARTS,
            KV_HEADS,
            BLOCK_SIZE,
            KEYS,
            EARLY,
            CHUNK,
            WINDOW,
            WIDE,
        )
    else:
        whole_high = tl.full((TILE,), float("-inf"), tl.float32)
        whole_total = tl.zeros((TILE,), tl.float32)
        for nth in range(tl.program_id(1), num_units - first_unit, tl.num_programs(1)):
            unit = first_unit + nth if DIRECT else num_units - 1 - nth  # the long chunks first
            high, total, values = nothing(TILE, PADDED, PARTS)
            # Read again, so that the compiler does not keep every address of the results in registers meanwhile.
            begin_again = tl.load(tiles + 4 + tile, volatile=True)
            first_block = tl.where(by_block, unit, first_of(unit, EARLY, CHUNK))
            end_block = tl.where(by_block, unit + 1, tl.minimum(first_of(unit + 1, EARLY, CHUNK), num_blocks))
            for block in range(first_block, tl.minimum(end_block, full)):
                key = block * KEYS + tl.arange(0, KEYS)
                page = tl.load(table + key // BLOCK_SIZE)
                if WIDE:
                    page = page.to(tl.int64)
                at = (page * BLOCK_SIZE + key % BLOCK_SIZE) * (KV_HEADS * DIM) + kv_head * DIM
                high, total, values = one_block(
                    high, total, values, queries, k_cache, v_cache, at, None, None, log2_scale, DIM, PADDED, PARTS
                )
            for block in tl.range(tl.maximum(first_block, full), end_block, num_stages=LAST_STAGES):
                key = block * KEYS + tl.arange(0, KEYS)
                there = key < last
                page = tl.load(table + key // BLOCK_SIZE, mask=there, other=0)
                if WIDE:
                    page = page.to(tl.int64)
                at = (page * BLOCK_SIZE + key % BLOCK_SIZE) * (KV_HEADS * DIM) + kv_head * DIM
                visible = key[None, :] < end[:, None]
                if WINDOW > 0:
                    visible = visible & (key[None, :] > position[:, None] - WINDOW)
                high, total, values = one_block(
                    high, total, values, queries, k_cache, v_cache, at, there, visible, log2_scale, DIM, PADDED, PARTS
                )
            if DIRECT:
                one = num_units <= first_unit + 1
                top, keep, add = levels(whole_high, high)
                whole_total = tl.where(one, total, tl.fma(whole_total, keep, total * add))
                whole_high = top
                for part in tl.static_range(PARTS):
                    at_dim = part * (PADDED // PARTS) + tl.arange(0, PADDED // PARTS)
                    place = sums + q_row[:, None] * DIM + at_dim[None, :]
                    mask = used[:, None] & (at_dim < DIM)[None, :]
                    result = values[part]
                    if not one:
                        again = mask & (tl.where(unit > first_unit, DIM, 0) > at_dim)[None, :]
                        before = tl.load(place, mask=again, other=0.0)
                        result = tl.fma(before, keep[:, None], result * add[:, None])
                        if unit < num_units - 1:
                            tl.store(place, result, mask=mask)
                    if unit == num_units - 1:
                        result = result / whole_total[:, None]
                        tl.store(
                            out + q_row[:, None] * DIM + at_dim[None, :], result.to(out.dtype.element_ty), mask=mask
                        )
                tl.debug_barrier()
            else:
                row = (begin_again + lane // GROUP).to(tl.int64)
                part_row = unit * stride + row * heads + kv_head * GROUP + lane % GROUP
                store_states(sums, stats, part_row, used, high, total, values, DIM, PADDED)


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
    EARLY: tl.constexpr,
    CHUNK: tl.constexpr,
    WINDOW: tl.constexpr,
    TREE: tl.constexpr,
    PARTS: tl.constexpr,
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
        heads = KV_HEADS * GROUP
        q_row = row * heads + kv_head * GROUP + lane
        queries = load_queries(q, q_row, used, DIM, PADDED, PARTS)
        visible = used[:, None] & there[None, :]
        if WINDOW > 0:
            visible = visible & (key > position - WINDOW)[None, :]
        at = slot * (KV_HEADS * DIM) + kv_head * DIM
        high, total, values = nothing(TILE, PADDED, PARTS)
        high, total, values = one_block(
            high, total, values, queries, k_cache, v_cache, at, there, visible, log2_scale, DIM, PADDED, PARTS
        )
        part_row = nth * tl.cast(rows, tl.int64) * heads + q_row
        store_states(sums, stats, part_row, used, high, total, values, DIM, PADDED)


@triton.jit
def stored(sums, stats, part, there, dim, DIM: tl.constexpr):
    """A stored state, or the empty one."""
    high = tl.load(stats + part * 2, mask=there, other=float("-inf"))
    total = tl.load(stats + part * 2 + 1, mask=there, other=0.0)
    return high, total, tl.load(sums + part * DIM + dim, mask=tl.where(there, DIM, 0) > dim, other=0.0)


@triton.jit
def fold_into(state, more):
    """Softmax states of two disjoint sets of keys as one. An empty one (maximum -inf) changes nothing, not a bit."""
    high, total, values = state
    more_high, more_total, more_values = more
    top, keep, add = levels(high, more_high)
    return top, tl.fma(total, keep, more_total * add), tl.fma(values, keep, more_values * add)


@triton.jit
def only_if(state, condition):
    high, total, values = state
    return tl.where(condition, high, float("-inf")), total, values


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
    EARLY: tl.constexpr,
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
        first_chunk = chunk_of(tl.maximum(position - WINDOW + 1, 0) // KEYS, EARLY, CHUNK)
    stride = tl.cast(rows, tl.int64) * HEADS
    dim = tl.arange(0, PADDED)
    wait(OVERLAP)
    empty = tl.full((), float("-inf"), tl.float32), tl.full((), 0.0, tl.float32), tl.zeros((PADDED,), tl.float32)
    high, total, values = empty
    tails = ()
    for tail in tl.static_range(TAILS):
        tails = joined(tails, stored(tail_sums, tail_stats, tail * stride + q_row, tail < tail_blocks, dim, DIM))
    if by_block:
        HALF: tl.constexpr = CHUNK // 2
        first_block = first_of(first_chunk, EARLY, CHUNK)
        part = empty
        for first in range(first_block // (2 * CHUNK) * (2 * CHUNK), position // KEYS + 1, 2 * CHUNK):
            states = ()
            for unit in tl.static_range(2 * CHUNK):  # all of them are loaded before the first is needed
                at = first + unit
                there = tl.where(at >= first_block, shared_blocks, 0) > at
                states = joined(states, stored(sums, stats, at * stride + q_row, there, dim, DIM))
            for half in tl.static_range(4):
                if half % 2 == 0 or first < EARLY:  # a chunk begins
                    high, total, values = fold_into((high, total, values), part)
                    part = empty
                for unit in tl.static_range(HALF):
                    part = fold_into(part, states[half * HALF + unit])
                for tail in tl.static_range(TAILS):
                    part = fold_into(part, only_if(tails[tail], (shared_blocks + tail) // HALF == first // HALF + half))
        high, total, values = fold_into((high, total, values), part)
    else:
        for first in range(first_chunk, chunk_of(position // KEYS, EARLY, CHUNK) + 1, 16):
            states = ()
            for nth in tl.static_range(16):
                there = first_of(first + nth, EARLY, CHUNK) < shared_blocks
                states = joined(states, stored(sums, stats, (first + nth) * stride + q_row, there, dim, DIM))
            for nth in tl.static_range(16):
                part = fold_into(empty, states[nth])
                for tail in tl.static_range(TAILS):
                    mine = chunk_of(shared_blocks + tail, EARLY, CHUNK) == first + nth
                    part = fold_into(part, only_if(tails[tail], mine))
                high, total, values = fold_into((high, total, values), part)
    tl.store(out + q_row * DIM + dim, (values / total).to(out.dtype.element_ty), mask=dim < DIM)
