"""What both Hopper products of 4-bit groups do to a block of codes: nibbles become weights, in registers.

Weights are bf16 or float16, as tokens are: of the type in which scales and zeros are loaded. Knows the order of nibbles
in grouped.py's layout and how scales and zeros of a block are read. Knows nothing of tiles, copies and sums. Used by
narrow.py and wide.py.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

WORDS = gl.constexpr(32)  # of a row in a block of codes; also the depth of one stretch of nibbles


@gluon.constexpr_function
def unpack_text(place, affine, half):
    """Two nibbles at 4 * place of two halves of a register -> ((128 + n) - 136 [- zero]) * scale, as a pair of bf16; of
    float16 with 1024 for 128."""
    one, middle, kind = ("6400", "6408", "f16x2") if half else ("4300", "4308", "bf16x2")
    shift = f"shr.u32 t, $1, {4 * place};" if place else "mov.b32 t, $1;"
    minus = f"sub.rn.{kind} t, t, $3;" if affine else ""
    return (
        f"{{ .reg .b32 t, middle; mov.b32 middle, 0x{middle}{middle}; "
        + shift
        + f" lop3.b32 t, t, 0x000f000f, 0x{one}{one}, 0xea; sub.rn.{kind} t, t, middle; "
        + minus
        + f" mul.rn.{kind} $0, t, $2; }}"
    )


@gluon.jit
def halves_of(words):
    """int32 -> lower and upper 16 bits, those of neighbours side by side in one register."""
    low = gl.inline_asm_elementwise(
        "prmt.b32 $0, $1, $2, 0x5410;", "=r,r,r", [words], dtype=gl.int16, is_pure=True, pack=2
    )
    high = gl.inline_asm_elementwise(
        "prmt.b32 $0, $1, $2, 0x7632;", "=r,r,r", [words], dtype=gl.int16, is_pure=True, pack=2
    )
    return low, high


@gluon.jit
def unpack(halves, scale, zero, PLACE: gl.constexpr, AFFINE: gl.constexpr):
    """The weights of one stretch [rows, WORDS]."""
    if AFFINE:
        return gl.inline_asm_elementwise(
            unpack_text(PLACE, True, scale.dtype == gl.float16),
            "=r,r,r,r",
            [halves, scale[:, None], zero[:, None]],
            dtype=scale.dtype,
            is_pure=True,
            pack=2,
        )
    else:
        return gl.inline_asm_elementwise(
            unpack_text(PLACE, False, scale.dtype == gl.float16),
            "=r,r,r",
            [halves, scale[:, None]],
            dtype=scale.dtype,
            is_pure=True,
            pack=2,
        )


@gluon.jit
def load_pair(base, N, TYPE: gl.constexpr):
    return gl.load(base).to(TYPE), gl.load(base + N).to(TYPE)


@gluon.jit
def load_lines(base, N, LINES: gl.constexpr, TYPE: gl.constexpr):
    """Scales or zeros of the groups of a block, one tensor [rows] each."""
    gl.static_assert((LINES == 2) | (LINES == 4) | (LINES == 8))
    if LINES == 2:
        return load_pair(base, N, TYPE)
    elif LINES == 4:
        return load_pair(base, N, TYPE) + load_pair(base + 2 * N, N, TYPE)
    else:
        low = load_pair(base, N, TYPE) + load_pair(base + 2 * N, N, TYPE)
        return low + load_pair(base + 4 * N, N, TYPE) + load_pair(base + 6 * N, N, TYPE)
