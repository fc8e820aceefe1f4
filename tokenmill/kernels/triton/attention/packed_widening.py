"""Codes of quantized KV rows as 16-bit floats, and the scales of rows, for packed_kernel.py.

An element of a page is 16 bits: two int8, or four codes of 4 bits. That is what the instruction that loads operands of
the tensor core from shared memory moves, so codes arrive where their floats are multiplied and are widened there, two
elements in a register, without an instruction that converts: code bits become the last bits of 1024 + code, and 1024 is
subtracted. A codebook is looked up by byte permutation: eight codes at once, two tables of eight bytes in registers.

Instructions for eight values, those of the integer pipe (which takes one in two cycles) in brackets: int8 10 (6), 4-bit
integers 9 (5), codebook 19 (19). The PTX is text that `tests/unit/kernels/test_packed_widening.py` also executes.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl

from tokenmill.kernels import packed_pages

INT8_FLOAT = tl.constexpr(packed_pages.INT8_FLOAT)
HIDDEN_ZERO = tl.constexpr(packed_pages.HIDDEN_ZERO)
CODEBOOK = tl.constexpr(packed_pages.CODEBOOK)

# Two int8 each: $2 -> the low ones in $0, the high ones in $1.
OCTETS = """
    {
    .reg .b32 u, m;
    mov.b32 m, 0x64806480;
    xor.b32 u, $2, 0x80808080;
    prmt.b32 $0, u, 0x64646464, 0x4240;
    prmt.b32 $1, u, 0x64646464, 0x4341;
    sub.f16x2 $0, $0, m;
    sub.f16x2 $1, $1, m;
    }
"""

# Four codes each: $4 -> the lowest ones in $0, and so on. Those in the upper half of a byte are 1024 + 16 * code first.
NIBBLES = """
    {
    .reg .b32 u, m, f, n;
    mov.b32 m, 0x64006400;
    mov.b32 f, 0x2c002c00;
    mov.b32 n, 0xd400d400;
    shr.u32 u, $4, 8;
    lop3.b32 $0, $4, 0x000f000f, m, 0xea;
    lop3.b32 $1, $4, 0x00f000f0, m, 0xea;
    lop3.b32 $2, u, 0x000f000f, m, 0xea;
    lop3.b32 $3, u, 0x00f000f0, m, 0xea;
    sub.f16x2 $0, $0, m;
    fma.rn.f16x2 $1, $1, f, n;
    sub.f16x2 $2, $2, m;
    fma.rn.f16x2 $3, $3, f, n;
    }
"""


def codebook_lookup(halves: tuple[int, ...]) -> str:
    """As NIBBLES, of the level of each code, whose magnitudes have these bits: 8 + i is level i, 7 - i its negative.

    z: codes of both elements side by side, a0 b0 a1 b1 c0 d0 c1 d1. s: their magnitudes' numbers. l and h: low and high
    bytes of four levels, negative ones; h is then made positive where the code is 8 or more.
    """
    low, high = ([half >> shift & 255 for half in halves] for shift in (0, 8))
    words = [
        sum(each << 8 * place for place, each in enumerate(part))
        for part in (low[:4], low[4:], *([byte | 128 for byte in part] for part in (high[:4], high[4:])))
    ]
    tables = "\n    ".join(f"mov.b32 t{number}, {word:#010x};" for number, word in enumerate(words))
    return f"""
    {{
    .reg .b32 t0, t1, t2, t3, z, s, u, l, h;
    {tables}
    prmt.b32 z, $4, $4, 0x3120;
    lop3.b32 s, z, 0x88888888, 0, 0x0c;
    shr.u32 u, s, 3;
    sub.u32 s, s, u;
    lop3.b32 s, z, s, 0x77777777, 0x28;
    shl.b32 u, z, 4;
    prmt.b32 l, t0, t1, s;
    prmt.b32 h, t2, t3, s;
    shr.u32 s, s, 16;
    prmt.b32 $0, u, z, 0x5140;
    lop3.b32 h, h, $0, 0x80808080, 0x78;
    prmt.b32 $0, l, h, 0x6240;
    prmt.b32 $1, l, h, 0x7351;
    prmt.b32 l, t0, t1, s;
    prmt.b32 h, t2, t3, s;
    prmt.b32 $2, u, z, 0x7362;
    lop3.b32 h, h, $2, 0x80808080, 0x78;
    prmt.b32 $2, l, h, 0x6240;
    prmt.b32 $3, l, h, 0x7351;
    }}
"""


_OCTETS = tl.constexpr(OCTETS)
_NIBBLES = tl.constexpr(NIBBLES)
_LEVELS = tl.constexpr(codebook_lookup(packed_pages.CODEBOOK_HALVES))


@triton.jit
def row_scales(numbers, KIND: tl.constexpr, HEAD_DIM: tl.constexpr):
    """(scale, zero) of rows, float32; levels of a codebook are those of rows of length sqrt(HEAD_DIM)."""
    if KIND == HIDDEN_ZERO:
        scale = (numbers & -16).to(tl.float32, bitcast=True)
        return scale, (numbers & 15).to(tl.float32)
    else:
        scale = numbers.to(tl.float32)
        if KIND == CODEBOOK:
            scale *= HEAD_DIM**-0.5
        return scale, scale * 0.0


@triton.jit
def paired_scales(numbers):
    """(scale, zero) of the even and (scale, zero) of the odd dimensions of rows, float32: two halves in 32 bits."""
    even, odd = numbers, numbers >> 16  # zero points from 32 bits: 16 take the slow conversion
    even_scale = (even & -16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    odd_scale = (odd & -16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return even_scale, (even & 15).to(tl.float32), odd_scale, (odd & 15).to(tl.float32)


@triton.jit
def widen_octets(codes):
    """Two int8 in 16 bits -> (low, high) as float16."""
    return tl.inline_asm_elementwise(
        _OCTETS, "=&r,=&r,r", [codes], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
    )


@triton.jit
def widen_nibbles(codes, IS_CODEBOOK: tl.constexpr):
    """Four codes in 16 bits -> their float16, the lowest first."""
    return tl.inline_asm_elementwise(
        _LEVELS if IS_CODEBOOK else _NIBBLES,
        "=&r,=&r,=&r,=&r,r",
        [codes],
        dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
        is_pure=True,
        pack=2,
    )


@triton.jit
def interpreted_nibble(codes, PLACE: tl.constexpr, levels, KIND: tl.constexpr, HEAD_DIM: tl.constexpr):
    code = (codes.to(tl.int32) >> (4 * PLACE)) & 15
    if KIND == CODEBOOK:
        return tl.load(levels + code) * HEAD_DIM**0.5
    else:
        return code.to(tl.float32)


@triton.jit
def widen(codes, levels, KIND: tl.constexpr, HEAD_DIM: tl.constexpr, COMPUTE: tl.constexpr, INTERPRET: tl.constexpr):
    """int16 elements -> the floats of their dimensions; of int8 there are two, and the last two are the first again."""
    if KIND <= INT8_FLOAT:
        if INTERPRET:
            a, b = ((codes << 8) >> 8).to(COMPUTE), (codes >> 8).to(COMPUTE)
        else:
            a, b = widen_octets(codes)
            a, b = a.to(COMPUTE), b.to(COMPUTE)
        return a, b, a, b
    else:
        if INTERPRET:
            a = interpreted_nibble(codes, 0, levels, KIND, HEAD_DIM)
            b = interpreted_nibble(codes, 1, levels, KIND, HEAD_DIM)
            c = interpreted_nibble(codes, 2, levels, KIND, HEAD_DIM)
            d = interpreted_nibble(codes, 3, levels, KIND, HEAD_DIM)
        else:
            a, b, c, d = widen_nibbles(codes, KIND == CODEBOOK)
        return a.to(COMPUTE), b.to(COMPUTE), c.to(COMPUTE), d.to(COMPUTE)
