"""Attention of tiles of rows over the keys that they read through a block table."""

from __future__ import annotations

import triton
import triton.language as tl

from paceline.models.backends.cuda.attention.states import (
    chunk_of,
    first_of,
    fold_tiles,
    levels,
    load_queries,
    nothing,
    one_block,
    store_states,
)
from paceline.platform.launch import release, wait


@triton.jit
def last_block(
    high, total, values, queries, block, last, end, position, table, k_cache, v_cache, kv_head, log2_scale,
    DIM: tl.constexpr, PADDED: tl.constexpr, PARTS: tl.constexpr, KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr, WINDOW: tl.constexpr, WIDE: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """Add a block of keys that some rows of the tile see in part."""
    key = block * KEYS + tl.arange(0, KEYS)
    exists = key < last
    page = tl.load(table + key // BLOCK_SIZE, mask=exists, other=0)
    if WIDE:
        page = page.to(tl.int64)
    at = (page * BLOCK_SIZE + key % BLOCK_SIZE) * (KV_HEADS * DIM) + kv_head * DIM
    visible = key[None, :] < end[:, None]
    if WINDOW > 0:
        visible = visible & (key[None, :] > position[:, None] - WINDOW)
    return one_block(
        high, total, values, queries, k_cache, v_cache, at, exists, visible, log2_scale, DIM, PADDED, PARTS, CAP
    )


@triton.jit
def walk(
    q_row, position, end, used, first_block, last, table, queries, k_cache, v_cache, out, kv_head, log2_scale,
    DIM: tl.constexpr, PADDED: tl.constexpr, PARTS: tl.constexpr, KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr, EARLY: tl.constexpr, CHUNK: tl.constexpr, WINDOW: tl.constexpr, WIDE: tl.constexpr,
    CAP: tl.constexpr,
):  # fmt: skip
    """Attend to all of a tile's context in one loop, states in registers: loads go on at the end of a chunk."""
    empty = nothing(used.shape[0], PADDED, PARTS)
    whole_high, whole_total, whole_values = empty
    high, total, values = empty
    for block in range(first_block, tl.cdiv(last, KEYS)):
        high, total, values = last_block(
            high, total, values, queries, block, last, end, position, table, k_cache, v_cache, kv_head, log2_scale,
            DIM, PADDED, PARTS, KV_HEADS, BLOCK_SIZE, KEYS, WINDOW, WIDE, CAP,
        )  # fmt: skip
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


@triton.jit(do_not_specialize=["rows", "num_shares"])
def attend_shared(
    q, k_cache, v_cache, positions, sequence, prefix, reach, tables, shares, sums, stats, out, log2_scale, rows,
    num_shares,
    TILE: tl.constexpr, DIRECT: tl.constexpr, FLAT: tl.constexpr, WIDE: tl.constexpr, LAST_STAGES: tl.constexpr,
    DIM: tl.constexpr, PADDED: tl.constexpr, GROUP: tl.constexpr, KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr, EARLY: tl.constexpr, CHUNK: tl.constexpr, WINDOW: tl.constexpr, TREE: tl.constexpr,
    PARTS: tl.constexpr, CAP: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    share = shares + 4 + tl.program_id(0) // KV_HEADS
    kv_head = tl.program_id(0) % KV_HEADS
    begin = tl.load(share)
    count = tl.load(share + num_shares)
    if count == 0:
        return
    turn = tl.load(share + 2 * num_shares)
    turns = tl.load(share + 3 * num_shares)
    table_width = tl.load(shares)
    by_block = False if DIRECT else tl.load(shares + 1) == 1
    lane = tl.arange(0, TILE)
    used = (lane // GROUP) < count
    row = (begin + lane // GROUP).to(tl.int64)
    end = tl.load(reach + row, mask=used, other=0)  # keys a row reads through the block table: all but its tail
    position = end - 1
    if WINDOW > 0:
        position = tl.load(positions + row, mask=used, other=-1)
    if TREE:
        shared = tl.load(prefix + row, mask=used, other=0)
        end = tl.where(shared < end, shared // KEYS * KEYS, end)
    last = tl.max(end)
    first_unit = 0
    if WINDOW > 0:
        start = tl.maximum(tl.min(tl.where(used, position - WINDOW + 1, 2147483647)), 0) // KEYS
        first_chunk = chunk_of(start, EARLY, CHUNK)
        first_unit = tl.where(by_block, first_of(first_chunk, EARLY, CHUNK), first_chunk)
    table = tables + tl.load(sequence + begin).to(tl.int64) * table_width
    heads = KV_HEADS * GROUP
    q_row = row * heads + kv_head * GROUP + lane % GROUP
    stride = tl.cast(rows, tl.int64) * heads
    num_blocks = tl.cdiv(last, KEYS)
    num_units = tl.where(by_block, num_blocks, chunk_of(num_blocks - 1, EARLY, CHUNK) + 1)
    wait(OVERLAP)
    queries = load_queries(q, q_row, used, DIM, PADDED, PARTS)
    full = tl.min(tl.where(used, end, 2147483647)) // KEYS  # blocks that all rows of the tile see whole
    if WINDOW > 0:
        full = 0
    release(OVERLAP)  # not earlier: programs of the next kernel would displace some of this one's
    if FLAT:
        walk(
            q_row, position, end, used, first_of(first_unit, EARLY, CHUNK), last, table, queries, k_cache, v_cache,
            out, kv_head, log2_scale,
            DIM, PADDED, PARTS, KV_HEADS, BLOCK_SIZE, KEYS, EARLY, CHUNK, WINDOW, WIDE, CAP,
        )  # fmt: skip
    else:
        whole_high = tl.full((TILE,), float("-inf"), tl.float32)
        whole_total = tl.zeros((TILE,), tl.float32)
        for nth in range(turn, num_units - first_unit, turns):
            unit = first_unit + nth if DIRECT else num_units - 1 - nth  # the long chunks first
            high, total, values = nothing(TILE, PADDED, PARTS)
            # Loaded again, so that the compiler does not keep all result addresses in registers.
            begin_again = tl.load(share, volatile=True)
            first_block = tl.where(by_block, unit, first_of(unit, EARLY, CHUNK))
            end_block = tl.where(by_block, unit + 1, tl.minimum(first_of(unit + 1, EARLY, CHUNK), num_blocks))
            for block in range(first_block, tl.minimum(end_block, full)):
                key = block * KEYS + tl.arange(0, KEYS)
                page = tl.load(table + key // BLOCK_SIZE)
                if WIDE:
                    page = page.to(tl.int64)
                at = (page * BLOCK_SIZE + key % BLOCK_SIZE) * (KV_HEADS * DIM) + kv_head * DIM
                high, total, values = one_block(
                    high, total, values, queries, k_cache, v_cache, at, None, None, log2_scale, DIM, PADDED, PARTS, CAP
                )
            for block in tl.range(tl.maximum(first_block, full), end_block, num_stages=LAST_STAGES):
                high, total, values = last_block(
                    high, total, values, queries, block, last, end, position, table, k_cache, v_cache, kv_head,
                    log2_scale, DIM, PADDED, PARTS, KV_HEADS, BLOCK_SIZE, KEYS, WINDOW, WIDE, CAP,
                )  # fmt: skip
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
