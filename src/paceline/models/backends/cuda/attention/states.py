"""Softmax states of a tile's rows in attention's kernels: (maximum, sum, weighted values) of the keys seen so far.

A block of keys gives a state of its own, and states of disjoint keys are folded into one by the arithmetic of `levels`.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def joined(several, one):
    return several + (one,)  # noqa: RUF005 (a kernel's tuples know no unpacking)


@triton.jit
def chunk_of(block, EARLY: tl.constexpr, CHUNK: tl.constexpr):
    return tl.where(block < EARLY, block // (CHUNK // 2), block // CHUNK + EARLY // CHUNK)


@triton.jit
def first_of(chunk, EARLY: tl.constexpr, CHUNK: tl.constexpr):
    """Return a chunk's first block."""
    return tl.where(chunk < 2 * EARLY // CHUNK, chunk * (CHUNK // 2), chunk * CHUNK - EARLY)


@triton.jit
def levels(high, more_high):
    """Return the maximum of two softmax states, and each state's factor relative to it."""
    top = tl.maximum(high, more_high)
    level = tl.where(top == float("-inf"), 0.0, top)
    return top, tl.exp2(high - level), tl.exp2(more_high - level)


@triton.jit
def one_block(
    high, total, values, queries, k_cache, v_cache, at, exists, visible, log2_scale,
    DIM: tl.constexpr, PADDED: tl.constexpr, PARTS: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """Fold one more block of keys into the states of a tile's rows.

    `at`: offsets of its keys in the cache; `exists`: whether they exist; `visible` (TILE, KEYS). The last two are None
    for a block that all rows see whole. Keys and values are taken in PARTS of their dimensions, to save registers."""
    width: tl.constexpr = PADDED // PARTS
    lane = tl.arange(0, width)
    place = at[:, None] + lane[None, :]
    scores = tl.zeros((high.shape[0], at.shape[0]), tl.float32)
    for part in tl.static_range(PARTS):
        k = load_part(k_cache + place + part * width, exists, part * width + lane, DIM, PADDED).to(queries[part].dtype)
        scores = tl.dot(queries[part], tl.trans(k), scores, input_precision="ieee")
    if CAP > 0:  # CAP tanh(score / CAP), of scores before they are scaled
        scores = CAP - 2.0 * CAP / (tl.exp(scores * (2.0 / CAP)) + 1.0)
    if visible is not None:
        scores = tl.where(visible, scores, float("-inf"))
    more_high = tl.max(scores, 1) * log2_scale
    weights = tl.exp2(tl.fma(scores, log2_scale, -tl.where(more_high == float("-inf"), 0.0, more_high)[:, None]))
    top, keep, add = levels(high, more_high)
    total = tl.fma(total, keep, tl.sum(weights, 1) * add)
    weights = weights.to(queries[0].dtype)
    folded = ()
    for part in tl.static_range(PARTS):
        v = load_part(v_cache + place + part * width, exists, part * width + lane, DIM, PADDED).to(weights.dtype)
        more = tl.dot(weights, v, input_precision="ieee")
        folded = joined(folded, tl.fma(values[part], keep[:, None], more * add[:, None]))
    return top, total, folded


@triton.jit
def load_part(places, exists, dim, DIM: tl.constexpr, PADDED: tl.constexpr):
    if exists is not None:
        part = tl.load(places, mask=exists[:, None] & (dim < DIM)[None, :], other=0.0)
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
    """Return the states of rows that have seen no key yet."""
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
    """Fold the states of two disjoint sets of keys, for every row of a tile."""
    top, keep, add = levels(high, more_high)
    folded = ()
    parts: tl.constexpr = len(values)
    for part in tl.static_range(parts):
        folded = joined(folded, tl.fma(values[part], keep[:, None], more_values[part] * add[:, None]))
    return top, tl.fma(total, keep, more_total * add), folded
