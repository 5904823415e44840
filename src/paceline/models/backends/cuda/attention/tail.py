"""Attention of tree nodes over the last blocks of their contexts, which hold their own ancestors."""

from __future__ import annotations

import triton
import triton.language as tl

from paceline.models.backends.cuda.attention.states import load_queries, nothing, one_block, store_states
from paceline.platform.launch import release, wait


@triton.jit(do_not_specialize=["rows", "path_width"])
def attend_tail(
    q, k_cache, v_cache, positions, sequence, prefix, reach, path, tables, shares, sums, stats, log2_scale, rows,
    path_width,
    TILE: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr, GROUP: tl.constexpr, KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, KEYS: tl.constexpr, WINDOW: tl.constexpr, PARTS: tl.constexpr, CAP: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    nth = tl.program_id(2)
    release(OVERLAP)
    shared = tl.load(prefix + row)
    end = tl.load(reach + row)
    block = shared // KEYS + nth
    key = block * KEYS + tl.arange(0, KEYS)
    exists = tl.where(shared < end, end, 0) > key  # the row is a tree node, and the key one it sees
    table = tables + tl.load(sequence + row).to(tl.int64) * tl.load(shares)
    page = tl.load(table + key // BLOCK_SIZE, mask=exists & (key < shared), other=0).to(tl.int64)
    own = tl.load(path + row * path_width + key - shared, mask=exists & (key >= shared), other=0).to(tl.int64)
    slot = tl.where(key < shared, page * BLOCK_SIZE + key % BLOCK_SIZE, own)
    wait(OVERLAP)
    if (block * KEYS < end) & (shared < end):
        lane = tl.arange(0, TILE)
        used = lane < GROUP
        heads = KV_HEADS * GROUP
        q_row = row * heads + kv_head * GROUP + lane
        queries = load_queries(q, q_row, used, DIM, PADDED, PARTS)
        visible = used[:, None] & exists[None, :]
        if WINDOW > 0:
            visible = visible & (key > tl.load(positions + row) - WINDOW)[None, :]
        at = slot * (KV_HEADS * DIM) + kv_head * DIM
        high, total, values = nothing(TILE, PADDED, PARTS)
        high, total, values = one_block(
            high, total, values, queries, k_cache, v_cache, at, exists, visible, log2_scale, DIM, PADDED, PARTS, CAP
        )
        part_row = nth * tl.cast(rows, tl.int64) * heads + q_row
        store_states(sums, stats, part_row, used, high, total, values, DIM, PADDED)
