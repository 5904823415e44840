"""A small model's greedy continuation, token after token, in one launch.

At one row a pass over a small model is some 270 kernels of two microseconds each, while reading its weights would take
a tenth of that. Here one persistent program runs on every multiprocessor: it computes its share of the columns of every
product, passes them to the other programs through memory and goes on to the next stage. Meanwhile the weights of the
next layer are loaded into registers.

Every number is written as one 8-byte word with the tag of its layer, and a program that needs it polls until the tag is
there: a stage waits for one round trip through memory. A word is overwritten a whole layer later, and no program gets
there before all others have read it, since every stage needs, directly or through the stages between, all that the
stage before wrote. Waiting is bounded: a program that has polled too often sets `state[0]`, and all programs return.

Sums are split differently than in a pass by the other kernels, so bits differ: fit for drafts, which are verified.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOOKS = 1 << 20  # polls of a word before giving up: some tenths of a second
GLANCE = 1024  # polls between two checks whether other programs gave up
STATE = 32  # ints before the tokens; [0]: a program gave up
UNIT = tl.constexpr(128)  # pairs of columns a warp multiplies at a time


@triton.constexpr_function
def look_asm(arrays: int, pack: int) -> str:
    """Spin until `pack` words of each array carry the tag or a later one; their values."""
    words = arrays * pack
    tag, state = 2 * words, 2 * words + pack
    lines = [".reg .pred p;", ".reg .b32 n, f;", f".reg .b32 t<{words}>;", f".reg .b64 d<{words}>;", "mov.u32 n, 0;"]
    lines += ["AGAIN:"]
    lines += [f"ld.relaxed.gpu.global.b64 d{i}, [${words + i}];" for i in range(words)]
    for i in range(words):
        lines += [f"mov.b64 {{${i}, t{i}}}, d{i};", f"sub.s32 t{i}, t{i}, ${tag + i % pack};"]
    lines += [f"or.b32 t0, t0, t{i};" for i in range(1, words)]
    lines += [
        "setp.ge.s32 p, t0, 0;",
        "@p bra DONE;",
        "add.u32 n, n, 1;",
        f"and.b32 f, n, {GLANCE - 1};",
        "setp.ne.u32 p, f, 0;",
        "@p bra AGAIN;",
        f"ld.relaxed.gpu.global.b32 f, [${state}];",
        "setp.ne.u32 p, f, 0;",
        "@p bra DONE;",
        f"setp.lt.u32 p, n, {LOOKS};",
        "@p bra AGAIN;",
        "mov.u32 f, 1;",
        f"st.relaxed.gpu.global.b32 [${state}], f;",
        "DONE:",
    ]
    return "{\n" + "\n".join(lines) + "\n}"


@triton.constexpr_function
def look_registers(arrays: int, pack: int) -> str:
    return ",".join(["=&r"] * arrays * pack + ["l"] * arrays * pack + ["r"] * pack + ["l"] * pack)


@triton.constexpr_function
def pack_of(count: int, warps: int) -> int:
    """Words of an array that one thread polls together."""
    return max(1, min(8, count // (32 * warps)))


@triton.constexpr_function
def power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()


_WRITE = tl.constexpr("""{
.reg .pred p;
setp.ne.s32 p, $4, 0;
@p st.relaxed.gpu.global.v2.b32 [$1], {$2, $3};
mov.u32 $0, 0;
}""")


@triton.jit
def _fence(state, PROGRAMS: tl.constexpr):
    if PROGRAMS > 1:
        tl.inline_asm_elementwise(
            "fence.acq_rel.gpu;\nmov.u32 $0, 0;", "=r,l", [state], dtype=tl.int32, is_pure=False, pack=1
        )
        tl.debug_barrier()


@triton.jit
def _hand_over(places, value, inside, tag, PROGRAMS: tl.constexpr):
    """Publish fp32 values, or 32 bits. Every thread that holds a value writes it: electing one would take longer."""
    bits = value.to(tl.int32, bitcast=True)
    if PROGRAMS == 1:
        word = (tl.cast(tag, tl.int64) << 32) | bits.to(tl.uint32, bitcast=True).to(tl.int64)
        tl.store(places, word, mask=inside)
    else:
        tl.inline_asm_elementwise(
            _WRITE, "=r,l,r,r,r", [places, bits, tag, inside.to(tl.int32)], tl.int32, is_pure=False, pack=1
        )


@triton.jit
def _look(places, tag, state, COUNT: tl.constexpr, PROGRAMS: tl.constexpr, WARPS: tl.constexpr):
    """32 bits published at each place, once they are there."""
    if PROGRAMS == 1:
        bits = tl.load(places).to(tl.int32)
    else:
        PACK: tl.constexpr = pack_of(COUNT, WARPS)
        asm: tl.constexpr = look_asm(1, PACK)
        registers: tl.constexpr = look_registers(1, PACK)
        given_up = state.to(tl.int64)
        again = tag
        bits = tl.inline_asm_elementwise(asm, registers, [places, tag, given_up], tl.int32, is_pure=False, pack=PACK)
        # A loop that is never entered: without it the compiler would poll again wherever it needs another layout.
        while again < 0:
            bits = tl.inline_asm_elementwise(
                asm, registers, [places, tag, given_up], tl.int32, is_pure=False, pack=PACK
            )
            again += 1
    return bits


@triton.jit
def _look_twice(places, others, tag, state, COUNT: tl.constexpr, PROGRAMS: tl.constexpr, WARPS: tl.constexpr):
    """fp32 values at two tensors of places."""
    if PROGRAMS == 1:
        a = tl.load(places).to(tl.int32)
        b = tl.load(others).to(tl.int32)
    else:
        PACK: tl.constexpr = pack_of(COUNT, WARPS)
        asm: tl.constexpr = look_asm(2, PACK)
        registers: tl.constexpr = look_registers(2, PACK)
        types: tl.constexpr = (tl.int32, tl.int32)
        given_up = state.to(tl.int64)
        again = tag
        a, b = tl.inline_asm_elementwise(
            asm, registers, [places, others, tag, given_up], types, is_pure=False, pack=PACK
        )
        while again < 0:
            a, b = tl.inline_asm_elementwise(
                asm, registers, [places, others, tag, given_up], types, is_pure=False, pack=PACK
            )
            again += 1
    return a.to(tl.float32, bitcast=True), b.to(tl.float32, bitcast=True)


@triton.jit
def _rows_of(pairs, at, first, count, COLUMNS: tl.constexpr, CHUNKS: tl.constexpr, TILE: tl.constexpr):
    """(TILE, CHUNKS, UNIT) pairs of `count` rows of a (N, COLUMNS) weight from `first` on; a warp has whole rows."""
    lane = tl.arange(0, TILE)[:, None, None]
    pair = tl.arange(0, CHUNKS)[None, :, None] * UNIT + tl.arange(0, UNIT)[None, None, :]
    inside = (lane < count) & (pair < COLUMNS // 2)
    place = pairs + at + (first + lane) * (COLUMNS // 2) + pair
    # The L1 cache is kept for data read in every layer.
    return tl.load(place, mask=inside, other=0, cache_modifier=".cg")


@triton.jit
def _unpacked(pair):
    """fp32, with a last dimension of the two."""
    if pair.dtype == tl.int32:  # bf16
        even = (pair << 16).to(tl.float32, bitcast=True)
        odd = (pair & -65536).to(tl.float32, bitcast=True)
    else:  # fp32
        even = pair.to(tl.int32).to(tl.float32, bitcast=True)
        odd = (pair >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    return tl.join(even, odd)


@triton.jit
def _row(place, tag, state, COLUMNS: tl.constexpr, CHUNKS: tl.constexpr, PROGRAMS: tl.constexpr, WARPS: tl.constexpr):
    """(1, CHUNKS, 2 * UNIT) bits of the columns of a row that all programs published; 0 beyond the last."""
    column = tl.arange(0, CHUNKS)[None, :, None] * (2 * UNIT) + tl.arange(0, 2 * UNIT)[None, None, :]
    inside = column < COLUMNS
    bits = _look(place + tl.where(inside, column, 0), tag, state, CHUNKS * 2 * UNIT, PROGRAMS, WARPS)
    return tl.where(inside, bits, 0)


@triton.jit
def _product(row, rows):
    """(TILE,) rows of a weight, as pairs, times one row of activations."""
    row = tl.reshape(row, (1, rows.shape[1], rows.shape[2], 2))
    return tl.sum(tl.sum(tl.sum(_unpacked(rows) * row, 3), 1), 1)


@triton.jit
def _twin_bits(value, normed):
    """Two bf16 in 32 bits: a column of the residual stream, and its normed value without the row's factor."""
    low = value.to(tl.bfloat16).to(tl.uint16, bitcast=True).to(tl.uint32)
    high = normed.to(tl.bfloat16).to(tl.uint16, bitcast=True).to(tl.uint32)
    return ((high << 16) | low).to(tl.int32, bitcast=True)


@triton.jit
def _normed(bits):
    return (bits & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _factor(bits, eps, COLUMNS: tl.constexpr):
    """The norm's factor of the row."""
    value = (bits << 16).to(tl.float32, bitcast=True)
    return tl.rsqrt(tl.sum(tl.sum(tl.sum(value * value, 1), 1), 0) / COLUMNS + eps)


@triton.jit
def _keys(
    begin, end, pages, weights, k_at, v_at, kv_head,
    KV: tl.constexpr, HALF: tl.constexpr, KEYS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Keys and values of the positions from `begin` on, in halves."""
    key = begin + tl.arange(0, KEYS)
    there = key < end
    page = tl.load(pages + key // BLOCK_SIZE, mask=there, other=0).to(tl.int64)
    slot = ((page * BLOCK_SIZE + key % BLOCK_SIZE) * KV + kv_head) * (2 * HALF)
    at = slot[:, None] + tl.arange(0, HALF)[None, :]
    there = there[:, None]
    # Bypass the L1 cache, which is not coherent with writes of other multiprocessors.
    k_low = tl.load(weights + k_at + at, mask=there, other=0.0, cache_modifier=".cg")
    k_high = tl.load(weights + k_at + HALF + at, mask=there, other=0.0, cache_modifier=".cg")
    v_low = tl.load(weights + v_at + at, mask=there, other=0.0, cache_modifier=".cg")
    v_high = tl.load(weights + v_at + HALF + at, mask=there, other=0.0, cache_modifier=".cg")
    return k_low, k_high, v_low, v_high


@triton.jit
def _cut(item, items, starts, lasts, step, splits, KV: tl.constexpr, KEYS: tl.constexpr):
    """Row, K/V head and split of an item of attention; the row's context, [begin, end) of it, and splits in use.

    Where there is no such item, an empty range of some row.
    """
    split = splits - 1 - item % splits  # the first split comes last: it sums the others
    row = tl.minimum(item, items - 1) // (splits * KV)
    context = tl.minimum(tl.load(starts + row) + step, tl.load(lasts + row))  # its own position too
    blocks = (context + KEYS - 1) // KEYS
    each = tl.maximum((blocks + splits - 1) // splits, 1)
    used = tl.maximum((blocks + each - 1) // each, 1)
    begin = split * each * KEYS
    end = tl.where(item < items, tl.minimum(begin + each * KEYS, context), 0)
    return row, item // splits % KV, split, context, begin, end, used


@triton.jit
def _first_keys(
    item, items, starts, lasts, tables, weights, k_at, v_at, step, splits, table_width,
    KV: tl.constexpr, DIM: tl.constexpr, KEYS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    row, kv_head, _, _, begin, end, _ = _cut(item, items, starts, lasts, step, splits, KV, KEYS)
    pages = tables + row * table_width
    return _keys(begin, end, pages, weights, k_at, v_at, kv_head, KV, DIM // 2, KEYS, BLOCK_SIZE)


@triton.jit
def _attend(
    item, items, k_low, k_high, v_low, v_high, starts, lasts, tables, weights, k_at, v_at, cos, sin, qkv, sums,
    totals, attended, state, step, splits, table_width, log2_scale, tag,
    KV: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, KEYS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    SPLITS: tl.constexpr, PROGRAMS: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """One K/V head of one row over one split of its context, whose first keys and values are already loaded; the first
    split also includes the token itself.

    Weights are relative to the token's own score, which every split computes, so that splits can simply be summed.
    """
    HALF: tl.constexpr = DIM // 2
    HEADS: tl.constexpr = KV * GROUP
    ATTENDED: tl.constexpr = HEADS * DIM
    WIDTH: tl.constexpr = ATTENDED + 2 * KV * DIM
    row, kv_head, split, context, begin, end, used = _cut(item, items, starts, lasts, step, splits, KV, KEYS)
    if split < used:
        half = tl.arange(0, HALF)
        pages = tables + row * table_width
        c = tl.load(cos + context * HALF + half)[None, :]
        s = tl.load(sin + context * HALF + half)[None, :]
        # The group's queries, then the key and the value of the token, as a tile of 16 rows.
        lane = tl.arange(0, 16)
        head = tl.where(lane == GROUP, HEADS + kv_head, kv_head * GROUP + tl.minimum(lane, GROUP - 1))
        head = tl.where(lane == GROUP + 1, HEADS + KV + kv_head, head)
        at = qkv + row * WIDTH + head[:, None] * DIM + half[None, :]
        a, b = _look_twice(at, at + HALF, tag, state, 16 * HALF, PROGRAMS, WARPS)
        low = a * c - b * s
        high = b * c + a * s
        # Products of the tile with itself are faster than extracting the key and the value from it.
        dtype: tl.constexpr = weights.dtype.element_ty
        q_low = low.to(dtype)
        q_high = high.to(dtype)
        own = tl.dot(q_low, tl.trans(q_low), input_precision="ieee")
        own = tl.dot(q_high, tl.trans(q_high), own, input_precision="ieee")
        reference = tl.sum(tl.where((lane == GROUP)[None, :], own, 0.0), 1)
        first = tl.where(split == 0, 1.0, 0.0)
        total = tl.zeros((16,), tl.float32) + first
        is_value = tl.where(lane == GROUP + 1, first, 0.0)[None, :]
        is_value = tl.broadcast_to(is_value, (16, 16)).to(dtype)
        values_low = tl.dot(is_value, a.to(dtype), input_precision="ieee")
        values_high = tl.dot(is_value, b.to(dtype), input_precision="ieee")
        while begin < end:
            scores = tl.dot(q_low, tl.trans(k_low), input_precision="ieee")
            scores = tl.dot(q_high, tl.trans(k_high), scores, input_precision="ieee")
            scores = tl.exp2(tl.minimum((scores - reference[:, None]) * log2_scale, 100.0))
            scores = tl.where((begin + tl.arange(0, KEYS) < end)[None, :], scores, 0.0)
            total += tl.sum(scores, 1)
            values_low = tl.dot(scores.to(v_low.dtype), v_low, values_low, input_precision="ieee")
            values_high = tl.dot(scores.to(v_low.dtype), v_high, values_high, input_precision="ieee")
            begin += KEYS
            if begin < end:
                k_low, k_high, v_low, v_high = _keys(
                    begin, end, pages, weights, k_at, v_at, kv_head, KV, HALF, KEYS, BLOCK_SIZE
                )
        inside = (lane < GROUP)[:, None] & (half < HALF)[None, :]
        if used == 1:
            out = attended + row * ATTENDED
            column = (kv_head * GROUP + lane[:, None]) * DIM + half[None, :]
            _hand_over(out + column, values_low / total[:, None], inside, tag, PROGRAMS)
            _hand_over(out + HALF + column, values_high / total[:, None], inside, tag, PROGRAMS)
        else:
            mine = (row * SPLITS + split) * HEADS + kv_head * GROUP + lane
            _hand_over(totals + mine, total, lane < GROUP, tag, PROGRAMS)
            column = mine[:, None] * DIM + half[None, :]
            _hand_over(sums + column, values_low, inside, tag, PROGRAMS)
            _hand_over(sums + HALF + column, values_high, inside, tag, PROGRAMS)
            if split == 0:
                _merge(row, kv_head, used, sums, totals, attended, state, tag, KV, GROUP, DIM, SPLITS, PROGRAMS, WARPS)
        if (split == 0) & (tl.load(starts + row) + step == context):  # a row that has all its tokens writes no more
            slot = tl.load(pages + context // BLOCK_SIZE).to(tl.int64) * BLOCK_SIZE + context % BLOCK_SIZE
            place = weights + (slot * KV + kv_head) * DIM + half
            key = (lane == GROUP)[:, None]
            value = (lane == GROUP + 1)[:, None]
            tl.store(place + k_at, tl.sum(tl.where(key, low, 0.0), 0).to(dtype))
            tl.store(place + k_at + HALF, tl.sum(tl.where(key, high, 0.0), 0).to(dtype))
            tl.store(place + v_at, tl.sum(tl.where(value, a, 0.0), 0).to(dtype))
            tl.store(place + v_at + HALF, tl.sum(tl.where(value, b, 0.0), 0).to(dtype))


@triton.jit
def _merge(
    row, kv_head, used, sums, totals, attended, state, tag,
    KV: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, SPLITS: tl.constexpr, PROGRAMS: tl.constexpr,
    WARPS: tl.constexpr,
):  # fmt: skip
    """The sum of all splits of a row's K/V head."""
    ATTENDED: tl.constexpr = KV * GROUP * DIM
    split = tl.arange(0, SPLITS)[:, None]
    WIDE: tl.constexpr = power_of_two(GROUP) * DIM
    column = tl.arange(0, WIDE)
    inside = column < GROUP * DIM
    column = kv_head * GROUP * DIM + tl.where(inside, column, 0)
    place = row * SPLITS + tl.where(split < used, split, 0)
    value, total = _look_twice(
        sums + place * ATTENDED + column[None, :], totals + place * (KV * GROUP) + column[None, :] // DIM, tag, state,
        SPLITS * WIDE, PROGRAMS, WARPS,
    )  # fmt: skip
    value = tl.sum(tl.where(split < used, value, 0.0), 0)
    total = tl.sum(tl.where(split < used, total, 0.0), 0)
    _hand_over(attended + row * ATTENDED + column, value / total, inside, tag, PROGRAMS)


@triton.jit
def chain(
    state,  # int32: STATE, the tokens drafted (ROWS, MOST), then the host's input: see `_Buffers.fill`
    table,  # (LAYERS + 1, 8) int64: where weights and caches lie, in elements from `weights`; last those of no layer
    weights,  # the head (VOCAB, HIDDEN)
    pairs,  # the same as integers, two elements each
    cos, sin,
    words,  # scratch
    eps, log2_scale,
    LAYERS: tl.constexpr, HIDDEN: tl.constexpr, INTER: tl.constexpr, VOCAB: tl.constexpr, KV: tl.constexpr,
    GROUP: tl.constexpr, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, KEYS: tl.constexpr, SPLITS: tl.constexpr,
    ROWS: tl.constexpr, MOST: tl.constexpr, LAG: tl.constexpr, CHUNKS_H: tl.constexpr, CHUNKS_A: tl.constexpr,
    CHUNKS_I: tl.constexpr, TILE_Q: tl.constexpr, TILE_H: tl.constexpr, TILE_I: tl.constexpr, TILE_V: tl.constexpr,
    LANES: tl.constexpr, PROGRAMS: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    HEADS: tl.constexpr = KV * GROUP
    ATTENDED: tl.constexpr = HEADS * DIM
    QKV: tl.constexpr = ATTENDED + 2 * KV * DIM
    # Scratch.
    qkv = words
    sums = qkv + ROWS * QKV
    totals = sums + ROWS * SPLITS * ATTENDED
    attended = totals + ROWS * SPLITS * HEADS
    x_mlp = attended + ROWS * ATTENDED
    x_attention = x_mlp + ROWS * HIDDEN
    gated = x_attention + ROWS * HIDDEN
    best = gated + ROWS * INTER
    best_at = best + ROWS * PROGRAMS
    # Read and written by the column's owner only.
    residual = (best_at + ROWS * PROGRAMS).to(tl.pointer_type(tl.float32))
    # Written by the host.
    tokens = state + 32
    header = tokens + ROWS * MOST
    rows = tl.load(header)
    steps = tl.load(header + 1)
    first_head = tl.load(header + 2)
    splits = tl.load(header + 3)
    table_width = tl.load(header + 4)
    tag = tl.load(header + 5)
    starts = header + 8
    lasts = starts + ROWS
    lags = lasts + ROWS
    given = lags + ROWS
    tables = given + ROWS * LAG
    items = rows * KV * splits
    # This program's share.
    EACH_Q: tl.constexpr = (QKV + PROGRAMS - 1) // PROGRAMS
    EACH_H: tl.constexpr = (HIDDEN + PROGRAMS - 1) // PROGRAMS
    EACH_I: tl.constexpr = (INTER + PROGRAMS - 1) // PROGRAMS
    first_q = pid * EACH_Q
    first_h = pid * EACH_H
    first_i = pid * EACH_I
    count_q = tl.minimum(EACH_Q, QKV - first_q)
    count_h = tl.minimum(EACH_H, HIDDEN - first_h)
    count_i = tl.minimum(EACH_I, INTER - first_i)
    lane_q = tl.arange(0, TILE_Q)
    lane_h = tl.arange(0, TILE_H)
    lane_i = tl.arange(0, TILE_I)
    own_h = lane_h < count_h
    at_h = tl.where(own_h, first_h + lane_h, 0)
    embedding_at = tl.load(table + LAYERS * 8)
    final_norm_at = tl.load(table + LAYERS * 8 + 1)
    UP: tl.constexpr = INTER * HIDDEN // 2

    norm_first = tl.load(weights + tl.load(table) + at_h).to(tl.float32)
    norm_final = tl.load(weights + final_norm_at + at_h).to(tl.float32)
    q_at = tl.multiple_of(tl.load(table + 1) // 2, 4)
    o_at = tl.multiple_of(tl.load(table + 2) // 2, 4)
    g_at = tl.multiple_of(tl.load(table + 4) // 2, 4)
    d_at = tl.multiple_of(tl.load(table + 5) // 2, 4)
    w_q = _rows_of(pairs, q_at, first_q, count_q, HIDDEN, CHUNKS_H, TILE_Q)
    w_o = _rows_of(pairs, o_at, first_h, count_h, ATTENDED, CHUNKS_A, TILE_H)
    w_g = _rows_of(pairs, g_at, first_i, count_i, HIDDEN, CHUNKS_H, TILE_I)
    w_u = _rows_of(pairs, g_at + UP, first_i, count_i, HIDDEN, CHUNKS_H, TILE_I)
    w_d = _rows_of(pairs, d_at, first_h, count_h, INTER, CHUNKS_I, TILE_H)
    for row in range(rows):
        own = weights + embedding_at + tl.load(given + row * LAG).to(tl.int64) * HIDDEN + at_h
        x = tl.load(own).to(tl.float32)
        _hand_over(x_mlp + row * HIDDEN + at_h, _twin_bits(x, x * norm_first), own_h, tag, PROGRAMS)
        tl.store(residual + row * HIDDEN + at_h, x, mask=own_h)
    for step in range(steps):
        for layer in range(LAYERS):
            k_at = tl.multiple_of(tl.load(table + layer * 8 + 6), 8)
            v_at = tl.multiple_of(tl.load(table + layer * 8 + 7), 8)
            more = layer + 1 < LAYERS
            following = table + tl.minimum(layer + 1, LAYERS - 1) * 8
            norm_mlp = tl.load(weights + tl.load(table + layer * 8 + 3) + at_h).to(tl.float32)
            norm_next = tl.load(weights + tl.load(following) + at_h).to(tl.float32)
            norm_next = tl.where(more, norm_next, norm_final)
            q_at = tl.multiple_of(tl.load(following + 1) // 2, 4)
            o_at = tl.multiple_of(tl.load(following + 2) // 2, 4)
            g_at = tl.multiple_of(tl.load(following + 4) // 2, 4)
            d_at = tl.multiple_of(tl.load(following + 5) // 2, 4)
            item = PROGRAMS - 1 - pid  # of attention: programs with the least other work come first
            k_low, k_high, v_low, v_high = _first_keys(
                item, items, starts, lasts, tables, weights, k_at, v_at, step, splits, table_width,
                KV, DIM, KEYS, BLOCK_SIZE,
            )  # fmt: skip
            # q, k and v.
            for row in range(rows):
                bits = _row(x_mlp + row * HIDDEN, tag, state, HIDDEN, CHUNKS_H, PROGRAMS, WARPS)
                y = _product(_normed(bits), w_q) * _factor(bits, eps, HIDDEN)
                _hand_over(qkv + row * QKV + first_q + lane_q, y, lane_q < count_q, tag, PROGRAMS)
            w_q = _rows_of(pairs, q_at, first_q, tl.where(more, count_q, 0), HIDDEN, CHUNKS_H, TILE_Q)
            # Attention.
            if item < items:
                _attend(
                    item, items, k_low, k_high, v_low, v_high, starts, lasts, tables, weights, k_at, v_at, cos, sin,
                    qkv, sums, totals, attended, state, step, splits, table_width, log2_scale, tag,
                    KV, GROUP, DIM, KEYS, BLOCK_SIZE, SPLITS, PROGRAMS, WARPS,
                )  # fmt: skip
            if ROWS * KV > PROGRAMS:  # there may be more items than programs
                for item in range(2 * PROGRAMS - 1 - pid, items, PROGRAMS):
                    k_low, k_high, v_low, v_high = _first_keys(
                        item, items, starts, lasts, tables, weights, k_at, v_at, step, splits, table_width,
                        KV, DIM, KEYS, BLOCK_SIZE,
                    )  # fmt: skip
                    _attend(
                        item, items, k_low, k_high, v_low, v_high, starts, lasts, tables, weights, k_at, v_at, cos,
                        sin, qkv, sums, totals, attended, state, step, splits, table_width, log2_scale, tag,
                        KV, GROUP, DIM, KEYS, BLOCK_SIZE, SPLITS, PROGRAMS, WARPS,
                    )  # fmt: skip
            # Attention's output, added to this program's columns of the residual stream.
            for row in range(rows):
                x = tl.load(residual + row * HIDDEN + at_h, volatile=True)
                bits = _row(attended + row * ATTENDED, tag, state, ATTENDED, CHUNKS_A, PROGRAMS, WARPS)
                x += _product(bits.to(tl.float32, bitcast=True), w_o)
                _hand_over(x_attention + row * HIDDEN + at_h, _twin_bits(x, x * norm_mlp), own_h, tag, PROGRAMS)
                tl.store(residual + row * HIDDEN + at_h, x, mask=own_h)
            w_o = _rows_of(pairs, o_at, first_h, tl.where(more, count_h, 0), ATTENDED, CHUNKS_A, TILE_H)
            # Gate and up.
            for row in range(rows):
                bits = _row(x_attention + row * HIDDEN, tag, state, HIDDEN, CHUNKS_H, PROGRAMS, WARPS)
                factor = _factor(bits, eps, HIDDEN)
                gate = _product(_normed(bits), w_g) * factor
                up = _product(_normed(bits), w_u) * factor
                y = gate / (1.0 + tl.exp(-gate)) * up
                _hand_over(gated + row * INTER + first_i + lane_i, y, lane_i < count_i, tag, PROGRAMS)
            w_g = _rows_of(pairs, g_at, first_i, tl.where(more, count_i, 0), HIDDEN, CHUNKS_H, TILE_I)
            w_u = _rows_of(pairs, g_at + UP, first_i, tl.where(more, count_i, 0), HIDDEN, CHUNKS_H, TILE_I)
            # Down.
            for row in range(rows):
                x = tl.load(residual + row * HIDDEN + at_h, volatile=True)
                bits = _row(gated + row * INTER, tag, state, INTER, CHUNKS_I, PROGRAMS, WARPS)
                x += _product(bits.to(tl.float32, bitcast=True), w_d)
                _hand_over(x_mlp + row * HIDDEN + at_h, _twin_bits(x, x * norm_next), own_h, tag + 1, PROGRAMS)
                tl.store(residual + row * HIDDEN + at_h, x, mask=own_h)
            w_d = _rows_of(pairs, d_at, first_h, tl.where(more, count_h, 0), INTER, CHUNKS_I, TILE_H)
            tag += 1

        # The head: each program's best token; every program picks the best of those, ties to the lowest.
        for row in range(rows):
            high = tl.full((TILE_V,), float("-inf"), tl.float32)
            which = tl.zeros((TILE_V,), tl.int32)
            lane_v = tl.arange(0, TILE_V)
            if step >= first_head:
                w = _rows_of(pairs, 0, tl.cast(pid * TILE_V, tl.int64), VOCAB - pid * TILE_V, HIDDEN, CHUNKS_H, TILE_V)
                bits = _row(x_mlp + row * HIDDEN, tag, state, HIDDEN, CHUNKS_H, PROGRAMS, WARPS)
                x = _normed(bits)  # without the row's factor, which does not change the argmax
                for first in range(pid * TILE_V, VOCAB, PROGRAMS * TILE_V):
                    beyond = first + PROGRAMS * TILE_V
                    following_w = _rows_of(
                        pairs, 0, tl.cast(beyond, tl.int64), VOCAB - beyond, HIDDEN, CHUNKS_H, TILE_V
                    )
                    logits = _product(x, w)
                    better = (logits > high) & (first + lane_v < VOCAB)
                    high = tl.where(better, logits, high)
                    which = tl.where(better, first + lane_v, which)
                    w = following_w
            top = tl.max(high, 0)
            at = tl.minimum(tl.min(tl.where(high == top, which, 2147483647), 0), VOCAB - 1)
            if row == 0:
                _fence(state, PROGRAMS)  # K/V of this step are read in the next
            mine = row * PROGRAMS + pid + tl.arange(0, 1)
            _hand_over(best + mine, top + tl.zeros((1,), tl.float32), mine >= 0, tag, PROGRAMS)
            _hand_over(best_at + mine, at + tl.zeros((1,), tl.float32), mine >= 0, tag, PROGRAMS)
        q_at = tl.multiple_of(tl.load(table + 1) // 2, 4)
        o_at = tl.multiple_of(tl.load(table + 2) // 2, 4)
        g_at = tl.multiple_of(tl.load(table + 4) // 2, 4)
        d_at = tl.multiple_of(tl.load(table + 5) // 2, 4)
        w_q = _rows_of(pairs, q_at, first_q, count_q, HIDDEN, CHUNKS_H, TILE_Q)
        w_o = _rows_of(pairs, o_at, first_h, count_h, ATTENDED, CHUNKS_A, TILE_H)
        w_g = _rows_of(pairs, g_at, first_i, count_i, HIDDEN, CHUNKS_H, TILE_I)
        w_u = _rows_of(pairs, g_at + UP, first_i, count_i, HIDDEN, CHUNKS_H, TILE_I)
        w_d = _rows_of(pairs, d_at, first_h, count_h, INTER, CHUNKS_I, TILE_H)
        for row in range(rows):
            each = tl.arange(0, LANES)
            place = row * PROGRAMS + tl.where(each < PROGRAMS, each, 0)
            value, at = _look_twice(best + place, best_at + place, tag, state, LANES, PROGRAMS, WARPS)
            at = tl.where(value == tl.max(value, 0), at, 16777216.0)
            token = tl.minimum(tl.min(at, 0).to(tl.int32), VOCAB - 1)
            lag = tl.load(lags + row)
            node = step + 1 - lag
            if (pid == 0) & (node >= 0) & (node < MOST):
                tl.store(tokens + row * MOST + node, token)
            if node < 0:
                token = tl.load(given + row * LAG + step + 1)
            x = tl.load(weights + embedding_at + token.to(tl.int64) * HIDDEN + at_h).to(tl.float32)
            again = lane_h < tl.where(step + 1 < steps, count_h, 0)
            _hand_over(x_mlp + row * HIDDEN + at_h, _twin_bits(x, x * norm_first), again, tag + 1, PROGRAMS)
            tl.store(residual + row * HIDDEN + at_h, x, mask=again)
        _fence(state, PROGRAMS)
        tag += 1
