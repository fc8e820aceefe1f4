"""Products of a few tokens with a weight matrix [out, in]: bf16, fp8 x fp8, int8 x int8. Bound by reading the weights.

The weight tile is the tensor core's left operand (64 or more rows), the tokens its right one, so that 16 tokens cost
what one costs. Where the matrix has too few rows to fill the GPU, several programs split a tile's depth and the last to
arrive adds up. One token is gemv.py's; choose.py says when, and when the vendor's library is faster.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenmill.kernels.triton.matmul.choose import Tiling, choose_splits
from tokenmill.kernels.triton.matmul.tile import SplitSums, multiply, prefetch_rows, write_tile
from tokenmill.kernels.triton.shared.device import arrive_last, sum_partials
from tokenmill.kernels.triton.shared.launch import INTERPRETED, options, uses_pdl, workspace


class Variant(NamedTuple):
    """What a launch is compiled for."""

    tokens: int  # of a tile
    rows: int  # of the matrix in a tile
    depth: int  # of a step
    split: bool
    even_depth: bool  # the depth is a multiple of a step's
    integer: bool
    prefetch_lines: int
    pdl: bool
    interpreted: bool


# M = 1 as a constant would make all token rows one address; a constant number of splits, a kernel for every shape.
@triton.jit(do_not_specialize=["M", "splits"])
def _skinny(
    x,
    w,
    out,
    x_scale,
    w_scale,
    bias,
    sums,
    M,
    N,
    K,
    x_stride,
    out_stride,
    splits,
    VARIANT: tl.constexpr,
):
    BM: tl.constexpr = VARIANT.tokens
    BN: tl.constexpr = VARIANT.rows
    BK: tl.constexpr = VARIANT.depth
    LINES: tl.constexpr = VARIANT.prefetch_lines
    INTEGER: tl.constexpr = VARIANT.integer
    INTERPRET: tl.constexpr = VARIANT.interpreted
    tile, split, token_tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    rows = tile * BN + tl.arange(0, BN)
    tokens = token_tile * BM + tl.arange(0, BM)
    steps = tl.cdiv(K, BK)
    per_split = tl.cdiv(steps, splits)
    first = split * per_split
    last = tl.minimum(first + per_split, steps)
    # Rows and tokens past the end repeat the last one: no masks on the way, they are not written.
    w_rows = w + tl.minimum(rows, N - 1).to(tl.int64) * K
    x_rows = x + tl.minimum(tokens, M - 1).to(tl.int64) * x_stride
    if VARIANT.pdl:
        tl.extra.cuda.gdc_launch_dependents()
        if LINES:
            prefetch_rows(w_rows + first * BK, 128 // (w.dtype.element_ty.primitive_bitwidth // 8), LINES)
        tl.extra.cuda.gdc_wait()
    acc = tl.zeros([BN, BM], dtype=tl.int32 if INTEGER else tl.float32)
    for step in range(first, last):
        k = step * BK + tl.arange(0, BK)
        if VARIANT.even_depth:
            w_tile = tl.load(w_rows[:, None] + k[None, :], eviction_policy="evict_first")
            x_tile = tl.load(x_rows[None, :] + k[:, None])
        else:
            w_tile = tl.load(w_rows[:, None] + k[None, :], mask=k[None, :] < K, other=0.0)
            x_tile = tl.load(x_rows[None, :] + k[:, None], mask=k[:, None] < K, other=0.0)
        acc = multiply(w_tile, x_tile, acc, INTEGER, INTERPRET)
    total = acc.to(tl.float32)
    if not VARIANT.split:
        write_tile(total, out, x_scale, w_scale, bias, rows, tokens, M, N, out_stride)
    else:
        tiles = tl.num_programs(0) * tl.num_programs(2)
        number = token_tile * tl.num_programs(0) + tile
        inside = tl.arange(0, BN)[:, None] * BM + tl.arange(0, BM)[None, :]
        tl.store(sums.partial + (split * tiles + number) * BN * BM + inside, total)
        if arrive_last(sums.counters + number, splits):
            total = sum_partials(sums.partial, number, tiles, inside, splits, BN * BM)
            tl.store(sums.counters + number, 0)
            write_tile(total, out, x_scale, w_scale, bias, rows, tokens, M, N, out_stride)


def skinny_matmul(
    x: Tensor,
    w: Tensor,
    x_scale: Tensor | None = None,
    w_scale: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    tiling: Tiling = Tiling(),  # noqa: B008
) -> Tensor:
    """x [M, K] @ w [N, K]^T (* x_scale [M] * w_scale [N]) (+ bias): both of one type, bf16, float8_e4m3fn or int8."""
    tokens, depth = x.shape
    rows = w.shape[0]
    out = torch.empty(tokens, rows, dtype=out_dtype, device=x.device)
    token_tile = min(tiling.tokens, max(16, triton.next_power_of_2(tokens)))
    tiles, token_tiles = triton.cdiv(rows, tiling.rows), triton.cdiv(tokens, token_tile)
    steps = triton.cdiv(depth, tiling.depth)
    splits = tiling.splits or choose_splits(tiles * token_tiles, steps, x.device)
    splits = triton.cdiv(steps, triton.cdiv(steps, splits))  # none without work
    scratch = workspace(x.device)
    partial = scratch.partials(splits * tiles * token_tiles * tiling.rows * token_tile if splits > 1 else 0)
    variant = Variant(
        tokens=token_tile,
        rows=tiling.rows,
        depth=tiling.depth,
        split=splits > 1,
        even_depth=depth % tiling.depth == 0,
        integer=w.dtype == torch.int8,
        prefetch_lines=tiling.prefetch_lines,
        pdl=uses_pdl(x.device),
        interpreted=INTERPRETED,
    )
    _skinny[(tiles, splits, token_tiles)](
        x,
        w,
        out,
        x_scale,
        w_scale,
        bias,
        SplitSums(partial, scratch.counters(tiles * token_tiles)),
        tokens,
        rows,
        depth,
        x.stride(0),
        out.stride(0),
        splits,
        VARIANT=variant,
        **options(x.device, tiling.warps, tiling.stages),
    )
    return out
