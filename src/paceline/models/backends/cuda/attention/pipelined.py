"""`attend_shared` in Gluon, Triton's language with explicit layouts and copies: for 16-bit dtypes on Hopper.

Its arithmetic and its order are those of `attend_shared`, and so are its bits. Beyond Triton's own pipelining, the next
block of keys and values is loaded while one is computed, in two buffers, which leaves room for two programs on a
multiprocessor (Triton's loops load after their products, so two buffers hide nothing there); and the next block may
belong to another unit.
"""

from __future__ import annotations

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from paceline.models.backends.cuda.attention.states import chunk_of, first_of, joined, levels
from paceline.platform.launch import release, wait

copy_async = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared  # its older name
WIDTH = gl.constexpr(64)  # dimensions of a value that one product takes, to spare registers


@gluon.jit
def places_of(
    table, block, last, kv_head,
    DIM: gl.constexpr, KV_HEADS: gl.constexpr, BLOCK_SIZE: gl.constexpr, KEYS: gl.constexpr, WIDE: gl.constexpr,
    LAYOUT: gl.constexpr,
):  # fmt: skip
    """Compute the offsets of a block's keys in the cache, and a mask of the keys that exist."""
    key = block * KEYS + gl.arange(0, KEYS, layout=gl.SliceLayout(1, LAYOUT))
    page = gl.load(table + key // BLOCK_SIZE, mask=key < last, other=0)
    if WIDE:
        page = page.to(gl.int64)
    return (page * BLOCK_SIZE + key % BLOCK_SIZE) * (KV_HEADS * DIM) + kv_head * DIM, key < last


@gluon.jit
def start_copy(buffer, cache, at, exists, DIM: gl.constexpr, LAYOUT: gl.constexpr):
    dim = gl.arange(0, DIM, layout=gl.SliceLayout(0, LAYOUT))
    copy_async(buffer, cache + (at[:, None] + dim[None, :]), mask=exists[:, None])


@gluon.jit
def ends_of(
    prefix, reach, begin, count,
    TILE: gl.constexpr, GROUP: gl.constexpr, KEYS: gl.constexpr, TREE: gl.constexpr, ROW: gl.constexpr,
):  # fmt: skip
    """Count the keys that each row reads through the block table: all but its tail blocks."""
    lane = gl.arange(0, TILE, layout=ROW)
    used = (lane // GROUP) < count
    row = begin + lane // GROUP
    end = gl.load(reach + row, mask=used, other=0)
    if TREE:
        shared = gl.load(prefix + row, mask=used, other=0)
        end = gl.where(shared < end, shared // KEYS * KEYS, end)
    return end


@gluon.jit
def span_of(nth, num_units, num_blocks, by_block, EARLY: gl.constexpr, CHUNK: gl.constexpr):
    """Return (unit, its first block, the block behind its last) of the nth turn; short units come last."""
    short = gl.where(num_blocks - first_of(num_units - 1, EARLY, CHUNK) < CHUNK // 2, 1, 0)
    unit = (2 * num_units - 1 - nth - short) % num_units
    first = gl.where(by_block, unit, first_of(unit, EARLY, CHUNK))
    end = gl.minimum(gl.where(by_block, unit + 1, first_of(unit + 1, EARLY, CHUNK)), num_blocks)
    dealt = nth < num_units
    return unit, gl.where(dealt, first, num_blocks), gl.where(dealt, end, num_blocks)


@gluon.jit(do_not_specialize=["rows", "num_shares"])
def attend_pipelined(
    q, k_cache, v_cache, sequence, prefix, reach, tables, shares, sums, stats, log2_scale, rows, num_shares,
    TILE: gl.constexpr, WIDE: gl.constexpr, DIM: gl.constexpr, GROUP: gl.constexpr, KV_HEADS: gl.constexpr,
    BLOCK_SIZE: gl.constexpr, KEYS: gl.constexpr, EARLY: gl.constexpr, CHUNK: gl.constexpr, TREE: gl.constexpr,
    OVERLAP: gl.constexpr,
):  # fmt: skip
    WARPS: gl.constexpr = TILE // 16
    PARTS: gl.constexpr = DIM // WIDTH
    HEADS: gl.constexpr = KV_HEADS * GROUP
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, 64, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, MMA)
    COLUMN: gl.constexpr = gl.SliceLayout(0, MMA)
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DIM, DIM // 8], [WARPS, 1], [1, 0])
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    share = shares + 4 + gl.program_id(0) // KV_HEADS
    kv_head = gl.program_id(0) % KV_HEADS
    begin = gl.load(share)
    count = gl.load(share + num_shares)
    if count == 0:
        return
    turn = gl.load(share + 2 * num_shares)
    turns = gl.load(share + 3 * num_shares)
    table_width = gl.load(shares)
    by_block = gl.load(shares + 1) == 1
    end = ends_of(prefix, reach, begin, count, TILE, GROUP, KEYS, TREE, ROW)
    used = (gl.arange(0, TILE, layout=ROW) // GROUP) < count
    last = gl.max(end, 0)
    full = gl.min(gl.where(used, end, 2147483647), 0) // KEYS  # blocks that all rows of the tile see whole
    table = tables + gl.load(sequence + begin).to(gl.int64) * table_width
    num_blocks = gl.cdiv(last, KEYS)
    num_units = gl.maximum(gl.where(by_block, num_blocks, chunk_of(num_blocks - 1, EARLY, CHUNK) + 1), 1)
    unit, block, unit_end = span_of(turn, num_units, num_blocks, by_block, EARLY, CHUNK)
    at, exists = places_of(table, block, last, kv_head, DIM, KV_HEADS, BLOCK_SIZE, KEYS, WIDE, COPY)
    queries = gl.allocate_shared_memory(q.dtype.element_ty, [TILE, DIM], SHARED)
    keys = gl.allocate_shared_memory(q.dtype.element_ty, [2, KEYS, DIM], SHARED)
    values = gl.allocate_shared_memory(q.dtype.element_ty, [2, KEYS, DIM], SHARED)
    q_lane = gl.arange(0, TILE, layout=gl.SliceLayout(1, COPY))
    q_row = (begin + q_lane // GROUP).to(gl.int64) * HEADS + kv_head * GROUP + q_lane % GROUP
    q_dim = gl.arange(0, DIM, layout=gl.SliceLayout(0, COPY))
    wait(OVERLAP)
    start_copy(keys.index(0), k_cache, at, exists, DIM, COPY)
    start_copy(values.index(0), v_cache, at, exists, DIM, COPY)
    async_copy.commit_group()
    q_there = ((q_lane // GROUP) < count)[:, None]
    queries.store(gl.load(q + q_row[:, None] * DIM + q_dim[None, :], mask=q_there, other=0.0))
    fence_async_shared()
    release(OVERLAP)  # not earlier: programs of the next kernel would displace some of this one's
    nothing = gl.full([TILE, KEYS], 0.0, gl.float32, layout=MMA)
    step = 0
    for first_nth in range(0, num_units, turns):
        has_keys = unit_end > block
        # Assigned in alternating order, so that a program with a long chunk in one round has a short one in the next.
        next_turn = gl.where(first_nth // turns % 2 == 0, turns - 1 - turn, turn)
        next_unit, next_block, next_end = span_of(
            first_nth + turns + next_turn, num_units, num_blocks, by_block, EARLY, CHUNK
        )
        high = gl.full([TILE], float("-inf"), gl.float32, layout=ROW)
        total = gl.full([TILE], 0.0, gl.float32, layout=ROW)
        folded = ()
        for _ in gl.static_range(PARTS):
            folded = joined(folded, gl.full([TILE, WIDTH], 0.0, gl.float32, layout=MMA))
        for now in range(block, unit_end):
            follow = gl.where(now + 1 < unit_end, now + 1, next_block)
            at, exists = places_of(table, follow, last, kv_head, DIM, KV_HEADS, BLOCK_SIZE, KEYS, WIDE, COPY)
            async_copy.wait_group(0)
            fence_async_shared()  # the products read what these copies wrote through another path to shared memory
            held = step % 2
            scores = warpgroup_mma(queries, keys.index(held).permute((1, 0)), nothing, use_acc=False, is_async=True)
            start_copy(keys.index(1 - held), k_cache, at, exists, DIM, COPY)
            start_copy(values.index(1 - held), v_cache, at, exists, DIM, COPY)
            async_copy.commit_group()
            scores = warpgroup_mma_wait(0, deps=(scores,))
            if now >= full:
                begin_again = gl.load(share, volatile=True)  # loaded again, to save registers
                end = ends_of(prefix, reach, begin_again, count, TILE, GROUP, KEYS, TREE, ROW)
                key = now * KEYS + gl.arange(0, KEYS, layout=COLUMN)
                scores = gl.where(key[None, :] < end[:, None], scores, float("-inf"))
            more_high = gl.max(scores, 1) * log2_scale
            level = gl.where(more_high == float("-inf"), 0.0, more_high)
            weights = gl.exp2(gl.fma(scores, log2_scale, -level[:, None]))
            high, keep, add = levels(high, more_high)
            total = gl.fma(total, keep, gl.sum(weights, 1) * add)
            weights = gl.convert_layout(weights.to(q.dtype.element_ty), gl.DotOperandLayout(0, MMA, 2))
            before = folded
            folded = ()
            for part in gl.static_range(PARTS):
                v = values.index(held).slice(part * WIDTH, WIDTH, dim=1)
                more = warpgroup_mma(weights, v, nothing, use_acc=False, is_async=True)
                more = warpgroup_mma_wait(0, deps=(more,))
                folded = joined(folded, gl.fma(before[part], keep[:, None], more * add[:, None]))
            step += 1
        lane = gl.arange(0, TILE, layout=ROW)
        stored = (lane // GROUP) < gl.where(has_keys, count, 0)
        begin_again = gl.load(share, volatile=True)
        row = (begin_again + lane // GROUP).to(gl.int64) * HEADS + kv_head * GROUP + lane % GROUP
        row += unit * (gl.cast(rows, gl.int64) * HEADS)
        dim = gl.arange(0, WIDTH, layout=COLUMN)
        for part in gl.static_range(PARTS):
            gl.store(sums + row[:, None] * DIM + (part * WIDTH + dim)[None, :], folded[part], mask=stored[:, None])
        gl.store(stats + row * 2, high, mask=stored)
        gl.store(stats + row * 2 + 1, total, mask=stored)
        unit, block, unit_end = next_unit, next_block, next_end
    async_copy.wait_group(0)
