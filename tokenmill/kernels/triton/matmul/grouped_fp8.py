"""W4A8 in FP8 arithmetic: 4-bit groups times float8 inputs on FP8 tensor cores, sums scaled group by group in float32.

grouped.py's layout and meaning (`GroupedWeight` of 4 bits, groups of 32 or more). A nibble becomes the e4m3 byte whose
value is 2^-9 of its own: sign, then the magnitude, since bytes up to 15 are m * 2^-9 (subnormal ones and the first
binade). That is exact, costs no conversion, and UNIT goes into the row's scale. Zero points need not be whole: they are
multiplied with the sums of the inputs of a group (`group_sums`). Called by w4a8.py; choose.py says when.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenmill.kernels.triton.matmul.choose import Tiling, choose_splits
from tokenmill.kernels.triton.matmul.grouped import GroupedWeight, load_lines
from tokenmill.kernels.triton.matmul.tile import SplitSums, multiply, prefetch_rows, write_tile
from tokenmill.kernels.triton.shared.device import arrive_last, dependent_launch, sum_partials
from tokenmill.kernels.triton.shared.launch import INTERPRETED, options, power_of_two, uses_pdl, workspace

UNIT = 512.0  # one, in units of the smallest e4m3 number
AFFINE_TOKENS = 64  # of a tile: beside the sums of more there is no room for those of a group's inputs


class Variant(NamedTuple):
    """What a launch is compiled for."""

    tokens: int  # of a tile
    rows: int  # of the matrix in a tile
    width: int  # words of a row in a block
    group: int
    split: bool
    even_depth: bool  # the depth is a multiple of a block's
    unit: float  # of the codes as they are multiplied
    prefetch_lines: int
    pdl: bool
    interpreted: bool


@triton.constexpr_function
def unpack_text():
    """Four words -> eight registers; the i-th has the nibbles i of the four words, less 8, as sign and magnitude.

    Bytes are transposed first, so that a register has two nibbles of each word. Of a nibble u, u - 8 is u & 7 where
    bit 3 is set; elsewhere it is negative and of magnitude 8 - (u & 7) = ((u & 7) ^ 7) + 1, which no carry leaves."""
    head = ".reg .b32 a, b, c, d, t<4>, n, m; "
    pairs = (
        "prmt.b32 a, $8, $9, 0x5140; prmt.b32 b, $10, $11, 0x5140; "
        "prmt.b32 c, $8, $9, 0x7362; prmt.b32 d, $10, $11, 0x7362; "
    )
    turned = (
        "prmt.b32 t0, a, b, 0x5410; prmt.b32 t1, a, b, 0x7632; prmt.b32 t2, c, d, 0x5410; prmt.b32 t3, c, d, 0x7632; "
    )
    codes = []
    for nibble in range(8):
        source = f"t{nibble // 2}"
        shifted = f"shr.u32 m, {source}, 4;" if nibble % 2 else f"mov.b32 m, {source};"
        codes.append(
            f"shr.u32 n, {source}, {3 + 4 * (nibble % 2)}; lop3.b32 n, n, 0x01010101, 0, 0x0c; {shifted} "  # ~n & 1
            f"mul.lo.u32 a, n, 0x87; lop3.b32 m, m, 0x07070707, a, 0x6a; add.u32 ${nibble}, m, n; "
        )
    return "{ " + head + pairs + turned + "".join(codes) + "}"


@triton.jit
def unpack_words(words, INTERPRET: tl.constexpr):
    """int32 -> its eight nibbles, less 8, in e4m3 as 2^-9 of themselves; under the interpreter float32 as they are."""
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
        T: tl.constexpr = tl.float8e4nv
        return tl.inline_asm_elementwise(
            unpack_text(),
            "=r,=r,=r,=r,=r,=r,=r,=r,r,r,r,r",
            [words],
            dtype=(T.value, T.value, T.value, T.value, T.value, T.value, T.value, T.value),
            is_pure=True,
            pack=4,
        )


@triton.jit
def side_by_side(left, right):
    """[BN, W] twice -> [BN, 2 W]."""
    return tl.reshape(tl.permute(tl.join(left, right), (0, 2, 1)), (left.shape[0], 2 * left.shape[1]))


@triton.jit
def join_stretches(parts, FIRST: tl.constexpr, COUNT: tl.constexpr):
    """Stretches FIRST ... of a block as one operand: as many as share a scale."""
    if COUNT == 1:
        return parts[FIRST]
    elif COUNT == 2:
        return side_by_side(parts[FIRST], parts[FIRST + 1])
    else:
        tl.static_assert(COUNT == 4)
        low = side_by_side(parts[FIRST], parts[FIRST + 1])
        return side_by_side(low, side_by_side(parts[FIRST + 2], parts[FIRST + 3]))


@triton.jit(do_not_specialize=["M", "splits"])
def _grouped_fp8(
    x, x_scale, x_sums, weight, bias, out, sums, M, N, K, steps, out_stride, splits, VARIANT: tl.constexpr
):  # fmt: skip
    """x [M, K] @ weight [N, K]^T, `steps` blocks of codes deep; x_sums [groups, M] where there are zero points."""
    BM: tl.constexpr = VARIANT.tokens
    BN: tl.constexpr = VARIANT.rows
    WIDTH: tl.constexpr = VARIANT.width
    GROUP: tl.constexpr = VARIANT.group
    INTERPRET: tl.constexpr = VARIANT.interpreted
    PREFETCH_LINES: tl.constexpr = VARIANT.prefetch_lines
    LINES: tl.constexpr = 8 * WIDTH // GROUP
    tile, split, token_tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    rows = tile * BN + tl.arange(0, BN)
    tokens = token_tile * BM + tl.arange(0, BM)
    per_split = tl.cdiv(steps, splits)
    first = split * per_split
    last = tl.minimum(first + per_split, steps)
    # Rows and tokens past the end repeat the last one: no masks on the way, they are not written.
    safe, token = tl.minimum(rows, N - 1), tl.minimum(tokens, M - 1)
    x_rows = x + token.to(tl.int64) * K
    code_rows = weight.codes + safe.to(tl.int64) * WIDTH
    step_codes = tl.cast(N, tl.int64) * WIDTH
    line_step = tl.cast(N, tl.int64) * LINES
    inner = tl.arange(0, GROUP)
    if VARIANT.pdl:
        tl.extra.cuda.gdc_launch_dependents()
        for block in tl.static_range(PREFETCH_LINES):
            prefetch_rows(code_rows + (first + block) * step_codes, 32, 1)
        tl.extra.cuda.gdc_wait()
    acc = tl.zeros([BN, BM], dtype=tl.float32)
    # Scales are read a step ahead: only operands of a product get a pipeline from the compiler. Beside zero points
    # there is no room for those of two steps.
    AHEAD: tl.constexpr = weight.zeros is None
    carried = load_lines(weight.scales + safe + first * line_step, N, LINES)
    for step in range(first, last):
        packed = tl.load(code_rows[:, None] + step * step_codes + tl.arange(0, WIDTH)[None, :])
        scales = carried
        if AHEAD:
            carried = load_lines(weight.scales + safe + tl.minimum(step + 1, steps - 1) * line_step, N, LINES)
        else:
            scales = load_lines(weight.scales + safe + step * line_step, N, LINES)
        if weight.zeros is not None:
            zeros = load_lines(weight.zeros + safe + step * line_step, N, LINES)
        parts = unpack_words(packed, INTERPRET)
        for line in tl.static_range(LINES):
            k = step * (8 * WIDTH) + line * GROUP + inner
            if VARIANT.even_depth:
                x_tile = tl.load(x_rows[None, :] + k[:, None])
            else:
                x_tile = tl.load(x_rows[None, :] + k[:, None], mask=k[:, None] < K, other=0.0)
            operand = join_stretches(parts, line * (GROUP // WIDTH), GROUP // WIDTH)
            partial = multiply(operand, x_tile, tl.zeros([BN, BM], dtype=tl.float32), False, INTERPRET)
            if weight.zeros is not None:
                of_group = tl.load(x_sums + (step * LINES + line) * M + token) / VARIANT.unit
                partial -= zeros[line].to(tl.float32)[:, None] * of_group[None, :]
            acc += partial * scales[line].to(tl.float32)[:, None]
    acc *= (tl.load(weight.row_scale + safe) * VARIANT.unit)[:, None] * tl.load(x_scale + token)[None, :]
    tiles = tl.num_programs(0) * tl.num_programs(2)
    number = token_tile * tl.num_programs(0) + tile
    is_last = True
    if VARIANT.split:
        inside = tl.arange(0, BN)[:, None] * BM + tl.arange(0, BM)[None, :]
        tl.store(sums.partial + (split * tiles + number) * BN * BM + inside, acc)
        is_last = arrive_last(sums.counters + number, splits)
    if is_last:
        if VARIANT.split:
            acc = sum_partials(sums.partial, number, tiles, inside, splits, BN * BM)
            tl.store(sums.counters + number, 0)
        write_tile(acc, out, None, None, bias, rows, tokens, M, N, out_stride)


@triton.jit
def _group_sums(x, sums, M, K, groups, GROUP: tl.constexpr, BG: tl.constexpr, PDL: tl.constexpr):
    dependent_launch(PDL)
    token = tl.program_id(0)
    group = tl.program_id(1) * BG + tl.arange(0, BG)
    k = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    values = tl.load(x + token.to(tl.int64) * K + k, mask=k < K, other=0.0).to(tl.float32)
    tl.store(sums + group * M + token, tl.sum(values, 1), mask=group < groups)


def group_sums(x: Tensor, group: int, groups: int) -> Tensor:
    """x float8 [M, K] -> float32 [groups, M], 0 for groups past the depth."""
    tokens, depth = x.shape
    sums, block = torch.empty(groups, tokens, dtype=torch.float32, device=x.device), min(32, power_of_two(groups))
    _group_sums[(tokens, triton.cdiv(groups, block))](
        x, sums, tokens, depth, groups, GROUP=group, BG=block, PDL=uses_pdl(x.device), **options(x.device, 4, 1)
    )
    return sums


def grouped_fp8(
    x: Tensor,
    x_scale: Tensor,
    weight: GroupedWeight,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    tiling: Tiling = Tiling(),  # noqa: B008
) -> Tensor:
    """x float8_e4m3fn [M, K] * x_scale [M] @ weight^T (+ bias); of `tiling` the depth does not count: a step is one
    block of codes."""
    assert weight.bits == 4 and weight.codes.shape[2] == 32 <= weight.group, "another layout"  # noqa: PT018
    tokens = x.shape[0]
    out = torch.empty(tokens, weight.rows, dtype=out_dtype, device=x.device)
    most = tiling.tokens if weight.zeros is None else min(tiling.tokens, AFFINE_TOKENS)
    token_tile = min(most, power_of_two(tokens, 16))
    tiles, token_tiles = triton.cdiv(weight.rows, tiling.rows), triton.cdiv(tokens, token_tile)
    steps = weight.codes.shape[0]
    splits = tiling.splits or choose_splits(tiles * token_tiles, steps, x.device)
    splits = triton.cdiv(steps, triton.cdiv(steps, splits))  # none without work
    scratch = workspace(x.device)
    partial = scratch.partials(splits * tiles * token_tiles * tiling.rows * token_tile if splits > 1 else 0)
    variant = Variant(
        tokens=token_tile,
        rows=tiling.rows,
        width=weight.codes.shape[2],
        group=weight.group,
        split=splits > 1,
        even_depth=weight.depth % weight.block == 0,
        unit=1.0 if INTERPRETED else UNIT,
        prefetch_lines=tiling.prefetch_lines,
        pdl=uses_pdl(x.device),
        interpreted=INTERPRETED,
    )
    _grouped_fp8[(tiles, splits, token_tiles)](
        x,
        x_scale,
        None if weight.zeros is None else group_sums(x, weight.group, weight.scales.shape[0]),
        weight.tensors,
        bias,
        out,
        SplitSums(partial, scratch.counters(tiles * token_tiles)),
        tokens,
        weight.rows,
        weight.depth,
        steps,
        out.stride(0),
        splits,
        VARIANT=variant,
        **options(x.device, tiling.warps, tiling.stages),
    )
    return out
