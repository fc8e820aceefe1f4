"""The product of one token with 4-bit weights in groups, without tensor cores: each program takes a few rows whole.

All codes of its rows are on their way before the input is ready. A nibble becomes a float32 by two instructions: set
under an exponent it is 128 or 2048 more than its value, and what that adds to the sum is taken off beforehand, once for
all rows. Layout of the weights as in grouped.py; called by linear.py.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenmill.kernels.triton.fused.rotated import NOT_ROTATED, HeadPlaces, head_rows, load_angles, load_places
from tokenmill.kernels.triton.launch import INTERPRETED, early, options
from tokenmill.kernels.triton.matmul.grouped import GroupedWeight
from tokenmill.kernels.triton.matmul.skinny import Tiling, tile_rows
from tokenmill.kernels.triton.matmul.vector import write_vector

WIDTH = 32  # words of a row in a block of codes


@triton.jit
def merge_bits(words, MASK: tl.constexpr, EXPONENT: tl.constexpr, INTERPRET: tl.constexpr):
    """(words & MASK) | EXPONENT. In one instruction, for which the compiler would have to keep a constant."""
    if INTERPRET:
        return (words & MASK) | EXPONENT
    else:
        return tl.inline_asm_elementwise(
            "lop3.b32 $0, $1, $2, $3, 0xea;",
            "=r,r,r,r",
            [words, MASK, EXPONENT],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )


@triton.jit
def raised_nibble(words, NIBBLE: tl.constexpr, INTERPRET: tl.constexpr):
    """Nibble NIBBLE of each word as float32, 128 (even ones) or 2048 too much: its bits go where 1 is a unit."""
    SHIFT: tl.constexpr = 4 * NIBBLE - (12 if NIBBLE % 2 else 16)
    shifted = words >> SHIFT if SHIFT > 0 else words << (0 - SHIFT)
    if NIBBLE % 2:
        bits = merge_bits(shifted, 0xF000, 0x45000000, INTERPRET)
    else:
        bits = merge_bits(shifted, 0xF0000, 0x43000000, INTERPRET)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def spread(values, BN: tl.constexpr, BLOCKS: tl.constexpr):
    """A value for each block [BN, BLOCKS] -> for each of the eight threads that read it."""
    wide = tl.broadcast_to(values.to(tl.float32)[:, :, None], (BN, BLOCKS, 8))
    return tl.reshape(wide, (BN, BLOCKS * 8))


@triton.jit
def load_stretch(x, k, K, EVEN: tl.constexpr):
    if EVEN:
        return tl.load(x + k).to(tl.float32)
    else:
        return tl.load(x + k, mask=k < K, other=0.0).to(tl.float32)


@triton.jit
def _grouped_vector(
    x,
    codes,
    scales,
    zeros,
    row_scale,
    bias,
    out,
    heads,
    N,
    K,
    steps,
    BN: tl.constexpr,
    WORDS: tl.constexpr,
    PIECES: tl.constexpr,
    GROUP: tl.constexpr,
    EVEN: tl.constexpr,
    AFFINE: tl.constexpr,
    BIASED: tl.constexpr,
    GATED: tl.constexpr,
    PDL: tl.constexpr,
    Q_HEADS: tl.constexpr,
    K_HEADS: tl.constexpr,
    HD: tl.constexpr,
    PAGE: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """PIECES of WORDS words, whole blocks of 32, make up a row. EVEN: none of them is past its end."""
    tile = tl.program_id(0)
    rows = head_rows(tile, BN, HD, INTERLEAVED) if HD else tile_rows(tile, N, BN, GATED)
    safe = tl.minimum(rows, N - 1)
    BLOCKS: tl.constexpr = WORDS // 32
    GROUPS: tl.constexpr = 256 // GROUP  # of a block
    STRETCHES: tl.constexpr = GROUP // 32  # nibbles of a word that share a scale
    column = tl.arange(0, WORDS)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    held = ()
    for piece in tl.static_range(PIECES):
        block = piece * BLOCKS + column // 32
        place = codes + (block.to(tl.int64)[None, :] * N + safe[:, None]) * 32 + (column % 32)[None, :]
        if EVEN:
            held += (tl.load(place, eviction_policy="evict_first"),)  # type: ignore[assignment]
        else:
            held += (tl.load(place, mask=(block < steps)[None, :], other=0),)  # type: ignore[assignment]
    by, zero = (), ()
    block = tl.arange(0, BLOCKS)
    for line in tl.static_range(PIECES * GROUPS):
        here = (line // GROUPS) * BLOCKS + block
        place = (here.to(tl.int64)[None, :] * GROUPS + line % GROUPS) * N + safe[:, None]
        by += (tl.load(scales + place, mask=(here < steps)[None, :], other=0.0),)  # type: ignore[assignment]
        if AFFINE:
            zero += (tl.load(zeros + place, mask=(here < steps)[None, :], other=0.0),)  # type: ignore[assignment]
    of_row = tl.load(row_scale + safe)
    shift = tl.load(bias + safe).to(tl.float32) if BIASED else of_row
    if PDL:
        tl.extra.cuda.gdc_wait()
    position, slot = load_places(heads, tl.arange(0, 1), 1, HD)
    weighted = tl.zeros([BN, BLOCKS * 8], dtype=tl.float32)  # a value for each thread: it reads four words of a block
    for line in tl.static_range(PIECES * GROUPS):
        k = ((line // GROUPS) * BLOCKS + column // 32) * 256 + (line % GROUPS) * GROUP + column % 32
        inputs = ()
        plain = tl.zeros([WORDS], dtype=tl.float32)
        raised = tl.zeros([WORDS], dtype=tl.float32)
        for inner in tl.static_range(STRETCHES):
            inputs += (load_stretch(x, k + inner * 32, K, EVEN),)  # type: ignore[assignment]
            plain += inputs[inner]
            raised += inputs[inner] * (2056.0 if ((line % GROUPS) * STRETCHES + inner) % 2 else 136.0)
        acc = tl.zeros([BN, WORDS], dtype=tl.float32) - raised[None, :]
        for inner in tl.static_range(STRETCHES):
            nibble = raised_nibble(held[line // GROUPS], (line % GROUPS) * STRETCHES + inner, INTERPRET)
            acc += nibble * inputs[inner][None, :]
        part = tl.sum(tl.reshape(acc, (BN, BLOCKS * 8, 4)), 2)
        if AFFINE:
            part -= spread(zero[line], BN, BLOCKS) * tl.sum(tl.reshape(plain, (BLOCKS * 8, 4)), 1)[None, :]
        weighted += part * spread(by[line], BN, BLOCKS)
    cos, sin = load_angles(heads, position, tile, BN, HD)
    total = tl.sum(weighted, 1) * of_row
    if BIASED:
        total += shift
    write_vector(
        total, cos, sin, slot, out, heads, tile, N, BN, GATED, Q_HEADS, K_HEADS, HD, PAGE, INTERLEAVED
    )  # fmt: skip


def grouped_vector_matmul(
    x: Tensor,
    weight: GroupedWeight,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    tiling: Tiling = Tiling(rows=4),  # noqa: B008
    gated: bool = False,
    heads: HeadPlaces | None = None,
) -> Tensor:
    """x bf16 [1, K] @ weight^T (+ bias), arguments as `grouped_matmul` has them; of `tiling` rows and warps count."""
    assert weight.bits == 4 and weight.codes.shape[2] == WIDTH <= weight.group, "kind int4"  # noqa: PT018
    words = WIDTH * weight.codes.shape[0]
    piece = min(128 * tiling.warps, triton.next_power_of_2(words))
    width = weight.rows // 2 if gated else weight.rows
    out = heads.queries if heads else torch.empty(1, width, dtype=out_dtype, device=x.device)
    _grouped_vector[(triton.cdiv(weight.rows, tiling.rows),)](
        x,
        weight.codes,
        weight.scales,
        weight.zeros,
        weight.row_scale,
        bias,
        out,
        heads.tensors if heads else None,
        weight.rows,
        weight.depth,
        weight.codes.shape[0],
        BN=tiling.rows,
        WORDS=piece,
        PIECES=triton.cdiv(words, piece),
        GROUP=weight.group,
        EVEN=words % piece == 0 and weight.depth == 8 * words,
        AFFINE=weight.zeros is not None,
        BIASED=bias is not None,
        GATED=gated,
        PDL=early(x.device),
        **(heads.constants if heads else NOT_ROTATED),
        INTERPRET=INTERPRETED,
        **options(x.device, tiling.warps, 1),
    )
    return out
