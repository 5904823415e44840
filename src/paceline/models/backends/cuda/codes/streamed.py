"""Products with weights stored as codes, in Gluon, for Hopper: codes are expanded in registers, never in memory.

The bits are those of `linear` with the expanded weight: each is rounded to bf16 once, and the tensor cores take 16 of k
at a time in its order. `codes.laid_out` puts a lane's share of the tensor cores' left operand into 16 neighbouring
bytes. A warp of its own has the copy engine fill a ring of stages, each with codes, scales and rows of x, while the
others expand and multiply. Where rows are paired, gate with up or the two halves of a head, a tile has both.
"""
# mypy: disable-error-code="no-redef"
# ruff: noqa: RUF005 (kernels cannot unpack lists)

from __future__ import annotations

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from paceline.models.backends.cuda.codes.expansion import FLOAT, NIBBLE, NONE, of_both, of_bytes, of_nibbles
from paceline.models.backends.cuda.elementwise import cached, rotate
from paceline.platform.launch import release, wait

copy_box = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared  # its older name
barrier = getattr(gl, "barrier", None) or gl.thread_barrier  # its older name
REINTERPRETS = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))  # False: under its older name


@gluon.jit
def place_of(block_n, n, BN: gl.constexpr, GATED: gl.constexpr, HALF: gl.constexpr):
    """Return (rows of a span, the tile's span, its first row in it). Rows of a span may be paired with those of the
    next: of gate with up, of a head's first half (HALF rows) with its second. A tile does not leave its span."""
    if HALF > 0:
        span = HALF
        tiles = (HALF + BN // 2 - 1) // (BN // 2)
        nth = block_n // tiles
        first = block_n % tiles * (BN // 2)
    else:
        span = n // 2 if GATED else n
        nth = block_n * 0
        first = block_n * (BN // 2 if GATED else BN)
    return span, nth, first


@gluon.jit
def fill(
    boxes, rings, ready, turn, slot, first_m, begin, outer, inner, pred, WEIGHTS: gl.constexpr, ROWS: gl.constexpr,
    GROUP: gl.constexpr, SHIFT: gl.constexpr, UNROLL: gl.constexpr, UNITS: gl.constexpr, BYTES: gl.constexpr,
):  # fmt: skip
    """Start the copies of a stage: of codes and what is beside them (WEIGHTS), of rows of x (ROWS)."""
    at = begin + turn * (UNROLL * 64)
    bar = ready.index(slot)
    if WEIGHTS:
        mbarrier.expect(bar, BYTES, pred=pred)
        copy_box(boxes[1], [at // (64 // UNITS), outer, inner, 0, 0], bar, rings[1].index(slot), pred)
        if GROUP > 0:
            copy_box(boxes[2], [at // GROUP, outer, inner, 0, 0], bar, rings[2].index(slot), pred)
            if SHIFT != NONE:
                copy_box(boxes[3], [at // GROUP, outer, inner, 0, 0], bar, rings[3].index(slot), pred)
    if ROWS:
        stage = rings[0].index(slot)
        if REINTERPRETS:
            rows = stage.reinterpret(boxes[0].dtype, boxes[0].block_shape, boxes[0].layout)
        else:
            rows = stage._reinterpret(boxes[0].dtype, boxes[0].block_shape, boxes[0].layout)
        copy_box(boxes[0], [at // 64, first_m, 0], bar, rows, pred)


@gluon.jit
def copy(
    boxes, rings, ready, free, turns, first_m, begin, outer, inner,
    GROUP: gl.constexpr, SHIFT: gl.constexpr, UNROLL: gl.constexpr, STAGES: gl.constexpr, UNITS: gl.constexpr,
    BYTES: gl.constexpr, OVERLAP: gl.constexpr,
):  # fmt: skip
    """Fill the ring; a stage again once it is free. Weights need not wait for the kernel before, x does."""
    for turn in gl.static_range(STAGES):
        fill(
            boxes, rings, ready, turn, turn, first_m, begin, outer, inner, turn < turns, True, False,
            GROUP, SHIFT, UNROLL, UNITS, BYTES,
        )  # fmt: skip
    wait(OVERLAP)
    for turn in gl.static_range(STAGES):
        fill(
            boxes, rings, ready, turn, turn, first_m, begin, outer, inner, turn < turns, False, True,
            GROUP, SHIFT, UNROLL, UNITS, BYTES,
        )  # fmt: skip
    slot = 0
    phase = 0
    for turn in range(STAGES, turns):
        mbarrier.wait(free.index(slot), phase)
        fill(
            boxes, rings, ready, turn, slot, first_m, begin, outer, inner, True, True, True,
            GROUP, SHIFT, UNROLL, UNITS, BYTES,
        )  # fmt: skip
        slot += 1
        if slot == STAGES:
            slot = 0
            phase ^= 1


@gluon.jit
def codes_in(stage, nth: gl.constexpr, TWO: gl.constexpr, EACH: gl.constexpr, WARPS: gl.constexpr):
    """Load a lane's 16 bytes of every strip, the `nth` of a stage: (1, TWO, EACH, 4, 128)."""
    ACROSS: gl.constexpr = min(EACH, WARPS)
    BOX: gl.constexpr = gl.BlockedLayout(
        [1, 1, 1, 1, 16], [1, 1, 1, 4, 8], [1, WARPS // ACROSS, ACROSS, 1, 1], [4, 3, 2, 1, 0]
    )
    return stage.slice(nth, 1, dim=0).load(BOX)


@gluon.jit
def scales_in(
    stage, nth: gl.constexpr, Q: gl.constexpr, TWO: gl.constexpr, EACH: gl.constexpr, WARPS: gl.constexpr
):  # fmt: skip
    """Load scales of Q groups, from the `nth` of a stage on: (Q, TWO, EACH, 16 in pieces of 16 bytes)."""
    ACROSS: gl.constexpr = min(EACH, WARPS)
    PIECE: gl.constexpr = stage.shape[4]
    BOX: gl.constexpr = gl.SliceLayout(
        3,
        gl.BlockedLayout(
            [Q, 1, 1, 1, 1, 2], [1, 1, 1, 4, 16 // PIECE, PIECE // 2], [1, WARPS // ACROSS, ACROSS, 1, 1, 1],
            [3, 5, 4, 2, 1, 0],
        ),
    )  # fmt: skip
    return stage.slice(nth * Q, Q, dim=0).load(BOX)


@gluon.jit
def taken(
    rings, slot, nth: gl.constexpr, before,
    KIND: gl.constexpr, SHIFT: gl.constexpr, GROUP: gl.constexpr, TWO: gl.constexpr, EACH: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """Load the `nth` 64 columns of a stage into registers: codes, scales, shifts, each of 32 columns and the next.
    Where a group goes on, its scales are those `before`."""
    codes = rings[1].index(slot)
    if KIND == NIBBLE:
        first = codes_in(codes, nth, TWO, EACH, WARPS)
        second = first
    else:
        first = codes_in(codes, nth * 2, TWO, EACH, WARPS)
        second = codes_in(codes, nth * 2 + 1, TWO, EACH, WARPS)
    if KIND == FLOAT:
        beside = (first, first, first, first)
    elif nth > 0 and nth * 64 % GROUP != 0:
        beside = (before[2], before[3], before[4], before[5])
    elif GROUP == 32 and KIND != NIBBLE:
        scale = rings[2].index(slot)
        shift = rings[3].index(slot)
        beside = (
            scales_in(scale, nth * 2, 1, TWO, EACH, WARPS), scales_in(scale, nth * 2 + 1, 1, TWO, EACH, WARPS),
            scales_in(shift, nth * 2, 1, TWO, EACH, WARPS), scales_in(shift, nth * 2 + 1, 1, TWO, EACH, WARPS),
        )  # fmt: skip
    else:
        Q: gl.constexpr = 2 if GROUP == 32 else 1
        at: gl.constexpr = nth if GROUP == 32 else nth * 64 // GROUP
        scale = scales_in(rings[2].index(slot), at, Q, TWO, EACH, WARPS)
        shift = scales_in(rings[3].index(slot), at, Q, TWO, EACH, WARPS)
        beside = (scale, scale, shift, shift)
    return (first, second, beside[0], beside[1], beside[2], beside[3])


@gluon.jit
def beside_lanes(values, S: gl.constexpr, CODES: gl.constexpr):
    """Move scales from the layout of `scales_in` to that of codes, (S, 8, 1, Q, 1, 2, 1)."""
    Q: gl.constexpr = values.shape[0]
    SCALE: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(4, gl.SliceLayout(6, CODES)))
    values = values.reshape([Q, S, 8, 2]).permute((1, 2, 0, 3))
    values = gl.convert_layout(values, SCALE, assert_trivial=True)
    return values[:, :, None, :, :][:, :, :, :, None, :][:, :, :, :, :, :, None]


@gluon.jit
def expanded(
    loaded, KIND: gl.constexpr, SHIFT: gl.constexpr, GROUP: gl.constexpr, S: gl.constexpr, WARPS: gl.constexpr,
    LEFT: gl.constexpr,
):  # fmt: skip
    """Expand 64 columns of a tile's weights to (16 S, 64) in bf16, from the result of `taken`."""
    Q: gl.constexpr = 2 if KIND == NIBBLE and GROUP == 32 else 1
    SHAPE: gl.constexpr = [S, 8, 4, Q, 4 // Q, 2, 2] if KIND == NIBBLE else [S, 8, 4, 2, 2, 2, 2]
    CODES: gl.constexpr = gl.BlockedLayout(
        [1, 1, 1, SHAPE[3], SHAPE[4], 2, 2], [1, 8, 4, 1, 1, 1, 1], [WARPS, 1, 1, 1, 1, 1, 1], [6, 5, 4, 3, 2, 1, 0]
    )
    first = gl.convert_layout(loaded[0].reshape(SHAPE), CODES, assert_trivial=True)
    second = gl.convert_layout(loaded[1].reshape(SHAPE), CODES, assert_trivial=True)
    if KIND == FLOAT:
        w = of_both(of_bytes(first, 0, 0, KIND, SHIFT), of_bytes(second, 0, 0, KIND, SHIFT), S)
    else:
        scale = beside_lanes(loaded[2], S, CODES)
        shift = beside_lanes(loaded[4], S, CODES)
        if KIND == NIBBLE:
            w = of_nibbles(first, scale, shift, S, SHIFT)
        else:
            first = of_bytes(first, scale, shift, KIND, SHIFT)
            scale = beside_lanes(loaded[3], S, CODES)
            shift = beside_lanes(loaded[5], S, CODES)
            w = of_both(first, of_bytes(second, scale, shift, KIND, SHIFT), S)
    return gl.convert_layout(w, LEFT, assert_trivial=True)


@gluon.jit
def multiply(
    rings, ready, free, turns, first_m, block_n, scales, bias, out, rows, n, rotary,
    KIND: gl.constexpr, SHIFT: gl.constexpr, GROUP: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr,
    UNROLL: gl.constexpr, STAGES: gl.constexpr, GATED: gl.constexpr, DIM: gl.constexpr, KV_HEADS: gl.constexpr,
    BIASED: gl.constexpr, APART: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Expand weights while those before them are multiplied; the next codes leave the ring before that."""
    S: gl.constexpr = BN // 16
    HALF: gl.constexpr = DIM // 2 if KV_HEADS > 0 else 0
    TWO: gl.constexpr = 2 if GATED or KV_HEADS > 0 else 1
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BM, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    if KIND == FLOAT:
        at_n = gl.arange(0, BN, layout=gl.SliceLayout(1, MMA))
        span, nth_span, first = place_of(block_n, n, BN, GATED, HALF)
        at = first + at_n % (BN // TWO)
        row = (nth_span * TWO + at_n // (BN // TWO)) * span + at
        row_scale = gl.load(scales + gl.where(at < span, row, 0))
    acc = gl.full([BN, BM], 0.0, gl.float32, layout=MMA)
    slot = 0
    before = STAGES - 1
    phase = 0
    for turn in range(turns):
        mbarrier.wait(ready.index(slot), phase)
        loaded = taken(rings, slot, 0, (), KIND, SHIFT, GROUP, TWO, S // TWO, WARPS)
        for nth in gl.static_range(UNROLL):
            now = loaded
            if nth + 1 < UNROLL:
                loaded = taken(rings, slot, nth + 1, now, KIND, SHIFT, GROUP, TWO, S // TWO, WARPS)
            w = expanded(now, KIND, SHIFT, GROUP, S, WARPS, LEFT)
            columns = rings[0].index(slot).slice(nth * BM, BM, dim=0)
            acc = warpgroup_mma(w, columns.permute((1, 0)), acc, is_async=True)
            # The next `w` is written beside the one under way, unless a turn has but one.
            acc = warpgroup_mma_wait(1 if UNROLL > 1 else 0, deps=(acc,))
            if nth == 0:  # the products of the stage before are done
                barrier()
                mbarrier.arrive(free.index(before), count=1, pred=turn > 0)
        before = slot
        slot += 1
        if slot == STAGES:
            slot = 0
            phase ^= 1
    acc = warpgroup_mma_wait(0, deps=(acc,))
    barrier()  # no warp reads the ring any more
    if KIND == FLOAT:
        acc = acc * row_scale[:, None]
    finish(acc, bias, out, rows, n, first_m, block_n, rotary, GATED, DIM, KV_HEADS, BIASED, APART, BM, BN, WARPS)


@gluon.jit
def finish(
    total, bias, out, rows, n, first_m, block_n, rotary,
    GATED: gl.constexpr, DIM: gl.constexpr, KV_HEADS: gl.constexpr, BIASED: gl.constexpr, APART: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Store the sums (BN, BM) as they are or gated, or q rotated and k and v in their slots."""
    TYPE: gl.constexpr = out.dtype.element_ty
    if GATED or KV_HEADS > 0:
        PAIRS: gl.constexpr = gl.BlockedLayout([1, 1, 2], [32, 1, 1], [1, WARPS, 1], [2, 0, 1])
        AT: gl.constexpr = gl.SliceLayout(2, PAIRS)
        pairs = gl.convert_layout(total.reshape([2, BN // 2, BM]).permute((1, 2, 0)), PAIRS)
        first, second = gl.split(pairs)
        first, second = gl.convert_layout(first, AT), gl.convert_layout(second, AT)
        HALF: gl.constexpr = DIM // 2 if KV_HEADS > 0 else 0
        span, head, begin = place_of(block_n, n, BN, GATED, HALF)
        lane = begin + gl.arange(0, BN // 2, layout=gl.SliceLayout(1, AT))
        row = first_m + gl.arange(0, BM, layout=gl.SliceLayout(0, AT))
        inside, used = lane < span, row < rows
        at_n = gl.where(inside, head * DIM + lane, 0)
        if BIASED:
            first += gl.load(bias + at_n).to(gl.float32)[:, None]
            second += gl.load(bias + at_n + span).to(gl.float32)[:, None]
        if GATED:
            s = first
            if GATED == 2:  # the tanh form of GELU
                s = first * (1.5957691216057308 + 0.07135481627159393 * first * first)
            result = first / (1.0 + gl.exp(-s)) * second
            place = row.to(gl.int64)[None, :] * (n // 2) + lane[:, None]
            gl.store(out + place, result.to(TYPE), mask=inside[:, None] & used[None, :])
        else:
            positions, slots, cos, sin, k_cache, v_cache = rotary
            q_heads = n // DIM - 2 * KV_HEADS
            position = gl.load(positions + row, mask=used, other=0).to(gl.int64)
            slot = gl.load(slots + row, mask=used, other=-1).to(gl.int64)
            angle = position[None, :] * HALF + gl.where(inside, lane, 0)[:, None]
            first, second = first.to(TYPE), second.to(TYPE)
            turned_first, turned_second = rotate(first, second, gl.load(cos + angle), gl.load(sin + angle))
            place = row.to(gl.int64)[None, :] * (q_heads * DIM) + at_n[:, None]
            lanes = used[None, :] & (inside & (head < q_heads))[:, None]
            gl.store(out + place, turned_first, mask=lanes)
            gl.store(out + place + HALF, turned_second, mask=lanes)
            written = (slot >= 0)[None, :]
            place = slot[None, :] * (KV_HEADS * DIM) + (at_n - q_heads * DIM)[:, None]
            lanes = written & (inside & (head >= q_heads) & (head < q_heads + KV_HEADS))[:, None]
            gl.store(k_cache + place, cached(turned_first, k_cache), mask=lanes)
            gl.store(k_cache + place + HALF, cached(turned_second, k_cache), mask=lanes)
            place -= KV_HEADS * DIM
            lanes = written & (inside & (head >= q_heads + KV_HEADS))[:, None]
            gl.store(v_cache + place, cached(first, v_cache), mask=lanes)
            gl.store(v_cache + place + HALF, cached(second, v_cache), mask=lanes)
    else:
        PLAIN: gl.constexpr = gl.BlockedLayout([1, 1], [32, 1], [1, WARPS], [0, 1])
        result = gl.convert_layout(total, PLAIN)
        lane = block_n * BN + gl.arange(0, BN, layout=gl.SliceLayout(1, PLAIN))
        row = first_m + gl.arange(0, BM, layout=gl.SliceLayout(0, PLAIN))
        inside = lane < n
        if BIASED:
            result += gl.load(bias + gl.where(inside, lane, 0)).to(gl.float32)[:, None]
        at = row.to(gl.int64)
        if APART:
            at += gl.program_id(1).to(gl.int64) * rows
        mask = inside[:, None] & (row < rows)[None, :]
        gl.store(out + at[None, :] * n + lane[:, None], result.to(TYPE), mask=mask)


@gluon.jit(do_not_specialize=["rows"])
def streamed(
    x_box, code_box, scale_box, shift_box, scales, bias, out, rows, n, k, positions, slots, cos, sin, k_cache, v_cache,
    KIND: gl.constexpr, SHIFT: gl.constexpr, GROUP: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr,
    UNROLL: gl.constexpr, STAGES: gl.constexpr, GATED: gl.constexpr, DIM: gl.constexpr, KV_HEADS: gl.constexpr,
    BIASED: gl.constexpr, SEGMENTS: gl.constexpr, APART: gl.constexpr, WARPS: gl.constexpr, OVERLAP: gl.constexpr,
):  # fmt: skip
    """Multiply a tile. Boxes are of `codes.boxes_of`; GROUP: columns that share a scale, 0 for one scale a row."""
    gl.static_assert(SEGMENTS == 1 or APART)
    gl.static_assert(GROUP == 0 or GROUP % (64 * UNROLL) == 0 or 64 * UNROLL % GROUP == 0)
    HALF: gl.constexpr = DIM // 2 if KV_HEADS > 0 else 0
    TWO: gl.constexpr = 2 if GATED or KV_HEADS > 0 else 1
    UNITS: gl.constexpr = 1 if KIND == NIBBLE else 2  # units of 16 bytes a lane, in 64 columns
    tiles_m = gl.cdiv(rows, BM)
    first_m = (gl.program_id(0) % tiles_m) * BM
    block_n = gl.program_id(0) // tiles_m
    _, nth_span, first = place_of(block_n, n, BN, GATED, HALF)
    length = k // SEGMENTS
    begin = gl.program_id(1) * length if APART else gl.program_id(1) * 0
    turns = length // (64 * UNROLL)
    release(OVERLAP)

    x_ring = gl.allocate_shared_memory(x_box.dtype, [STAGES, UNROLL * BM, 64], gl.NVMMASharedLayout(128, 16, 2))
    code_ring = gl.allocate_shared_memory(gl.int8, [STAGES] + code_box.block_shape, code_box.layout)
    BYTES: gl.constexpr = UNROLL * (BM * 128 + UNITS * BN * 32)
    if KIND == FLOAT:
        rings = (x_ring, code_ring, code_ring, code_ring)
        STAGE: gl.constexpr = BYTES
    else:
        EACH: gl.constexpr = scale_box.block_shape[0] * BN * (scale_box.dtype.primitive_bitwidth // 8)
        scale_ring = gl.allocate_shared_memory(scale_box.dtype, [STAGES] + scale_box.block_shape, scale_box.layout)
        if SHIFT == NONE:
            rings = (x_ring, code_ring, scale_ring, scale_ring)
            STAGE: gl.constexpr = BYTES + EACH
        else:
            shift_ring = gl.allocate_shared_memory(shift_box.dtype, [STAGES] + shift_box.block_shape, shift_box.layout)
            rings = (x_ring, code_ring, scale_ring, shift_ring)
            STAGE: gl.constexpr = BYTES + 2 * EACH
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(ready.index(slot), count=1)
        mbarrier.init(free.index(slot), count=1)
    fence_async_shared()
    barrier()
    gl.warp_specialize(
        [
            (multiply, (
                rings, ready, free, turns, first_m, block_n, scales, bias, out, rows, n,
                (positions, slots, cos, sin, k_cache, v_cache),
                KIND, SHIFT, GROUP, BM, BN, UNROLL, STAGES, GATED, DIM, KV_HEADS, BIASED, APART, WARPS,
            )),
            (copy, (
                (x_box, code_box, scale_box, shift_box), rings, ready, free, turns, first_m, begin, nth_span * TWO,
                first // 16, GROUP, SHIFT, UNROLL, STAGES, UNITS, STAGE, OVERLAP,
            )),
        ],
        [1],
        [24],
    )  # fmt: skip
