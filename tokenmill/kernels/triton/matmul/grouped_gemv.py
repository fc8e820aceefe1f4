"""The product of one token with 4-bit weights in groups, without tensor cores: each program takes a few whole rows.

All codes of its rows are requested before the input is ready. A nibble becomes a float32 by two instructions: its bits
are put under an exponent, where it is 128 or 2048 more than its value, and what that adds to the sum is subtracted
beforehand, once for all rows. Layout of the weights as in grouped.py; called by linear.py.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenmill.kernels.triton.fused.rotary_epilogue import (
    NOT_ROTATED,
    HeadPlaces,
    head_rows,
    load_angles,
    load_places,
)
from tokenmill.kernels.triton.matmul.choose import Tiling
from tokenmill.kernels.triton.matmul.gemv import write_vector
from tokenmill.kernels.triton.matmul.grouped import GroupedWeight
from tokenmill.kernels.triton.matmul.tile import tile_rows
from tokenmill.kernels.triton.shared.launch import INTERPRETED, options, uses_pdl

BLOCK_WORDS = 32  # words of a row in a block of codes


class Variant(NamedTuple):
    """What a launch is compiled for."""

    rows: int  # of a program
    words: int  # of a piece of the rows: whole blocks of 32
    pieces: int  # that make up a row
    even: bool  # none of them is past its end
    group: int
    gated: bool
    pdl: bool
    interpreted: bool


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
def _grouped_gemv(
    x, x_scale, weight, bias, out, heads, N, K, steps, VARIANT: tl.constexpr, LAYOUT: tl.constexpr
):  # fmt: skip
    BN: tl.constexpr = VARIANT.rows
    WORDS: tl.constexpr = VARIANT.words
    PIECES: tl.constexpr = VARIANT.pieces
    EVEN: tl.constexpr = VARIANT.even
    GROUP: tl.constexpr = VARIANT.group
    GATED: tl.constexpr = VARIANT.gated
    INTERPRET: tl.constexpr = VARIANT.interpreted
    tile = tl.program_id(0)
    rows = head_rows(tile, BN, LAYOUT) if LAYOUT.head_dim else tile_rows(tile, N, BN, GATED)
    safe = tl.minimum(rows, N - 1)
    BLOCKS: tl.constexpr = WORDS // 32
    GROUPS: tl.constexpr = 256 // GROUP  # of a block
    STRETCHES: tl.constexpr = GROUP // 32  # nibbles of a word that share a scale
    column = tl.arange(0, WORDS)
    if VARIANT.pdl:
        tl.extra.cuda.gdc_launch_dependents()
    early = ()
    for piece in tl.static_range(PIECES):
        block = piece * BLOCKS + column // 32
        place = weight.codes + (block.to(tl.int64)[None, :] * N + safe[:, None]) * 32 + (column % 32)[None, :]
        if EVEN:
            early += (tl.load(place, eviction_policy="evict_first"),)  # type: ignore[assignment]
        else:
            early += (tl.load(place, mask=(block < steps)[None, :], other=0),)  # type: ignore[assignment]
    by, zero = (), ()
    block = tl.arange(0, BLOCKS)
    for line in tl.static_range(PIECES * GROUPS):
        here = (line // GROUPS) * BLOCKS + block
        place = (here.to(tl.int64)[None, :] * GROUPS + line % GROUPS) * N + safe[:, None]
        by += (tl.load(weight.scales + place, mask=(here < steps)[None, :], other=0.0),)  # type: ignore[assignment]
        if weight.zeros is not None:
            zero += (tl.load(weight.zeros + place, mask=(here < steps)[None, :], other=0.0),)  # type: ignore[assignment]
    of_row = tl.load(weight.row_scale + safe)
    shift = tl.load(bias + safe).to(tl.float32) if bias is not None else of_row
    if VARIANT.pdl:
        tl.extra.cuda.gdc_wait()
    position, slot = load_places(heads, tl.arange(0, 1), 1, LAYOUT)
    if x_scale is not None:
        of_row *= tl.load(x_scale)
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
            nibble = raised_nibble(early[line // GROUPS], (line % GROUPS) * STRETCHES + inner, INTERPRET)
            acc += nibble * inputs[inner][None, :]
        part = tl.sum(tl.reshape(acc, (BN, BLOCKS * 8, 4)), 2)
        if weight.zeros is not None:
            part -= spread(zero[line], BN, BLOCKS) * tl.sum(tl.reshape(plain, (BLOCKS * 8, 4)), 1)[None, :]
        weighted += part * spread(by[line], BN, BLOCKS)
    cos, sin = load_angles(heads, position, tile, BN, LAYOUT)
    total = tl.sum(weighted, 1) * of_row
    if bias is not None:
        total += shift
    write_vector(total, cos, sin, slot, out, heads, tile, N, BN, GATED, LAYOUT)


def grouped_gemv(
    x: Tensor,
    weight: GroupedWeight,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    tiling: Tiling = Tiling(rows=4),  # noqa: B008
    gated: bool = False,
    heads: HeadPlaces | None = None,
    x_scale: Tensor | None = None,
) -> Tensor:
    """x [1, K] @ weight^T (+ bias), arguments as `grouped_matmul` has them; of `tiling` rows and warps count."""
    assert weight.bits == 4 and weight.codes.shape[2] == BLOCK_WORDS <= weight.group, "kind int4"  # noqa: PT018
    words = BLOCK_WORDS * weight.codes.shape[0]
    piece = min(128 * tiling.warps, triton.next_power_of_2(words))
    width = weight.rows // 2 if gated else weight.rows
    out = heads.queries if heads else torch.empty(1, width, dtype=out_dtype, device=x.device)
    variant = Variant(
        rows=tiling.rows,
        words=piece,
        pieces=triton.cdiv(words, piece),
        even=words % piece == 0 and weight.depth == 8 * words,
        group=weight.group,
        gated=gated,
        pdl=uses_pdl(x.device),
        interpreted=INTERPRETED,
    )
    _grouped_gemv[(triton.cdiv(weight.rows, tiling.rows),)](
        x,
        x_scale,
        weight.tensors,
        bias,
        out,
        heads.tensors if heads else None,
        weight.rows,
        weight.depth,
        weight.codes.shape[0],
        VARIANT=variant,
        LAYOUT=heads.layout if heads else NOT_ROTATED,
        **options(x.device, tiling.warps, 1),
    )
    return out
