"""Products with weights stored as codes, in Gluon, for Hopper: codes are expanded in registers, never in memory.

The bits are those of `linear` with the expanded weight: each is rounded to bf16 once, and the tensor cores take 16 of k
at a time in the same order. `codes.laid_out` puts a lane's share of the tensor cores' left operand into 16 neighbouring
bytes. Codes, scales and rows of x stream through a ring of buffers; a tile's strips of 16 rows may come from anywhere,
so that gate and up, or the two halves of a head, meet in one program.
"""
# mypy: disable-error-code="no-redef"

from __future__ import annotations

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from paceline.models.triton.elementwise import cached, rotate
from paceline.models.triton.launch import release, wait

copy_async = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared  # its older name

# Inline code takes four bytes of codes in a register. Two neighbouring results, of one row, are at bytes 0 and 2, or 1
# and 3, so that a mask finds both.

# Codes 0..15, low and high: 0x4300 is 128 as bf16, and a code becomes its last bits.
NIBBLES = gl.constexpr(
    "{ .reg .b32 a, b, c; shr.u32 a, $4, 4; shr.u32 b, $4, 8; shr.u32 c, $4, 12;"
    " lop3.b32 $0, $4, 0x000F000F, 0x43004300, 0xEA; lop3.b32 $1, b, 0x000F000F, 0x43004300, 0xEA;"
    " lop3.b32 $2, a, 0x000F000F, 0x43004300, 0xEA; lop3.b32 $3, c, 0x000F000F, 0x43004300, 0xEA; }"
)
# (code - zero) * scale, rounded once: the difference is exact.
SCALED = gl.constexpr("{ .reg .b32 a; sub.rn.bf16x2 a, $1, $3; mul.rn.bf16x2 $0, a, $2; }")
# The same with a scale of more digits, given as a sum of two: the product with the second is exact.
SCALED_TWICE = gl.constexpr(
    "{ .reg .b32 a, b; sub.rn.bf16x2 a, $1, $4; mul.rn.bf16x2 b, a, $3; fma.rn.bf16x2 $0, a, $2, b; }"
)
# Low and high codes as bytes of their own.
BYTES = gl.constexpr("{ .reg .b32 a; shr.u32 a, $2, 4; and.b32 $0, $2, 0x0F0F0F0F; and.b32 $1, a, 0x0F0F0F0F; }")
# Bytes 0..255 in fp32: 0x4B000000 is 2^23. $2: codes, $3..6: scales, $7..10: 2^23 + zero, or offsets.
_SPREAD = (
    "{ .reg .b32 a, b, c, d; .reg .f32 e, f, g, h;"
    " prmt.b32 a, $2, 0x4B000000, 0x7540; prmt.b32 b, $2, 0x4B000000, 0x7542;"
    " prmt.b32 c, $2, 0x4B000000, 0x7541; prmt.b32 d, $2, 0x4B000000, 0x7543;"
    " mov.b32 e, a; mov.b32 f, b; mov.b32 g, c; mov.b32 h, d;"
)
_SCALE = " mul.rn.f32 e, e, $3; mul.rn.f32 f, f, $4; mul.rn.f32 g, g, $5; mul.rn.f32 h, h, $6;"
_ROUND = " cvt.rn.bf16x2.f32 $0, f, e; cvt.rn.bf16x2.f32 $1, h, g; }"
FROM_ZERO = gl.constexpr(
    f"{_SPREAD} sub.rn.f32 e, e, $7; sub.rn.f32 f, f, $8; sub.rn.f32 g, g, $9; sub.rn.f32 h, h, $10;{_SCALE}{_ROUND}"
)
_FROM_2_23 = "".join(f" sub.rn.f32 {name}, {name}, 0f4B0000BIAS;" for name in "efgh")
_ADD = " add.rn.f32 e, e, $7; add.rn.f32 f, f, $8; add.rn.f32 g, g, $9; add.rn.f32 h, h, $10;"
WITH_OFFSET_4 = gl.constexpr(f"{_SPREAD}{_FROM_2_23.replace('BIAS', '00')}{_SCALE}{_ADD}{_ROUND}")
WITH_OFFSET_8 = gl.constexpr(f"{_SPREAD}{_FROM_2_23.replace('BIAS', '80')}{_SCALE}{_ADD}{_ROUND}")
# e4m3's exponent has a bias 120 below that of bf16: its bits, moved, times 2^120 are its value, denormals too.
FLOATS = gl.constexpr(
    "{ .reg .b32 a, b, c, d; shl.b32 a, $2, 8; shl.b32 b, $2, 4; shr.u32 c, $2, 4;"
    " and.b32 b, b, 0x07F007F0; lop3.b32 a, a, 0x80008000, b, 0xEA;"
    " and.b32 c, c, 0x07F007F0; lop3.b32 c, $2, 0x80008000, c, 0xEA;"
    " mov.b32 d, 0x7B807B80; mul.rn.bf16x2 $0, a, d; mul.rn.bf16x2 $1, c, d; }"
)
FLOAT = gl.constexpr(0)  # kinds of codes
BYTE = gl.constexpr(1)
NIBBLE = gl.constexpr(2)
NONE = gl.constexpr(0)  # what is beside scales
ZEROS = gl.constexpr(1)
OFFSETS = gl.constexpr(2)


@gluon.jit
def row_of(strip, block_n, n, BN: gl.constexpr, PAIRED: gl.constexpr, HALF: gl.constexpr):
    """The first row of a tile's strip. PAIRED: the tile's second half has the partners of its first, HALF rows further,
    n / 2 where HALF is 0."""
    if PAIRED:
        place = block_n * (BN // 2) + strip % (BN // 32) * 16
        place = gl.where(place < n // 2, place, 0)
        second = strip // (BN // 32)
        if HALF == 0:  # noqa: SIM108
            row = place + second * (n // 2)
        else:
            row = place // HALF * (2 * HALF) + place % HALF + second * HALF
    else:
        row = block_n * BN + strip * 16
        row = gl.where(row < n, row, 0)
    return row


@gluon.jit
def rounded(codes, scale, shift, KIND: gl.constexpr, SHIFT: gl.constexpr):
    """Bytes as (code - zero) * scale or code * scale + offset in fp32, rounded to bf16."""
    if SHIFT == OFFSETS:
        asm: gl.constexpr = WITH_OFFSET_4 if KIND == NIBBLE else WITH_OFFSET_8
        other = shift.to(gl.float32)
    elif SHIFT == ZEROS:
        asm: gl.constexpr = FROM_ZERO
        other = shift.to(gl.float32) + 8388608.0
    else:
        asm: gl.constexpr = FROM_ZERO
        other = gl.full_like(scale, 8388616.0 if KIND == NIBBLE else 8388736.0, dtype=gl.float32)
    scale = scale.to(gl.float32)
    return gl.inline_asm_elementwise(
        asm, "=r,=r,r,r,r,r,r,r,r,r,r", [codes, scale, other], dtype=gl.bfloat16, is_pure=True, pack=4
    )


@gluon.jit
def of_nibbles(codes, scale, shift, S: gl.constexpr, SHIFT: gl.constexpr):
    """(S, 8, 4, Q, 4 / Q, 2, 2) bytes -> (16 S, 64) in bf16."""
    if scale.dtype == gl.float32 or SHIFT == OFFSETS:
        low, high = gl.inline_asm_elementwise(BYTES, "=r,=r,r", [codes], dtype=(gl.int8, gl.int8), is_pure=True, pack=4)
        low = rounded(low, scale, shift, NIBBLE, SHIFT)
        high = rounded(high, scale, shift, NIBBLE, SHIFT)
    else:
        low, high = gl.inline_asm_elementwise(
            NIBBLES, "=r,=r,=r,=r,r", [codes], dtype=(gl.bfloat16, gl.bfloat16), is_pure=True, pack=4
        )
        if SHIFT == ZEROS:  # noqa: SIM108
            zero = (shift + 128.0).to(gl.bfloat16)
        else:
            zero = gl.full_like(scale, 136.0, dtype=gl.bfloat16)
        if scale.dtype == gl.float16:
            first = scale.to(gl.float32).to(gl.bfloat16)
            second = (scale.to(gl.float32) - first.to(gl.float32)).to(gl.bfloat16)
            low = gl.inline_asm_elementwise(
                SCALED_TWICE, "=r,r,r,r,r", [low, first, second, zero], dtype=gl.bfloat16, is_pure=True, pack=2
            )
            high = gl.inline_asm_elementwise(
                SCALED_TWICE, "=r,r,r,r,r", [high, first, second, zero], dtype=gl.bfloat16, is_pure=True, pack=2
            )
        else:
            low = gl.inline_asm_elementwise(
                SCALED, "=r,r,r,r", [low, scale, zero], dtype=gl.bfloat16, is_pure=True, pack=2
            )
            high = gl.inline_asm_elementwise(
                SCALED, "=r,r,r,r", [high, scale, zero], dtype=gl.bfloat16, is_pure=True, pack=2
            )
    # (strip, lane's row, lane's pair, group, 16 columns, upper or lower row, one of a pair, 8 of 16 columns)
    return gl.join(low, high).permute((0, 5, 1, 3, 4, 7, 2, 6)).reshape([16 * S, 64])


@gluon.jit
def expanded(
    codes, scales, shifts, nth: gl.constexpr,
    KIND: gl.constexpr, SHIFT: gl.constexpr, S: gl.constexpr, Q: gl.constexpr, COPY: gl.constexpr, CODES: gl.constexpr,
    SCALE: gl.constexpr, LEFT: gl.constexpr,
):  # fmt: skip
    """64 columns of a tile's weights, (16 S, 64) in bf16, the `nth` of a stage."""
    if KIND == NIBBLE:
        bytes = codes.slice(nth * (32 * S), 32 * S, dim=0).load(COPY).reshape([S, 8, 4, Q, 4 // Q, 2, 2])
        bytes = gl.convert_layout(bytes, CODES, assert_trivial=True)
        scale = grouped(scales, nth, S, Q, SCALE)
        shift = scale
        if SHIFT != NONE:
            shift = grouped(shifts, nth, S, Q, SCALE)
        w = of_nibbles(bytes, scale, shift, S, SHIFT)
    else:
        first = unit_of(codes, scales, shifts, nth, 0, KIND, SHIFT, S, Q, COPY, CODES, SCALE)
        second = unit_of(codes, scales, shifts, nth, 1, KIND, SHIFT, S, Q, COPY, CODES, SCALE)
        # (strip, lane's row, lane's pair, 16 columns, 8 of them, upper or lower row, one of a pair, 32 columns)
        w = gl.join(first, second).permute((0, 5, 1, 7, 3, 4, 2, 6)).reshape([16 * S, 64])
    return gl.convert_layout(w, LEFT, assert_trivial=True)


@gluon.jit
def grouped(stage, nth: gl.constexpr, S: gl.constexpr, Q: gl.constexpr, SCALE: gl.constexpr):
    """Scales of the Q groups in 64 columns, (S, 8, 1, Q, 1, 2, 1)."""
    PLAIN: gl.constexpr = gl.SliceLayout(2, SCALE)
    scale = stage.slice(nth * Q * S, S, dim=0).load(PLAIN)
    if Q == 1:
        scale = scale[:, :, None, :]
    else:
        both = gl.join(scale, stage.slice((nth * Q + 1) * S, S, dim=0).load(PLAIN)).permute((0, 1, 3, 2))
        scale = gl.convert_layout(both, SCALE, assert_trivial=True)
    return scale[:, :, None, :, :][:, :, :, :, None, :][:, :, :, :, :, :, None]


@gluon.jit
def unit_of(
    codes, scales, shifts, nth: gl.constexpr, unit: gl.constexpr,
    KIND: gl.constexpr, SHIFT: gl.constexpr, S: gl.constexpr, Q: gl.constexpr, COPY: gl.constexpr, CODES: gl.constexpr,
    SCALE: gl.constexpr,
):  # fmt: skip
    """32 columns of weights that have a byte each."""
    bytes = codes.slice((nth * 2 + unit) * (32 * S), 32 * S, dim=0).load(COPY).reshape([S, 8, 4, 2, 2, 2, 2])
    bytes = gl.convert_layout(bytes, CODES, assert_trivial=True)
    if KIND == FLOAT:
        w = gl.inline_asm_elementwise(FLOATS, "=r,=r,r", [bytes], dtype=gl.bfloat16, is_pure=True, pack=4)
    else:
        scale = scales.slice((nth * Q + unit % Q) * S, S, dim=0).load(SCALE)
        scale = scale[:, :, None, :][:, :, :, None, :][:, :, :, :, None, :][:, :, :, :, :, :, None]
        shift = scale
        if SHIFT != NONE:
            shift = shifts.slice((nth * Q + unit % Q) * S, S, dim=0).load(SCALE)
            shift = shift[:, :, None, :][:, :, :, None, :][:, :, :, :, None, :][:, :, :, :, :, :, None]
        w = rounded(bytes, scale, shift, KIND, SHIFT)
    return w


@gluon.jit
def finish(
    total, bias, out, rows, n, first_m, block_n, positions, slots, cos, sin, k_cache, v_cache,
    GATED: gl.constexpr, DIM: gl.constexpr, KV_HEADS: gl.constexpr, BIASED: gl.constexpr, APART: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Store the sums (BN, BM), or what they are for: gated, or q rotated and k and v in their slots."""
    TYPE: gl.constexpr = out.dtype.element_ty
    if GATED or KV_HEADS > 0:
        PAIRS: gl.constexpr = gl.BlockedLayout([1, 1, 2], [32, 1, 1], [1, WARPS, 1], [2, 0, 1])
        AT: gl.constexpr = gl.SliceLayout(2, PAIRS)
        pairs = gl.convert_layout(total.reshape([2, BN // 2, BM]).permute((1, 2, 0)), PAIRS)
        first, second = gl.split(pairs)
        first, second = gl.convert_layout(first, AT), gl.convert_layout(second, AT)
        lane = block_n * (BN // 2) + gl.arange(0, BN // 2, layout=gl.SliceLayout(1, AT))
        row = first_m + gl.arange(0, BM, layout=gl.SliceLayout(0, AT))
        inside, used = lane < n // 2, row < rows
        HALF: gl.constexpr = DIM // 2 if KV_HEADS > 0 else 1
        head = lane // HALF
        at_n = gl.where(inside, lane if GATED else head * DIM + lane % HALF, 0)
        if BIASED:
            far = n // 2 if GATED else HALF
            first += gl.load(bias + at_n).to(gl.float32)[:, None]
            second += gl.load(bias + at_n + far).to(gl.float32)[:, None]
        if GATED:
            result = first / (1.0 + gl.exp(-first)) * second
            place = row.to(gl.int64)[None, :] * (n // 2) + lane[:, None]
            gl.store(out + place, result.to(TYPE), mask=inside[:, None] & used[None, :])
        else:
            q_heads = n // DIM - 2 * KV_HEADS
            position = gl.load(positions + row, mask=used, other=0).to(gl.int64)
            slot = gl.load(slots + row, mask=used, other=-1).to(gl.int64)
            angle = position[None, :] * HALF + (lane % HALF)[:, None]
            first, second = first.to(TYPE), second.to(TYPE)
            turned_first, turned_second = rotate(first, second, gl.load(cos + angle), gl.load(sin + angle))
            place = row.to(gl.int64)[None, :] * (q_heads * DIM) + at_n[:, None]
            mine = used[None, :] & (inside & (head < q_heads))[:, None]
            gl.store(out + place, turned_first, mask=mine)
            gl.store(out + place + HALF, turned_second, mask=mine)
            kept = (slot >= 0)[None, :]
            place = slot[None, :] * (KV_HEADS * DIM) + (at_n - q_heads * DIM)[:, None]
            mine = kept & (inside & (head >= q_heads) & (head < q_heads + KV_HEADS))[:, None]
            gl.store(k_cache + place, cached(turned_first, k_cache), mask=mine)
            gl.store(k_cache + place + HALF, cached(turned_second, k_cache), mask=mine)
            place -= KV_HEADS * DIM
            mine = kept & (inside & (head >= q_heads + KV_HEADS))[:, None]
            gl.store(v_cache + place, cached(first, v_cache), mask=mine)
            gl.store(v_cache + place + HALF, cached(second, v_cache), mask=mine)
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
    x, codes, scales, shifts, bias, out, rows, n, k, positions, slots, cos, sin, k_cache, v_cache,
    KIND: gl.constexpr, SHIFT: gl.constexpr, GROUP: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr,
    UNROLL: gl.constexpr, STAGES: gl.constexpr, GATED: gl.constexpr, DIM: gl.constexpr, KV_HEADS: gl.constexpr,
    BIASED: gl.constexpr, SEGMENTS: gl.constexpr, APART: gl.constexpr, WARPS: gl.constexpr, OVERLAP: gl.constexpr,
):  # fmt: skip
    """`codes` and `scales` as `codes.laid_out` has them; GROUP: columns that share a scale, 0 for one scale a row."""
    gl.static_assert(SEGMENTS == 1 or APART)
    S: gl.constexpr = BN // 16
    PAIRED: gl.constexpr = GATED or KV_HEADS > 0
    HALF: gl.constexpr = DIM // 2 if KV_HEADS > 0 else 0
    UNITS: gl.constexpr = 1 if KIND == NIBBLE else 2  # of 16 bytes a lane, in 64 columns
    Q: gl.constexpr = 2 if GROUP == 32 else 1  # groups in 64 columns
    SCALED: gl.constexpr = KIND != FLOAT
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BM, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    RING: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    FLAT3: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    COPY: gl.constexpr = gl.BlockedLayout([1, 16], [32, 1], [WARPS, 1], [1, 0])
    COPY_X: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    COPY_S: gl.constexpr = gl.BlockedLayout([1, 1, 2], [4, 8, 1], [WARPS, 1, 1], [2, 1, 0])
    if KIND == NIBBLE:
        CODES: gl.constexpr = gl.BlockedLayout(
            [1, 1, 1, Q, 4 // Q, 2, 2], [1, 8, 4, 1, 1, 1, 1], [WARPS, 1, 1, 1, 1, 1, 1], [6, 5, 4, 3, 2, 1, 0]
        )
        SCALE: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(4, gl.SliceLayout(6, CODES)))  # (S, 8, Q, 2)
    else:
        CODES: gl.constexpr = gl.BlockedLayout(
            [1, 1, 1, 2, 2, 2, 2], [1, 8, 4, 1, 1, 1, 1], [WARPS, 1, 1, 1, 1, 1, 1], [6, 5, 4, 3, 2, 1, 0]
        )
        SCALE: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(3, gl.SliceLayout(4, gl.SliceLayout(6, CODES))))
    tiles_m = gl.cdiv(rows, BM)
    first_m = (gl.program_id(0) % tiles_m) * BM
    block_n = gl.program_id(0) // tiles_m
    length = k // SEGMENTS
    begin = gl.program_id(1) * length if APART else 0
    release(OVERLAP)

    # A stage of each ring is filled by one copy: several would be kept apart by barriers.
    UNIT: gl.constexpr = 64 // UNITS  # columns
    PARTS: gl.constexpr = UNROLL * UNITS
    GROUPS: gl.constexpr = UNROLL * Q
    code_ring = gl.allocate_shared_memory(gl.int8, [STAGES, PARTS * 32 * S, 16], FLAT)
    x_ring = gl.allocate_shared_memory(x.dtype.element_ty, [STAGES, UNROLL * BM, 64], RING)
    lane = gl.arange(0, PARTS * 32 * S, layout=gl.SliceLayout(1, COPY))
    byte = gl.arange(0, 16, layout=gl.SliceLayout(0, COPY))
    strip = row_of(lane // 32 % S, block_n, n, BN, PAIRED, HALF) // 16
    place = strip.to(gl.int64) * (k // UNIT * 512) + (lane // (32 * S) * 512 + lane % 32 * 16)
    code_at = codes + place[:, None] + byte[None, :]
    x_lane = gl.arange(0, UNROLL * BM, layout=gl.SliceLayout(1, COPY_X))
    x_row = first_m + x_lane % BM
    x_column = gl.arange(0, 64, layout=gl.SliceLayout(0, COPY_X))
    x_at = x + (x_row.to(gl.int64) * k + x_lane // BM * 64)[:, None] + x_column[None, :]
    x_used = (x_row < rows)[:, None]
    if SCALED:
        TYPE: gl.constexpr = scales.dtype.element_ty
        scale_ring = gl.allocate_shared_memory(TYPE, [STAGES, GROUPS * S, 8, 2], FLAT3)
        s_strip = gl.arange(0, GROUPS * S, layout=gl.SliceLayout(1, gl.SliceLayout(2, COPY_S)))
        s_lane = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, COPY_S)))
        s_half = gl.arange(0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(1, COPY_S)))
        s_row = row_of(s_strip % S, block_n, n, BN, PAIRED, HALF)
        s_column = s_strip // S * (64 // Q)
        s_at = s_row[:, None, None] + (s_lane * 2)[None, :, None] + s_half[None, None, :]
        if SHIFT != NONE:
            shift_ring = gl.allocate_shared_memory(TYPE, [STAGES, GROUPS * S, 8, 2], FLAT3)

    if KIND == FLOAT:
        at_n = gl.arange(0, BN, layout=gl.SliceLayout(1, MMA))
        row_scale = gl.load(scales + row_of(at_n // 16, block_n, n, BN, PAIRED, HALF) + at_n % 16)
    turns = length // (64 * UNROLL)
    for turn in gl.static_range(STAGES - 1):
        if turn < turns:
            at = begin + turn * UNROLL * 64
            copy_async(code_ring.index(turn), code_at + at // UNIT * 512)
            if SCALED:
                s_place = ((at + s_column) // GROUP * n)[:, None, None] + s_at
                copy_async(scale_ring.index(turn), scales + s_place)
                if SHIFT != NONE:
                    copy_async(shift_ring.index(turn), shifts + s_place)
    wait(OVERLAP)
    for turn in gl.static_range(STAGES - 1):
        if turn < turns:
            copy_async(x_ring.index(turn), x_at + (begin + turn * UNROLL * 64), mask=x_used)
        async_copy.commit_group()
    acc = gl.full([BN, BM], 0.0, gl.float32, layout=MMA)
    for turn in range(turns):
        async_copy.wait_group(STAGES - 2)
        fence_async_shared()  # the products read what these copies wrote through another path to shared memory
        gl.thread_barrier()
        ahead = turn + STAGES - 1
        if ahead < turns:
            at = begin + ahead * UNROLL * 64
            free = ahead % STAGES
            copy_async(code_ring.index(free), code_at + at // UNIT * 512)
            if SCALED:
                s_place = ((at + s_column) // GROUP * n)[:, None, None] + s_at
                copy_async(scale_ring.index(free), scales + s_place)
                if SHIFT != NONE:
                    copy_async(shift_ring.index(free), shifts + s_place)
            copy_async(x_ring.index(free), x_at + at, mask=x_used)
        async_copy.commit_group()
        held = turn % STAGES
        for nth in gl.static_range(UNROLL):  # weights are expanded while those before them are multiplied
            w = expanded(
                code_ring.index(held), scale_ring.index(held) if SCALED else x_ring,
                shift_ring.index(held) if SHIFT != NONE else x_ring, nth, KIND, SHIFT, S, Q, COPY, CODES, SCALE, LEFT,
            )  # fmt: skip
            columns = x_ring.index(held).slice(nth * BM, BM, dim=0)
            acc = warpgroup_mma(w, columns.permute((1, 0)), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=(acc,))
    if KIND == FLOAT:
        acc = acc * row_scale[:, None]
    async_copy.wait_group(0)
    finish(
        acc, bias, out, rows, n, first_m, block_n, positions, slots, cos, sin, k_cache, v_cache,
        GATED, DIM, KV_HEADS, BIASED, APART, BM, BN, WARPS,
    )  # fmt: skip
