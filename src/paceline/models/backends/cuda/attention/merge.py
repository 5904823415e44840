"""The states of a row's blocks or chunks, and of its tail, folded in order into the result of attention."""

from __future__ import annotations

import triton
import triton.language as tl

from paceline.models.backends.cuda.attention.states import chunk_of, first_of, joined, levels
from paceline.platform.launch import release, wait


@triton.jit
def stored(sums, stats, part, exists, dim, DIM: tl.constexpr):
    """Load a stored state, or the empty one."""
    high = tl.load(stats + part * 2, mask=exists, other=float("-inf"))
    total = tl.load(stats + part * 2 + 1, mask=exists, other=0.0)
    return high, total, tl.load(sums + part * DIM + dim, mask=tl.where(exists, DIM, 0) > dim, other=0.0)


@triton.jit
def fold_into(state, more):
    """Fold the softmax states of two disjoint sets of keys. An empty one (maximum -inf) changes no bit."""
    high, total, values = state
    more_high, more_total, more_values = more
    top, keep, add = levels(high, more_high)
    return top, tl.fma(total, keep, more_total * add), tl.fma(values, keep, more_values * add)


@triton.jit
def only_if(state, condition):
    high, total, values = state
    return tl.where(condition, high, float("-inf")), total, values


@triton.jit(do_not_specialize=["rows"])
def merge_states(
    positions, prefix, reach, shares, sums, stats, tail_sums, tail_stats, out, rows,
    DIM: tl.constexpr, PADDED: tl.constexpr, HEADS: tl.constexpr, KEYS: tl.constexpr, EARLY: tl.constexpr,
    CHUNK: tl.constexpr, WINDOW: tl.constexpr, TAILS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    q_row = row * HEADS + tl.program_id(1)
    release(OVERLAP)
    end = tl.load(reach + row)
    by_block = tl.load(shares + 1) == 1
    blocks = tl.cdiv(end, KEYS)
    shared_blocks = blocks
    if TAILS > 0:
        shared = tl.load(prefix + row)
        tail_blocks = tl.where(shared < end, blocks - shared // KEYS, 0)
        shared_blocks -= tail_blocks
    first_chunk = 0
    if WINDOW > 0:
        first_chunk = chunk_of(tl.maximum(tl.load(positions + row) - WINDOW + 1, 0) // KEYS, EARLY, CHUNK)
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
        for first in range(first_block // (2 * CHUNK) * (2 * CHUNK), blocks, 2 * CHUNK):
            states = ()
            for unit in tl.static_range(2 * CHUNK):  # all of them are loaded before the first is needed
                at = first + unit
                exists = tl.where(at >= first_block, shared_blocks, 0) > at
                states = joined(states, stored(sums, stats, at * stride + q_row, exists, dim, DIM))
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
        for first in range(first_chunk, chunk_of(blocks - 1, EARLY, CHUNK) + 1, 16):
            states = ()
            for nth in tl.static_range(16):
                exists = first_of(first + nth, EARLY, CHUNK) < shared_blocks
                states = joined(states, stored(sums, stats, (first + nth) * stride + q_row, exists, dim, DIM))
            for nth in tl.static_range(16):
                part = fold_into(empty, states[nth])
                for tail in tl.static_range(TAILS):
                    belongs = chunk_of(shared_blocks + tail, EARLY, CHUNK) == first + nth
                    part = fold_into(part, only_if(tails[tail], belongs))
                high, total, values = fold_into((high, total, values), part)
    tl.store(out + q_row * DIM + dim, (values / total).to(out.dtype.element_ty), mask=dim < DIM)
