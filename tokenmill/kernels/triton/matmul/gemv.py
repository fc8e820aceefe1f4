"""The product of one token with a weight matrix [out, in] (GEMV), without tensor cores: bf16, fp8, int8, also mixed.

Each program takes a few whole rows and its threads spread along them. What bounds it is how early the weights are
requested: they depend on no earlier kernel, so a part of them is loaded while the predecessor still runs. The result is
written as it is, gated, or as heads rotated and stored. choose.py says how many rows, and how much is loaded early.
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
    write_heads,
)
from tokenmill.kernels.triton.matmul.choose import Tiling
from tokenmill.kernels.triton.matmul.tile import prefetch_rows, silu_gate, tile_rows
from tokenmill.kernels.triton.shared.launch import INTERPRETED, options, uses_pdl


class Variant(NamedTuple):
    """What a launch is compiled for."""

    rows: int  # of a program
    depth: int  # of a piece of the rows
    stages: int
    even_depth: bool  # the depth is a multiple of a piece's
    gated: bool
    preloaded: int  # pieces that are loaded before the input is ready
    all_preloaded: bool
    prefetch_lines: int  # of 128 bytes after those, of each row, into the cache
    pdl: bool


@triton.jit
def load_piece(rows, start, K, BK: tl.constexpr, EVEN_K: tl.constexpr):
    """[rows, BK] of the weights from `start` of the depth on; they are read once."""
    k = start + tl.arange(0, BK)
    if EVEN_K:
        return tl.load(rows[:, None] + k[None, :], eviction_policy="evict_first")
    else:
        return tl.load(rows[:, None] + k[None, :], mask=k[None, :] < K, other=0.0)


@triton.jit
def load_input(x, start, K, BK: tl.constexpr, EVEN_K: tl.constexpr):
    k = start + tl.arange(0, BK)
    if EVEN_K:
        return tl.load(x + k)
    else:
        return tl.load(x + k, mask=k < K, other=0.0)


@triton.jit
def write_vector(
    total, cos, sin, slot, out, heads, tile, N, BN: tl.constexpr, GATED: tl.constexpr, LAYOUT: tl.constexpr
):
    """The finished rows [BN] of a tile of one token: rotated and stored, gated, or as they are."""
    if LAYOUT.head_dim:
        token = tl.arange(0, 1)
        write_heads(total, cos, sin, slot, heads, tile, token, 1, BN, 1, LAYOUT)
    elif GATED:
        gate, up = tl.split(tl.trans(tl.reshape(total, (2, BN // 2))))
        own = tile_rows(tile, N // 2, BN // 2, False)
        gated = silu_gate(gate, up, out.dtype.element_ty)
        tl.store(out + own, gated.to(out.dtype.element_ty), mask=own < N // 2)
    else:
        rows = tile_rows(tile, N, BN, False)
        tl.store(out + rows, total.to(out.dtype.element_ty), mask=rows < N)


@triton.jit
def _gemv(
    x, w, out, x_scale, w_scale, bias, heads, N, K, VARIANT: tl.constexpr, LAYOUT: tl.constexpr
):  # fmt: skip
    BN: tl.constexpr = VARIANT.rows
    BK: tl.constexpr = VARIANT.depth
    EVEN_K: tl.constexpr = VARIANT.even_depth
    GATED: tl.constexpr = VARIANT.gated
    PRELOADED: tl.constexpr = VARIANT.preloaded
    LINES: tl.constexpr = VARIANT.prefetch_lines
    STAGES: tl.constexpr = VARIANT.stages
    tile = tl.program_id(0)
    rows = head_rows(tile, BN, LAYOUT) if LAYOUT.head_dim else tile_rows(tile, N, BN, GATED)
    w_rows = w + tl.minimum(rows, N - 1).to(tl.int64) * K
    if VARIANT.pdl:
        tl.extra.cuda.gdc_launch_dependents()
        if LINES:
            prefetch_rows(w_rows + PRELOADED * BK, 128 // (w.dtype.element_ty.primitive_bitwidth // 8), LINES)
    early = ()
    for number in tl.static_range(PRELOADED):
        early += (load_piece(w_rows, number * BK, K, BK, EVEN_K),)  # type: ignore[assignment]
    if w_scale is not None:
        of_row = tl.load(w_scale + rows, mask=rows < N, other=0.0)
    if bias is not None:
        shift = tl.load(bias + rows, mask=rows < N, other=0.0).to(tl.float32)
    if VARIANT.pdl:
        tl.extra.cuda.gdc_wait()
    position, slot = load_places(heads, tl.arange(0, 1), 1, LAYOUT)
    if x_scale is not None:
        of_token = tl.load(x_scale)
    inputs = ()
    for number in tl.static_range(PRELOADED):
        inputs += (load_input(x, number * BK, K, BK, EVEN_K),)  # type: ignore[assignment]
    acc = tl.zeros([BN, BK], dtype=tl.float32)
    for number in tl.static_range(PRELOADED):
        acc += early[number].to(tl.float32) * inputs[number].to(tl.float32)[None, :]
    if not VARIANT.all_preloaded:
        for start in tl.range(PRELOADED * BK, K, BK, num_stages=STAGES):
            w_tile, x_tile = load_piece(w_rows, start, K, BK, EVEN_K), load_input(x, start, K, BK, EVEN_K)
            acc += w_tile.to(tl.float32) * x_tile.to(tl.float32)[None, :]
    cos, sin = load_angles(heads, position, tile, BN, LAYOUT)
    total = tl.sum(acc, 1)
    if w_scale is not None:
        total *= of_row
        if x_scale is not None:
            total *= of_token
    if bias is not None:
        total += shift
    write_vector(total, cos, sin, slot, out, heads, tile, N, BN, GATED, LAYOUT)


def gemv(
    x: Tensor,
    w: Tensor,
    x_scale: Tensor | None = None,
    w_scale: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    tiling: Tiling = Tiling(rows=4, depth=1024, stages=1),  # noqa: B008
    gated: bool = False,
    heads: HeadPlaces | None = None,
) -> Tensor:
    """x [1, K] @ w [N, K]^T (* x_scale [1]) (* w_scale [N]) (+ bias) without tensor cores; any types, also mixed.
    `gated`: silu of the first half of the result times the second. `heads`: rotated and stored there, the queries
    returned."""
    rows, depth = w.shape
    width = rows // 2 if gated else rows
    out = heads.queries if heads else torch.empty(1, width, dtype=out_dtype, device=x.device)
    variant = Variant(
        rows=tiling.rows,
        depth=tiling.depth,
        stages=1 if INTERPRETED else tiling.stages,
        even_depth=depth % tiling.depth == 0,
        gated=gated,
        preloaded=min(tiling.preloaded, triton.cdiv(depth, tiling.depth)),
        all_preloaded=tiling.preloaded * tiling.depth >= depth,
        prefetch_lines=tiling.prefetch_lines,
        pdl=uses_pdl(x.device),
    )
    _gemv[(triton.cdiv(rows, tiling.rows),)](
        x,
        w,
        out,
        x_scale,
        w_scale,
        bias,
        heads.tensors if heads else None,
        rows,
        depth,
        VARIANT=variant,
        LAYOUT=heads.layout if heads else NOT_ROTATED,
        **options(x.device, tiling.warps, 1),
    )
    return out
