"""Products with weights of 4 or 8 bits in groups along the depth: w = scale * (code - zero), per row and group.

Serves GPTQ, AWQ and compressed-tensors int4, and every GGUF block type (repack.py brings them to this form). Codes lie
so that a tile is contiguous and the nibbles of a word belong to eight different stretches of the depth: each is a
tensor-core operand of its own and unpacking needs no shuffle. Scales are applied to a group's partial sum; to the
weights, in registers, before the product where many tokens leave no room for that or groups are small.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from dataclasses import dataclass
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
    write_heads,
)
from tokenmill.kernels.triton.matmul.choose import Tiling, choose_splits, folds_scales
from tokenmill.kernels.triton.matmul.tile import (
    SplitSums,
    multiply,
    prefetch_rows,
    tile_rows,
    write_gated,
    write_tile,
)
from tokenmill.kernels.triton.shared.device import arrive_last, sum_partials
from tokenmill.kernels.triton.shared.launch import INTERPRETED, options, uses_pdl, workspace


class GroupedTensors(NamedTuple):
    """The tensors of a GroupedWeight, as kernels take them."""

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    row_scale: Tensor


class Variant(NamedTuple):
    """What a launch is compiled for."""

    tokens: int  # of a tile
    rows: int  # of the matrix in a tile
    width: int  # words (4 bits) or codes (8 bits) of a row in a block
    group: int
    bits: int
    split: bool
    even_depth: bool  # the depth is a multiple of a block's
    fold: bool  # scales go into the weights, not into a group's partial sum
    gated: bool
    prefetch_lines: int
    pdl: bool
    interpreted: bool


@dataclass(frozen=True, slots=True)
class GroupedWeight:
    """bits 4: codes int32 [blocks, N, words]; nibble i of word j, less 8, is place words * i + j of its block of
    8 * words. bits 8: codes int8 [groups, N, group]. scales float16 [groups, N], relative to row_scale float32 [N];
    zeros bfloat16 like scales, None where all are zero. `depth` is K before padding to whole blocks (scale 0 there)."""

    bits: int
    group: int
    depth: int
    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    row_scale: Tensor

    @property
    def rows(self) -> int:
        return self.codes.shape[1]

    @property
    def block(self) -> int:
        """Values of a row in one block of codes."""
        return self.codes.shape[2] * (8 if self.bits == 4 else 1)

    @property
    def tensors(self) -> GroupedTensors:
        return GroupedTensors(self.codes, self.scales, self.zeros, self.row_scale)

    @property
    def nbytes(self) -> int:
        tensors = [self.codes, self.scales, self.row_scale] + ([] if self.zeros is None else [self.zeros])
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@triton.constexpr_function
def unpack_text(half):
    """Two words -> their eight pairs of nibbles, less 8, in 16-bit floats: under the exponent at which 1 is a unit a
    nibble is 128 (bf16) or 1024 (float16) more than its value."""
    one, middle, kind = ("6400", "6408", "f16x2") if half else ("4300", "4308", "bf16x2")
    shifts = [
        f"shr.u32 {to}, {of}, {by};"
        for of, others in (("a", "bcd"), ("e", "fgh"))
        for to, by in zip(others, (4, 8, 12), strict=True)
    ]
    merges = [f"lop3.b32 {each}, {each}, 0x000f000f, 0x{one}{one}, 0xea;" for each in "abcdefgh"]
    results = [f"sub.rn.{kind} ${number}, {each}, bias;" for number, each in enumerate("abcdefgh")]
    head = f".reg .b32 a, b, c, d, e, f, g, h, bias; mov.b32 bias, 0x{middle}{middle};"
    halves = "prmt.b32 a, $8, $9, 0x5410; prmt.b32 e, $8, $9, 0x7632;"
    return " ".join(["{", head, halves, *shifts, *merges, *results, "}"])


@triton.jit
def unpack_words(words, T: tl.constexpr, INTERPRET: tl.constexpr):
    """int32 -> its eight nibbles, less 8, in type T, bf16 or float16. Two words at a time.

    The interpreter knows bf16 only as bits, so there all of this is float32."""
    if INTERPRET:
        n0 = (words & 15).to(tl.float32) - 8.0
        n1 = ((words >> 4) & 15).to(tl.float32) - 8.0
        n2 = ((words >> 8) & 15).to(tl.float32) - 8.0
        n3 = ((words >> 12) & 15).to(tl.float32) - 8.0
        n4 = ((words >> 16) & 15).to(tl.float32) - 8.0
        n5 = ((words >> 20) & 15).to(tl.float32) - 8.0
        n6 = ((words >> 24) & 15).to(tl.float32) - 8.0
        n7 = ((words >> 28) & 15).to(tl.float32) - 8.0
        return n0, n1, n2, n3, n4, n5, n6, n7
    else:
        return tl.inline_asm_elementwise(
            unpack_text(tl.float16 == T),
            "=r,=r,=r,=r,=r,=r,=r,=r,r,r",
            [words],
            dtype=(T.value, T.value, T.value, T.value, T.value, T.value, T.value, T.value),
            is_pure=True,
            pack=2,
        )


@triton.jit
def load_lines(pointer, N, LINES: tl.constexpr):
    """The values of LINES neighbouring groups, one tensor each; `pointer` [BN] is at the first group."""
    if LINES == 1:
        return (tl.load(pointer),)
    elif LINES == 2:
        return tl.load(pointer), tl.load(pointer + N)
    elif LINES == 4:
        return tl.load(pointer), tl.load(pointer + N), tl.load(pointer + 2 * N), tl.load(pointer + 3 * N)
    else:
        tl.static_assert(LINES == 8)
        low = tl.load(pointer), tl.load(pointer + N), tl.load(pointer + 2 * N), tl.load(pointer + 3 * N)
        pointer += 4 * N
        high = tl.load(pointer), tl.load(pointer + N), tl.load(pointer + 2 * N), tl.load(pointer + 3 * N)
        return low + high


@triton.jit
def add_stretches(
    acc,
    parts,
    x_rows,
    k,
    K,
    scales,
    zeros,
    STRETCHES: tl.constexpr,
    PER_GROUP: tl.constexpr,
    EVEN_K: tl.constexpr,
    FOLD: tl.constexpr,
    AFFINE: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """acc [BN, BM] += the product of STRETCHES parts [BN, W] with x at k, k + W, ...;
    PER_GROUP of them share a scale."""
    for first in tl.static_range(0, STRETCHES, PER_GROUP):
        scale = scales[first // PER_GROUP]
        if FOLD:
            partial = acc
        else:
            partial = tl.zeros_like(acc)
        for inner in tl.static_range(PER_GROUP):
            part = parts[first + inner]
            offset = k + (first + inner) * part.shape[1]
            if EVEN_K:
                x_tile = tl.load(x_rows[None, :] + offset[:, None])
            else:
                x_tile = tl.load(x_rows[None, :] + offset[:, None], mask=offset[:, None] < K, other=0.0)
            x_tile = x_tile.to(part.dtype)  # 8-bit inputs; others are of that type
            if AFFINE:
                part = part - zeros[first // PER_GROUP][:, None].to(part.dtype)
            if FOLD:
                part = part * scale[:, None].to(part.dtype)
            partial = multiply(part, x_tile, partial, False, INTERPRET)
        if FOLD:
            acc = partial
        else:
            acc += partial * scale[:, None].to(tl.float32)
    return acc


@triton.jit(do_not_specialize=["M", "splits"])
def _grouped(
    x, x_scale, weight, bias, out, heads, sums, M, N, K, steps, x_stride, out_stride, splits,
    VARIANT: tl.constexpr, LAYOUT: tl.constexpr,
):  # fmt: skip
    """x [M, K] @ weight [N, K]^T, `steps` blocks of codes deep; `heads` and LAYOUT are the rotary epilogue's.
    x may be of 8 bits, x_scale [M] then is its scales: every such number is a float16."""
    TYPE: tl.constexpr = tl.float16 if x.dtype.element_ty.primitive_bitwidth == 8 else x.dtype.element_ty
    BM: tl.constexpr = VARIANT.tokens
    BN: tl.constexpr = VARIANT.rows
    WIDTH: tl.constexpr = VARIANT.width
    GROUP: tl.constexpr = VARIANT.group
    BITS: tl.constexpr = VARIANT.bits
    EVEN_K: tl.constexpr = VARIANT.even_depth
    FOLD: tl.constexpr = VARIANT.fold
    GATED: tl.constexpr = VARIANT.gated
    INTERPRET: tl.constexpr = VARIANT.interpreted
    PREFETCH_LINES: tl.constexpr = VARIANT.prefetch_lines
    AFFINE: tl.constexpr = weight.zeros is not None
    tile, split, token_tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    rows = head_rows(tile, BN, LAYOUT) if LAYOUT.head_dim else tile_rows(tile, N, BN, GATED)
    tokens = token_tile * BM + tl.arange(0, BM)
    per_split = tl.cdiv(steps, splits)
    first = split * per_split
    last = tl.minimum(first + per_split, steps)
    safe = tl.minimum(rows, N - 1)
    inner = tl.arange(0, WIDTH)
    x_rows = x + tl.minimum(tokens, M - 1).to(tl.int64) * x_stride
    code_rows = weight.codes + safe.to(tl.int64) * WIDTH
    step_codes = tl.cast(N, tl.int64) * WIDTH
    if VARIANT.pdl:
        tl.extra.cuda.gdc_launch_dependents()
        for block in tl.static_range(PREFETCH_LINES):
            prefetch_rows(code_rows + (first + block) * step_codes, 32, 1)
        tl.extra.cuda.gdc_wait()
    position, slot = load_places(heads, tokens, M, LAYOUT)
    acc = tl.zeros([BN, BM], dtype=tl.float32)
    STRETCHES: tl.constexpr = 8 if BITS == 4 else 1
    LINES_PER_STEP: tl.constexpr = STRETCHES * WIDTH // GROUP
    line_step = tl.cast(N, tl.int64) * LINES_PER_STEP
    # Few tokens: scales are read one step ahead, since only operands of a product get a pipeline from the compiler.
    # Where they go into the weights they would, carried from step to step, be in another layout than those.
    AHEAD: tl.constexpr = not FOLD and not AFFINE
    carried = load_lines(weight.scales + safe + first * line_step, N, LINES_PER_STEP)
    for step in range(first, last):
        packed = tl.load(code_rows[:, None] + step * step_codes + inner[None, :], eviction_policy="evict_first")
        if BITS == 4:
            parts = unpack_words(packed, TYPE, INTERPRET)
        else:
            parts = (packed.to(tl.float32 if INTERPRET else TYPE),)
        k = step * (STRETCHES * WIDTH) + inner
        if AHEAD:
            next_line = tl.minimum(step + 1, steps - 1) * line_step
            following = load_lines(weight.scales + safe + next_line, N, LINES_PER_STEP)
            acc = add_stretches(
                acc, parts, x_rows, k, K, carried, carried, STRETCHES, GROUP // WIDTH, EVEN_K, FOLD, AFFINE, INTERPRET
            )
            carried = following
        else:
            now = load_lines(weight.scales + safe + step * line_step, N, LINES_PER_STEP)
            zero = load_lines(weight.zeros + safe + step * line_step, N, LINES_PER_STEP) if AFFINE else now
            acc = add_stretches(
                acc, parts, x_rows, k, K, now, zero, STRETCHES, GROUP // WIDTH, EVEN_K, FOLD, AFFINE, INTERPRET
            )
    acc *= tl.load(weight.row_scale + safe)[:, None]
    if x_scale is not None:
        acc *= tl.load(x_scale + tl.minimum(tokens, M - 1))[None, :]
    tiles = tl.num_programs(0) * tl.num_programs(2)
    number = token_tile * tl.num_programs(0) + tile
    is_last = True
    if VARIANT.split:
        tl.static_assert(not GATED)
        inside = tl.arange(0, BN)[:, None] * BM + tl.arange(0, BM)[None, :]
        tl.store(sums.partial + (split * tiles + number) * BN * BM + inside, acc)
        is_last = arrive_last(sums.counters + number, splits)
    if is_last:
        cos, sin = load_angles(heads, position, tile, BN, LAYOUT)
        if VARIANT.split:
            acc = sum_partials(sums.partial, number, tiles, inside, splits, BN * BM)
            tl.store(sums.counters + number, 0)
        if LAYOUT.head_dim:
            if bias is not None:
                acc += tl.load(bias + safe)[:, None].to(tl.float32)
            write_heads(acc, cos, sin, slot, heads, tile, tokens, M, BN, BM, LAYOUT)
        elif GATED:
            write_gated(acc, out, bias, tile, tokens, M, N, out_stride, BN, BM)
        else:
            write_tile(acc, out, None, None, bias, rows, tokens, M, N, out_stride)


def grouped_matmul(
    x: Tensor,
    weight: GroupedWeight,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    tiling: Tiling = Tiling(),  # noqa: B008
    gated: bool = False,
    heads: HeadPlaces | None = None,
    x_scale: Tensor | None = None,
) -> Tensor:
    """x bf16 or float16 [M, K], or 8 bits with x_scale [M], @ weight^T (+ bias). `tiling.depth` is not used: a step is
    one block of codes. `gated`: silu of the first half of the result times the second. `heads`: rotated and stored
    there, the queries returned."""
    tokens = x.shape[0]
    width = weight.rows // 2 if gated else weight.rows
    out = heads.queries if heads else torch.empty(tokens, width, dtype=out_dtype, device=x.device)
    token_tile = min(tiling.tokens, max(16, triton.next_power_of_2(tokens)))
    tiles, token_tiles = triton.cdiv(width, tiling.rows // (1 + gated)), triton.cdiv(tokens, token_tile)
    steps = weight.codes.shape[0]
    splits = 1 if gated else tiling.splits or choose_splits(tiles * token_tiles, steps, x.device)
    splits = triton.cdiv(steps, triton.cdiv(steps, splits))
    scratch = workspace(x.device)
    partial = scratch.partials(splits * tiles * token_tiles * tiling.rows * token_tile if splits > 1 else 0)
    variant = Variant(
        tokens=token_tile,
        rows=tiling.rows,
        width=weight.codes.shape[2],
        group=weight.group,
        bits=weight.bits,
        split=splits > 1,
        even_depth=weight.depth % weight.block == 0,
        fold=folds_scales(weight.group, weight.zeros is not None, tokens, token_tile),
        gated=gated,
        prefetch_lines=tiling.prefetch_lines,
        pdl=uses_pdl(x.device),
        interpreted=INTERPRETED,
    )
    _grouped[(tiles, splits, token_tiles)](
        x,
        x_scale,
        weight.tensors,
        bias,
        out,
        heads.tensors if heads else None,
        SplitSums(partial, scratch.counters(tiles * token_tiles)),
        tokens,
        weight.rows,
        weight.depth,
        steps,
        x.stride(0),
        out.stride(0),
        splits,
        VARIANT=variant,
        LAYOUT=heads.layout if heads else NOT_ROTATED,
        **options(x.device, tiling.warps, tiling.stages),
    )
    return out
