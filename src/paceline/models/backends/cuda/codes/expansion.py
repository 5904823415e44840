"""Codes expanded to weights in bf16, in registers: each is rounded once, as if expanded beforehand.

A tile is (strips, 8, 4, ...): lane (g, t) of a warp has rows g and g + 8 of a strip, as `codes.laid_out` stores them.
"""
# mypy: disable-error-code="no-redef"

from __future__ import annotations

import triton.experimental.gluon.language as gl
from triton.experimental import gluon

# Inline code takes four bytes of codes in a register. Two neighbouring results, of one row, are at bytes 0 and 2, or 1
# and 3, so that a mask finds both.

# Codes 0..15, low and high, become bits 4..7 of a bf16 number, whose value is then code * 2^-129: in numbers this
# small the lowest bit of the exponent counts like one of the mantissa.
LEAST = gl.constexpr(
    "{ .reg .b32 a, b, c; shl.b32 a, $4, 4; shr.u32 b, $4, 4; shr.u32 c, $4, 8;"
    " and.b32 $0, a, 0x00F000F0; and.b32 $1, b, 0x00F000F0; and.b32 $2, $4, 0x00F000F0; and.b32 $3, c, 0x00F000F0; }"
)
# scale * 2^129, and -8 * scale: both exact, for a scale below 1/2.
FACTORS = gl.constexpr(
    "{ .reg .b32 a, b; mov.b32 a, 0x5F805F80; mov.b32 b, 0x60006000; mul.rn.bf16x2 a, $2, a; mul.rn.bf16x2 $0, a, b;"
    " mov.b32 b, 0xC100C100; mul.rn.bf16x2 $1, $2, b; }"
)
# code * scale - 8 * scale, rounded once.
FUSED = gl.constexpr("fma.rn.bf16x2 $0, $1, $2, $3;")
# Codes low and high: 0x4300 is 128 as bf16, and a code becomes its last bits.
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
NONE = gl.constexpr(0)  # shifts beside scales
ZEROS = gl.constexpr(1)
OFFSETS = gl.constexpr(2)


@gluon.jit
def rounded(codes, scale, shift, KIND: gl.constexpr, SHIFT: gl.constexpr):
    """Expand bytes to (code - zero) * scale or code * scale + offset in fp32, rounded to bf16."""
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
    """Expand (S, 8, 4, Q, 4 / Q, 2, 2) bytes with (S, 8, 1, Q, 1, 2, 1) scales -> (16 S, 64) in bf16."""
    if scale.dtype == gl.float32 or SHIFT == OFFSETS:
        low, high = gl.inline_asm_elementwise(BYTES, "=r,=r,r", [codes], dtype=(gl.int8, gl.int8), is_pure=True, pack=4)
        low = rounded(low, scale, shift, NIBBLE, SHIFT)
        high = rounded(high, scale, shift, NIBBLE, SHIFT)
    elif scale.dtype == gl.bfloat16 and SHIFT == NONE:
        low, high = gl.inline_asm_elementwise(
            LEAST, "=r,=r,=r,=r,r", [codes], dtype=(gl.bfloat16, gl.bfloat16), is_pure=True, pack=4
        )
        factor, eight = gl.inline_asm_elementwise(
            FACTORS, "=r,=r,r", [scale], dtype=(gl.bfloat16, gl.bfloat16), is_pure=True, pack=2
        )
        low = gl.inline_asm_elementwise(
            FUSED, "=r,r,r,r", [low, factor, eight], dtype=gl.bfloat16, is_pure=True, pack=2
        )
        high = gl.inline_asm_elementwise(
            FUSED, "=r,r,r,r", [high, factor, eight], dtype=gl.bfloat16, is_pure=True, pack=2
        )
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
def of_bytes(codes, scale, shift, KIND: gl.constexpr, SHIFT: gl.constexpr):
    """Expand 32 columns of weights of a byte each; FLOAT without its scale."""
    if KIND == FLOAT:
        w = gl.inline_asm_elementwise(FLOATS, "=r,=r,r", [codes], dtype=gl.bfloat16, is_pure=True, pack=4)
    else:
        w = rounded(codes, scale, shift, KIND, SHIFT)
    return w


@gluon.jit
def of_both(first, second, S: gl.constexpr):
    """Join two times 32 columns, (S, 8, 4, 2, 2, 2, 2) -> (16 S, 64)."""
    # (strip, lane's row, lane's pair, 16 columns, 8 of them, upper or lower row, one of a pair, 32 columns)
    return gl.join(first, second).permute((0, 5, 1, 7, 3, 4, 2, 6)).reshape([16 * S, 64])
