"""4-bit codes of expert stacks as tensor-core operands, in registers: eight parts of a tile of words, scaled.

Signed codes lie as matmul/grouped.py says and E2M1 codes as stack.py says. Two values are scaled by one instruction.
The interpreter knows bf16 only as bits, so there all of this is float32. Inlined into product.py.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl

from tokenmill.kernels.triton.matmul.grouped import load_lines, unpack_words


@triton.jit
def e2m1_bits(words, PART: tl.constexpr):
    """Part PART of each word as the upper half of a float32 that is 2^-126 of its value."""
    half = words >> (16 * (PART // 4))
    if PART % 4 == 3:
        return ((half << 1) & 0x8000) | ((half >> 5) & 0x0100) | ((half >> 4) & 0x00C0)
    else:
        return (half << (3 * (PART % 4))) & 0x81C0


@triton.jit
def unpack_e2m1(words, INTERPRET: tl.constexpr):
    """int32 -> its eight values as bf16, times 2^-126. Two words at a time."""
    if INTERPRET:
        n0 = (e2m1_bits(words, 0) << 16).to(tl.float32, bitcast=True)
        n1 = (e2m1_bits(words, 1) << 16).to(tl.float32, bitcast=True)
        n2 = (e2m1_bits(words, 2) << 16).to(tl.float32, bitcast=True)
        n3 = (e2m1_bits(words, 3) << 16).to(tl.float32, bitcast=True)
        n4 = (e2m1_bits(words, 4) << 16).to(tl.float32, bitcast=True)
        n5 = (e2m1_bits(words, 5) << 16).to(tl.float32, bitcast=True)
        n6 = (e2m1_bits(words, 6) << 16).to(tl.float32, bitcast=True)
        n7 = (e2m1_bits(words, 7) << 16).to(tl.float32, bitcast=True)
        return n0, n1, n2, n3, n4, n5, n6, n7
    else:
        return tl.inline_asm_elementwise(
            """
            {
            .reg .b32 a, e, s, t, u;
            prmt.b32 a, $8, $9, 0x5410;
            prmt.b32 e, $8, $9, 0x7632;
            and.b32 $0, a, 0x81c081c0;
            shl.b32 s, a, 3;
            and.b32 $1, s, 0x81c081c0;
            shl.b32 s, a, 6;
            and.b32 $2, s, 0x81c081c0;
            shl.b32 s, a, 1;
            shr.u32 t, a, 5;
            shr.u32 u, a, 4;
            and.b32 t, t, 0x01000100;
            lop3.b32 s, s, 0x80008000, t, 0xea;
            lop3.b32 $3, u, 0x00c000c0, s, 0xea;
            and.b32 $4, e, 0x81c081c0;
            shl.b32 s, e, 3;
            and.b32 $5, s, 0x81c081c0;
            shl.b32 s, e, 6;
            and.b32 $6, s, 0x81c081c0;
            shl.b32 s, e, 1;
            shr.u32 t, e, 5;
            shr.u32 u, e, 4;
            and.b32 t, t, 0x01000100;
            lop3.b32 s, s, 0x80008000, t, 0xea;
            lop3.b32 $7, u, 0x00c000c0, s, 0xea;
            }
            """,
            "=r,=r,=r,=r,=r,=r,=r,=r,r,r",
            [words],
            dtype=(
                tl.bfloat16,
                tl.bfloat16,
                tl.bfloat16,
                tl.bfloat16,
                tl.bfloat16,
                tl.bfloat16,
                tl.bfloat16,
                tl.bfloat16,
            ),
            is_pure=True,
            pack=2,
        )


@triton.jit
def scale_part(part, scale, INTERPRET: tl.constexpr):
    """part [BN, W] * scale [BN]."""
    if INTERPRET:
        return part * scale[:, None]
    else:
        return tl.inline_asm_elementwise(
            "mul.rn.bf16x2 $0, $1, $2;", "=r,r,r", [part, scale[:, None]], dtype=tl.bfloat16, is_pure=True, pack=2
        )


@triton.jit
def e2m1_scale(word, GROUP: tl.constexpr, INTERPRET: tl.constexpr):
    """The scale of group GROUP of a block, times 2^126, from its exponents [BN], one in each byte."""
    exponent = (word >> (8 * GROUP)) & 255
    if INTERPRET:
        return (exponent << 23).to(tl.float32, bitcast=True)
    else:
        return (exponent << 7).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def load_parts(weight, row, step, R, VARIANT: tl.constexpr):
    """Block `step` of rows [BN] of a stack: its eight parts [BN, words], scaled, as operands."""
    W: tl.constexpr = VARIANT.words
    INTERPRET: tl.constexpr = VARIANT.interpreted
    inner = tl.arange(0, W)
    place = (tl.cast(step, tl.int64) * R + row)[:, None] * W + inner[None, :]
    words = tl.load(weight.codes + place, eviction_policy="evict_first")
    scaled = ()
    if VARIANT.kind == "mxfp4":
        parts = unpack_e2m1(words, INTERPRET)
        exponents = tl.load(weight.scales + tl.cast(step, tl.int64) * R + row)
        for part in tl.static_range(8):
            scale = e2m1_scale(exponents, part * W // 32, INTERPRET)
            scaled += (scale_part(parts[part], scale, INTERPRET),)  # type: ignore[assignment]
    else:
        parts = unpack_words(words, tl.bfloat16, INTERPRET)
        GROUP: tl.constexpr = VARIANT.group
        LINES: tl.constexpr = 8 * W // GROUP
        line = tl.cast(step, tl.int64) * LINES * R + row
        scales = load_lines(weight.scales + line, R, LINES)
        if weight.zeros is not None:
            zeros = load_lines(weight.zeros + line, R, LINES)
        for part in tl.static_range(8):
            values = parts[part]
            if weight.zeros is not None:
                values = values - zeros[part * W // GROUP][:, None].to(values.dtype)
            scale = scales[part * W // GROUP].to(values.dtype)
            scaled += (scale_part(values, scale, INTERPRET),)  # type: ignore[assignment]
    return scaled
