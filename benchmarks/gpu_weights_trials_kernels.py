"""Trial kernels for weights of codes: by the copy engine (`boxed`), or codes straight into registers (`direct`)."""
# mypy: ignore-errors

from __future__ import annotations

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from paceline.models.triton.launch import release, wait
from paceline.models.triton.streamed import FLOAT, FLOATS, NIBBLE, NONE, copy_async, finish, of_nibbles, row_of

PINNED = gl.constexpr("bar.warp.sync 0xffffffff; mov.u32 $0, $1;")  # no load moves across it
SINK = gl.constexpr("xor.b32 $0, $1, $2;")


@gluon.jit
def of_bytes(first, second, S: gl.constexpr):
    """Two units of 32 columns in e4m3, (S, 8, 4, 2, 2, 2, 2) each -> (16 S, 64)."""
    first = gl.inline_asm_elementwise(FLOATS, "=r,=r,r", [first], dtype=gl.bfloat16, is_pure=True, pack=4)
    second = gl.inline_asm_elementwise(FLOATS, "=r,=r,r", [second], dtype=gl.bfloat16, is_pure=True, pack=4)
    return gl.join(first, second).permute((0, 5, 1, 7, 3, 4, 2, 6)).reshape([16 * S, 64])


@gluon.jit
def boxes_in(
    x_box, code_box, scale_box, x_ring, code_ring, scale_ring, ready, turn, slot, first_m, begin, outer, inner, pred,
    CODES: gl.constexpr, ROWS: gl.constexpr, KIND: gl.constexpr, GROUP: gl.constexpr, UNROLL: gl.constexpr,
    PARTS: gl.constexpr, BYTES: gl.constexpr,
):  # fmt: skip
    """Start the copies of one stage: its codes and scales (CODES), its rows of x (ROWS)."""
    at = begin + turn * (UNROLL * 64)
    if CODES:
        mbarrier.expect(ready.index(slot), BYTES, pred=pred)
        tma.async_copy_global_to_shared(
            code_box, [at // (64 * UNROLL // PARTS), outer, inner, 0, 0], ready.index(slot), code_ring.index(slot), pred
        )
        if KIND == NIBBLE:
            tma.async_copy_global_to_shared(
                scale_box, [at // GROUP, outer, inner, 0, 0], ready.index(slot), scale_ring.index(slot), pred
            )
    if ROWS:
        to = x_ring.index(slot)._reinterpret(x_box.dtype, x_box.block_shape, x_box.layout)
        tma.async_copy_global_to_shared(x_box, [at // 64, first_m, 0], ready.index(slot), to, pred)


@gluon.jit
def first_boxes(
    x_box, code_box, scale_box, x_ring, code_ring, scale_ring, ready, turns, first_m, begin, outer, inner,
    STAGES: gl.constexpr, OVERLAP: gl.constexpr, KIND: gl.constexpr, GROUP: gl.constexpr, UNROLL: gl.constexpr,
    PARTS: gl.constexpr, BYTES: gl.constexpr,
):  # fmt: skip
    for turn in gl.static_range(STAGES):
        boxes_in(
            x_box, code_box, scale_box, x_ring, code_ring, scale_ring, ready, turn, turn, first_m, begin, outer, inner,
            turn < turns, True, False, KIND, GROUP, UNROLL, PARTS, BYTES,
        )  # fmt: skip
    wait(OVERLAP)
    for turn in gl.static_range(STAGES):
        boxes_in(
            x_box, code_box, scale_box, x_ring, code_ring, scale_ring, ready, turn, turn, first_m, begin, outer, inner,
            turn < turns, False, True, KIND, GROUP, UNROLL, PARTS, BYTES,
        )  # fmt: skip


@gluon.jit
def produce(
    x_box, code_box, scale_box, x_ring, code_ring, scale_ring, ready, free, turns, first_m, begin, outer, inner,
    STAGES: gl.constexpr, OVERLAP: gl.constexpr, KIND: gl.constexpr, GROUP: gl.constexpr, UNROLL: gl.constexpr,
    PARTS: gl.constexpr, BYTES: gl.constexpr,
):  # fmt: skip
    first_boxes(
        x_box, code_box, scale_box, x_ring, code_ring, scale_ring, ready, turns, first_m, begin, outer, inner,
        STAGES, OVERLAP, KIND, GROUP, UNROLL, PARTS, BYTES,
    )  # fmt: skip
    slot = 0
    phase = 0
    for turn in range(STAGES, turns):
        mbarrier.wait(free.index(slot), phase)
        boxes_in(
            x_box, code_box, scale_box, x_ring, code_ring, scale_ring, ready, turn, slot, first_m, begin, outer, inner,
            True, True, True, KIND, GROUP, UNROLL, PARTS, BYTES,
        )  # fmt: skip
        slot += 1
        if slot == STAGES:
            slot = 0
            phase ^= 1


@gluon.jit
def taken(
    code_ring, scale_ring, slot, nth: gl.constexpr,
    KIND: gl.constexpr, GROUP: gl.constexpr, S: gl.constexpr, BOX: gl.constexpr, SBOX: gl.constexpr,
):  # fmt: skip
    """Codes and scales of 64 columns, out of a stage."""
    if KIND == NIBBLE:
        first = code_ring.index(slot).slice(nth, 1, dim=0).load(BOX)
        second = scale_ring.index(slot).slice(nth * 64 // GROUP, 1, dim=0).load(SBOX)
    else:
        first = code_ring.index(slot).slice(nth * 2, 1, dim=0).load(BOX)
        second = code_ring.index(slot).slice(nth * 2 + 1, 1, dim=0).load(BOX)
    return first, second


@gluon.jit
def consume(
    x_box, code_box, scale_box, x_ring, code_ring, scale_ring, ready, free, turns, first_m, begin, outer, inner,
    scales, bias, out, rows, n, k, block_n, positions, slots, cos, sin, k_cache, v_cache,
    KIND: gl.constexpr, GROUP: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, UNROLL: gl.constexpr,
    STAGES: gl.constexpr, GATED: gl.constexpr, DIM: gl.constexpr, KV_HEADS: gl.constexpr, BIASED: gl.constexpr,
    APART: gl.constexpr, WARPS: gl.constexpr, LAG: gl.constexpr, EARLY: gl.constexpr, SPECIAL: gl.constexpr,
    WITHOUT: gl.constexpr, PARTS: gl.constexpr, BYTES: gl.constexpr,
):  # fmt: skip
    S: gl.constexpr = BN // 16
    PAIRED: gl.constexpr = GATED or KV_HEADS > 0
    HALF: gl.constexpr = DIM // 2 if KV_HEADS > 0 else 0
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BM, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    EACH: gl.constexpr = S // 2 if PAIRED else S
    WB: gl.constexpr = WARPS if EACH >= WARPS else EACH
    WA: gl.constexpr = WARPS // WB
    BOX: gl.constexpr = gl.BlockedLayout([1, 1, 1, 1, 16], [1, 1, 1, 4, 8], [1, WA, WB, 1, 1], [4, 3, 2, 1, 0])
    SBOX: gl.constexpr = gl.SliceLayout(
        3, gl.BlockedLayout([1, 1, 1, 1, 1, 2], [1, 1, 1, 4, 2, 4], [1, WA, WB, 1, 1, 1], [3, 5, 4, 2, 1, 0])
    )
    if KIND == NIBBLE:
        CODES: gl.constexpr = gl.BlockedLayout(
            [1, 1, 1, 1, 4, 2, 2], [1, 8, 4, 1, 1, 1, 1], [WARPS, 1, 1, 1, 1, 1, 1], [6, 5, 4, 3, 2, 1, 0]
        )
        SCALE: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(3, gl.SliceLayout(4, gl.SliceLayout(6, CODES))))
    else:
        CODES: gl.constexpr = gl.BlockedLayout(
            [1, 1, 1, 2, 2, 2, 2], [1, 8, 4, 1, 1, 1, 1], [WARPS, 1, 1, 1, 1, 1, 1], [6, 5, 4, 3, 2, 1, 0]
        )
        at_n = gl.arange(0, BN, layout=gl.SliceLayout(1, MMA))
        row_scale = gl.load(scales + row_of(at_n // 16, block_n, n, BN, PAIRED, HALF) + at_n % 16)
    acc = gl.full([BN, BM], 0.0, gl.float32, layout=MMA)
    if WITHOUT == "expansion":
        w = gl.full([BN, 64], 1.0, gl.bfloat16, layout=LEFT)
    if WITHOUT == "products":
        sink = gl.full([BN, 64], 0.0, gl.bfloat16, layout=LEFT)
    slot = 0
    before = STAGES - 1
    phase = 0
    for turn in range(turns):
        mbarrier.wait(ready.index(slot), phase)
        if WITHOUT != "expansion" and WITHOUT != "both":
            first, second = taken(code_ring, scale_ring, slot, 0, KIND, GROUP, S, BOX, SBOX)
        for nth in gl.static_range(UNROLL):
            if WITHOUT != "expansion" and WITHOUT != "both":
                if KIND == NIBBLE:
                    scale = gl.convert_layout(second.reshape([S, 8, 2]), SCALE, assert_trivial=True)
                    scale = scale[:, :, None, :][:, :, :, None, :][:, :, :, :, None, :][:, :, :, :, :, :, None]
                    codes = gl.convert_layout(first.reshape([S, 8, 4, 1, 4, 2, 2]), CODES, assert_trivial=True)
                    if EARLY and nth + 1 < UNROLL:
                        first, second = taken(code_ring, scale_ring, slot, nth + 1, KIND, GROUP, S, BOX, SBOX)
                    w = of_nibbles(codes, scale, scale, S, NONE)
                else:
                    one = gl.convert_layout(first.reshape([S, 8, 4, 2, 2, 2, 2]), CODES, assert_trivial=True)
                    two = gl.convert_layout(second.reshape([S, 8, 4, 2, 2, 2, 2]), CODES, assert_trivial=True)
                    if EARLY and nth + 1 < UNROLL:
                        first, second = taken(code_ring, scale_ring, slot, nth + 1, KIND, GROUP, S, BOX, SBOX)
                    w = of_bytes(one, two, S)
                w = gl.convert_layout(w, LEFT, assert_trivial=True)
                if not EARLY and nth + 1 < UNROLL:
                    first, second = taken(code_ring, scale_ring, slot, nth + 1, KIND, GROUP, S, BOX, SBOX)
            if WITHOUT == "products":
                sink = gl.inline_asm_elementwise(SINK, "=r,r,r", [w, sink], dtype=gl.bfloat16, is_pure=True, pack=2)
            elif WITHOUT != "both":
                columns = x_ring.index(slot).slice(nth * BM, BM, dim=0)
                acc = warpgroup_mma(w, columns.permute((1, 0)), acc, is_async=True)
                if LAG > 0:
                    acc = warpgroup_mma_wait(LAG, deps=(acc,))
            if LAG > 0 and nth == LAG - 1:  # the products of the stage before are done
                if SPECIAL:
                    gl.thread_barrier()
                    mbarrier.arrive(free.index(before), count=1, pred=turn > 0)
                else:
                    gl.thread_barrier()
                    ahead = turn + STAGES - 1
                    boxes_in(
                        x_box, code_box, scale_box, x_ring, code_ring, scale_ring, ready, ahead, before, first_m,
                        begin, outer, inner, (turn > 0) & (ahead < turns), True, True, KIND, GROUP, UNROLL, PARTS,
                        BYTES,
                    )  # fmt: skip
        if LAG == 0:
            if WITHOUT != "products" and WITHOUT != "both":
                acc = warpgroup_mma_wait(0, deps=(acc,))
            gl.thread_barrier()
            if SPECIAL:
                mbarrier.arrive(free.index(slot), count=1)
            else:
                ahead = turn + STAGES
                boxes_in(
                    x_box, code_box, scale_box, x_ring, code_ring, scale_ring, ready, ahead, slot, first_m, begin,
                    outer, inner, ahead < turns, True, True, KIND, GROUP, UNROLL, PARTS, BYTES,
                )  # fmt: skip
        before = slot
        slot += 1
        if slot == STAGES:
            slot = 0
            phase ^= 1
    acc = warpgroup_mma_wait(0, deps=(acc,))
    if WITHOUT == "products":
        acc += gl.convert_layout(gl.sum(sink.to(gl.float32), 1), gl.SliceLayout(1, MMA))[:, None]
    if KIND == FLOAT:
        acc = acc * row_scale[:, None]
    finish(
        acc, bias, out, rows, n, first_m, block_n, positions, slots, cos, sin, k_cache, v_cache,
        GATED, DIM, KV_HEADS, BIASED, APART, BM, BN, WARPS,
    )  # fmt: skip


@gluon.jit(do_not_specialize=["rows"])
def boxed(
    x_box, code_box, scale_box, scales, bias, out, rows, n, k, positions, slots, cos, sin, k_cache, v_cache,
    KIND: gl.constexpr, GROUP: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, UNROLL: gl.constexpr,
    STAGES: gl.constexpr, GATED: gl.constexpr, DIM: gl.constexpr, KV_HEADS: gl.constexpr, BIASED: gl.constexpr,
    SEGMENTS: gl.constexpr, APART: gl.constexpr, WARPS: gl.constexpr, OVERLAP: gl.constexpr, LAG: gl.constexpr,
    EARLY: gl.constexpr, SPECIAL: gl.constexpr, WITHOUT: gl.constexpr,
):  # fmt: skip
    """A ring filled by the copy engine: no fence, one barrier a turn.

    LAG: products (of 64 columns) that may be under way while the next weights are expanded; 0: all, up to a turn's end.
    EARLY: codes leave shared memory before the weights ahead of them are expanded. SPECIAL: a warp of its own copies.
    WITHOUT "expansion": weights are constant. "products": weights are only expanded. "both": copies alone.
    """
    S: gl.constexpr = BN // 16
    PAIRED: gl.constexpr = GATED or KV_HEADS > 0
    HALF: gl.constexpr = DIM // 2 if KV_HEADS > 0 else 0
    PARTS: gl.constexpr = UNROLL * (1 if KIND == NIBBLE else 2)
    TWO: gl.constexpr = 2 if PAIRED else 1
    EACH: gl.constexpr = S // TWO
    GROUPS: gl.constexpr = max(UNROLL * 64 // GROUP, 1) if KIND == NIBBLE else 1
    tiles_m = gl.cdiv(rows, BM)
    first_m = (gl.program_id(0) % tiles_m) * BM
    block_n = gl.program_id(0) // tiles_m
    length = k // SEGMENTS
    begin = gl.program_id(1) * length if APART else gl.program_id(1) * 0
    if PAIRED:
        strips = (n // 32) if HALF == 0 else HALF // 16
        outer = block_n * EACH // strips * 2
        inner = block_n * EACH % strips
    else:
        outer = block_n * 0
        inner = block_n * EACH
    release(OVERLAP)
    code_ring = gl.allocate_shared_memory(gl.int8, [STAGES, PARTS, TWO, EACH, 4, 128], code_box.layout)
    x_ring = gl.allocate_shared_memory(x_box.dtype, [STAGES, UNROLL * BM, 64], gl.NVMMASharedLayout(128, 16, 2))
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    if KIND == NIBBLE:
        scale_ring = gl.allocate_shared_memory(scale_box.dtype, [STAGES, GROUPS, TWO, EACH, 2, 8], scale_box.layout)
        BYTES: gl.constexpr = PARTS * S * 512 + UNROLL * BM * 128 + GROUPS * BN * 2
    else:
        scale_ring = x_ring
        BYTES: gl.constexpr = PARTS * S * 512 + UNROLL * BM * 128
    for slot in gl.static_range(STAGES):
        mbarrier.init(ready.index(slot), count=1)
        mbarrier.init(free.index(slot), count=1)
    fence_async_shared()
    gl.thread_barrier()
    turns = length // (64 * UNROLL)
    if SPECIAL:
        gl.warp_specialize([
            (consume, (
                x_box, code_box, scale_box, x_ring, code_ring, scale_ring, ready, free, turns, first_m, begin, outer,
                inner, scales, bias, out, rows, n, k, block_n, positions, slots, cos, sin, k_cache, v_cache,
                KIND, GROUP, BM, BN, UNROLL, STAGES, GATED, DIM, KV_HEADS, BIASED, APART, WARPS, LAG, EARLY, SPECIAL,
                WITHOUT, PARTS, BYTES,
            )),
            (produce, (
                x_box, code_box, scale_box, x_ring, code_ring, scale_ring, ready, free, turns, first_m, begin, outer,
                inner, STAGES, OVERLAP, KIND, GROUP, UNROLL, PARTS, BYTES,
            )),
        ], [1], [24])  # fmt: skip
    else:
        first_boxes(
            x_box, code_box, scale_box, x_ring, code_ring, scale_ring, ready, turns, first_m, begin, outer, inner,
            STAGES, OVERLAP, KIND, GROUP, UNROLL, PARTS, BYTES,
        )  # fmt: skip
        consume(
            x_box, code_box, scale_box, x_ring, code_ring, scale_ring, ready, free, turns, first_m, begin, outer,
            inner, scales, bias, out, rows, n, k, block_n, positions, slots, cos, sin, k_cache, v_cache,
            KIND, GROUP, BM, BN, UNROLL, STAGES, GATED, DIM, KV_HEADS, BIASED, APART, WARPS, LAG, EARLY, SPECIAL,
            WITHOUT, PARTS, BYTES,
        )  # fmt: skip


# Four bytes of codes of 4 bits, scales of two rows in a register -> 8 weights: by row, by 8 of 16 columns, by pair.
WORD_4 = gl.constexpr(
    "{ .reg .b32 a, b, c, d, s, t, z; shr.u32 b, $8, 4; shr.u32 c, $8, 8; shr.u32 d, $8, 12;"
    " lop3.b32 a, $8, 0x000F000F, 0x43004300, 0xEA; lop3.b32 b, b, 0x000F000F, 0x43004300, 0xEA;"
    " lop3.b32 c, c, 0x000F000F, 0x43004300, 0xEA; lop3.b32 d, d, 0x000F000F, 0x43004300, 0xEA;"
    " prmt.b32 s, $9, $9, 0x1010; prmt.b32 t, $9, $9, 0x3232; mov.b32 z, 0x43084308;"
    " sub.rn.bf16x2 a, a, z; sub.rn.bf16x2 b, b, z; sub.rn.bf16x2 c, c, z; sub.rn.bf16x2 d, d, z;"
    " mul.rn.bf16x2 a, a, s; mul.rn.bf16x2 b, b, s; mul.rn.bf16x2 c, c, t; mul.rn.bf16x2 d, d, t;"
    " mov.b32 {$0, $1}, a; mov.b32 {$2, $3}, b; mov.b32 {$4, $5}, c; mov.b32 {$6, $7}, d; }"
)
WORD_8 = gl.constexpr(
    "{ .reg .b32 a, b, c, d; shl.b32 a, $4, 8; shl.b32 b, $4, 4; shr.u32 c, $4, 4;"
    " and.b32 b, b, 0x07F007F0; lop3.b32 a, a, 0x80008000, b, 0xEA;"
    " and.b32 c, c, 0x07F007F0; lop3.b32 c, $4, 0x80008000, c, 0xEA;"
    " mov.b32 d, 0x7B807B80; mul.rn.bf16x2 a, a, d; mul.rn.bf16x2 c, c, d;"
    " mov.b32 {$0, $1}, a; mov.b32 {$2, $3}, c; }"
)


@gluon.jit
def of_words_4(words, scale, S: gl.constexpr, LEFT: gl.constexpr):
    """(S, 8, 4, 4) words and (S, 8, 1, 1) pairs of scales -> (16 S, 64)."""
    a, b, c, d, e, f, g, h = gl.inline_asm_elementwise(
        WORD_4, "=h,=h,=h,=h,=h,=h,=h,=h,r,r", [words, scale],
        dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16),
        is_pure=True, pack=1,
    )  # fmt: skip
    upper = gl.join(gl.join(a, b), gl.join(c, d))
    lower = gl.join(gl.join(e, f), gl.join(g, h))
    w = gl.join(upper, lower).permute((0, 6, 1, 3, 5, 2, 4)).reshape([16 * S, 64])
    return gl.convert_layout(w, LEFT, assert_trivial=True)


@gluon.jit
def unit_8(words, S: gl.constexpr):
    a, b, c, d = gl.inline_asm_elementwise(
        WORD_8, "=h,=h,=h,=h,r", [words], dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16), is_pure=True,
        pack=1,
    )  # fmt: skip
    return gl.join(gl.join(a, b), gl.join(c, d)).reshape([S, 8, 4, 2, 2, 2, 2])


@gluon.jit
def of_words_8(first, second, S: gl.constexpr, LEFT: gl.constexpr):
    w = gl.join(unit_8(first, S), unit_8(second, S)).permute((0, 6, 1, 7, 3, 4, 2, 5)).reshape([16 * S, 64])
    return gl.convert_layout(w, LEFT, assert_trivial=True)


@gluon.jit
def advanced(
    held, acc, sink, code_at, s_at, x_all, turn, n,
    KIND: gl.constexpr, GROUP: gl.constexpr, S: gl.constexpr, DEPTH: gl.constexpr, LAG: gl.constexpr,
    WITHOUT: gl.constexpr, LAST: gl.constexpr, CACHE: gl.constexpr, PIN: gl.constexpr, LEFT: gl.constexpr,
):  # fmt: skip
    """DEPTH steps of 64 columns; each is loaded anew, for the next turn, as soon as it is expanded."""
    UNITS: gl.constexpr = 1 if KIND == NIBBLE else 2
    kept = ()
    for nth in gl.static_range(DEPTH):
        step = turn * DEPTH + nth
        if KIND == NIBBLE:
            scale = held[2 * (nth - nth % (GROUP // 64)) + 1]
            w = of_words_4(held[2 * nth], scale[:, :, None][:, :, :, None], S, LEFT)
        else:
            w = of_words_8(held[2 * nth], held[2 * nth + 1], S, LEFT)
        if True:
            after = gl.minimum(turn + 1, LAST) * DEPTH + nth  # no mask: predicated loads are moved to the loop's end
            kept = kept + (gl.load(code_at + after * (UNITS * 128), cache_modifier=CACHE),)
            if KIND == FLOAT:
                kept = kept + (gl.load(code_at + (after * 2 + 1) * 128, cache_modifier=CACHE),)
            elif nth % (GROUP // 64) == 0:
                kept = kept + (gl.load(s_at + after * 64 // GROUP * (n // 2)),)
            else:
                kept = kept + (0,)
        if PIN > 0 and nth % PIN == PIN - 1:
            gl.inline_asm_elementwise(PINNED, "=r,r", [step], dtype=gl.int32, is_pure=False, pack=1)
        if WITHOUT == "products":
            sink = gl.inline_asm_elementwise(SINK, "=r,r,r", [w, sink], dtype=gl.bfloat16, is_pure=True, pack=2)
        else:
            acc = warpgroup_mma(w, x_all.index(step).permute((1, 0)), acc, is_async=True)
            acc = warpgroup_mma_wait(LAG, deps=(acc,))
    return kept, acc, sink


@gluon.jit(do_not_specialize=["rows"])
def direct(
    x, codes, scales, bias, out, rows, n, k, positions, slots, cos, sin, k_cache, v_cache,
    KIND: gl.constexpr, GROUP: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, DEPTH: gl.constexpr,
    LENGTH: gl.constexpr, GATED: gl.constexpr, DIM: gl.constexpr, KV_HEADS: gl.constexpr, BIASED: gl.constexpr,
    APART: gl.constexpr, WARPS: gl.constexpr, OVERLAP: gl.constexpr, LAG: gl.constexpr, WITHOUT: gl.constexpr,
    CACHE: gl.constexpr, PIN: gl.constexpr,
):  # fmt: skip
    """All of x in shared memory, codes straight into registers, DEPTH steps of 64 columns ahead: no barrier inside.

    `codes` as int32; `scales` of nibbles too (two in bf16). Rows: BM at the most.
    """
    S: gl.constexpr = BN // 16
    PAIRED: gl.constexpr = GATED or KV_HEADS > 0
    HALF: gl.constexpr = DIM // 2 if KV_HEADS > 0 else 0
    UNITS: gl.constexpr = 1 if KIND == NIBBLE else 2
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BM, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    RING: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    WORDS: gl.constexpr = gl.BlockedLayout([1, 1, 1, 4], [1, 8, 4, 1], [WARPS, 1, 1, 1], [3, 2, 1, 0])
    COPY_X: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    SCALE: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(3, WORDS))
    STEPS: gl.constexpr = LENGTH // 64
    MOST: gl.constexpr = 16  # steps of x that one copy fills
    block_n = gl.program_id(0)
    begin = gl.program_id(1) * LENGTH if APART else 0
    release(OVERLAP)
    x_all = gl.allocate_shared_memory(x.dtype.element_ty, [STEPS, BM, 64], RING)
    strip = gl.arange(0, S, layout=gl.SliceLayout(1, SCALE))
    lane_g = gl.arange(0, 8, layout=gl.SliceLayout(0, SCALE))
    row = row_of(strip, block_n, n, BN, PAIRED, HALF)
    strip = row_of(
        gl.arange(0, S, layout=gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, WORDS)))), block_n, n, BN, PAIRED,
        HALF,
    ) // 16  # fmt: skip
    place = gl.convert_layout(strip, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, WORDS))))
    g = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, WORDS))))
    t = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, WORDS))))
    word = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, WORDS))))
    base = codes + (place.to(gl.int64) * (k // 64 * UNITS * 128))[:, None, None, None]
    code_at = base + (
        (g * 16)[None, :, None, None] + (t * 4)[None, None, :, None] + word[None, None, None, :]
        + begin // 64 * (UNITS * 128)
    )  # fmt: skip
    if KIND == NIBBLE:
        s_at = scales + (row[:, None] // 2 + lane_g[None, :]) + begin // GROUP * (n // 2)
    else:
        s_at = scales
    held = ()
    for nth in gl.static_range(DEPTH):
        held = held + (gl.load(code_at + nth * UNITS * 128, cache_modifier=CACHE),)
        if KIND == FLOAT:
            held = held + (gl.load(code_at + (nth * 2 + 1) * 128, cache_modifier=CACHE),)
        elif nth % (GROUP // 64) == 0:
            held = held + (gl.load(s_at + nth * 64 // GROUP * (n // 2)),)
        else:
            held = held + (0,)
    if KIND == FLOAT:
        at_n = gl.arange(0, BN, layout=gl.SliceLayout(1, MMA))
        row_scale = gl.load(scales + row_of(at_n // 16, block_n, n, BN, PAIRED, HALF) + at_n % 16)
    x_lane = gl.arange(0, MOST * BM, layout=gl.SliceLayout(1, COPY_X))
    x_column = gl.arange(0, 64, layout=gl.SliceLayout(0, COPY_X))
    x_row = x_lane % BM
    x_at = x + (x_row.to(gl.int64) * k + (x_lane // BM * 64 + begin))[:, None] + x_column[None, :]
    x_used = (x_row < rows)[:, None]
    wait(OVERLAP)
    many = x_all._reinterpret(x.dtype.element_ty, [STEPS // MOST, MOST * BM, 64], RING)
    for part in gl.static_range(STEPS // MOST):
        copy_async(many.index(part), x_at + part * (MOST * 64), mask=x_used)
    async_copy.commit_group()
    async_copy.wait_group(0)
    fence_async_shared()
    gl.thread_barrier()
    acc = gl.full([BN, BM], 0.0, gl.float32, layout=MMA)
    sink = gl.full([BN, 64], 0.0, gl.bfloat16, layout=LEFT)
    for turn in range(STEPS // DEPTH):
        held, acc, sink = advanced(
            held, acc, sink, code_at, s_at, x_all, turn, n, KIND, GROUP, S, DEPTH, LAG, WITHOUT, STEPS // DEPTH - 1,
            CACHE, PIN, LEFT,
        )  # fmt: skip
    acc = warpgroup_mma_wait(0, deps=(acc,))
    if WITHOUT == "products":
        acc += gl.convert_layout(gl.sum(sink.to(gl.float32), 1), gl.SliceLayout(1, MMA))[:, None]
    if KIND == FLOAT:
        acc = acc * row_scale[:, None]
    finish(
        acc, bias, out, rows, n, 0, block_n, positions, slots, cos, sin, k_cache, v_cache,
        GATED, DIM, KV_HEADS, BIASED, APART, BM, BN, WARPS,
    )  # fmt: skip
