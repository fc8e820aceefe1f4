"""The product of one token with a weight matrix [out, in], without tensor cores: bf16, fp8, int8, also mixed.

Each program takes a few rows whole and its threads spread along them. What bounds it is how early the weights are asked
for: they depend on no kernel before this one, so a part of them is read while those still run. The rows go out as they
are, gated, or as heads rotated and stored. `tuning.py` says how many rows, and how much is read ahead.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenmill.kernels.triton.fused.rotated import (
    NOT_ROTATED,
    HeadPlaces,
    head_rows,
    load_angles,
    load_places,
    write_heads,
)
from tokenmill.kernels.triton.launch import INTERPRETED, early, options
from tokenmill.kernels.triton.matmul.skinny import Tiling, gate_by_silu, prefetch_rows, tile_rows


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
    total,
    cos,
    sin,
    slot,
    out,
    heads,
    tile,
    N,
    BN: tl.constexpr,
    GATED: tl.constexpr,
    Q_HEADS: tl.constexpr,
    K_HEADS: tl.constexpr,
    HD: tl.constexpr,
    PAGE: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """The finished rows [BN] of a tile of one token: rotated and stored (HD), gated, or as they are."""
    if HD:
        token = tl.arange(0, 1)
        write_heads(total, cos, sin, slot, heads, tile, token, 1, BN, 1, Q_HEADS, K_HEADS, HD, PAGE, INTERLEAVED)
    elif GATED:
        gate, up = tl.split(tl.trans(tl.reshape(total, (2, BN // 2))))
        own = tile_rows(tile, N // 2, BN // 2, False)
        gated = gate_by_silu(gate, up, out.dtype.element_ty)
        tl.store(out + own, gated.to(out.dtype.element_ty), mask=own < N // 2)
    else:
        rows = tile_rows(tile, N, BN, False)
        tl.store(out + rows, total.to(out.dtype.element_ty), mask=rows < N)


@triton.jit
def _vector(
    x,
    w,
    out,
    x_scale,
    w_scale,
    bias,
    heads,
    N,
    K,
    BN: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
    EVEN_K: tl.constexpr,
    SCALED: tl.constexpr,
    BIASED: tl.constexpr,
    GATED: tl.constexpr,
    HELD: tl.constexpr,
    ALL_HELD: tl.constexpr,
    LINES: tl.constexpr,
    PDL: tl.constexpr,
    Q_HEADS: tl.constexpr,
    K_HEADS: tl.constexpr,
    HD: tl.constexpr,
    PAGE: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """HELD pieces of the rows are asked for before the input is ready, and LINES of 128 bytes more of each into the
    cache. ALL_HELD: that is all of them."""
    tile = tl.program_id(0)
    rows = head_rows(tile, BN, HD, INTERLEAVED) if HD else tile_rows(tile, N, BN, GATED)
    w_rows = w + tl.minimum(rows, N - 1).to(tl.int64) * K
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        if LINES:
            prefetch_rows(w_rows + HELD * BK, 128 // (w.dtype.element_ty.primitive_bitwidth // 8), LINES)
    held = ()
    for number in tl.static_range(HELD):
        held += (load_piece(w_rows, number * BK, K, BK, EVEN_K),)  # type: ignore[assignment]
    if SCALED:
        of_row = tl.load(w_scale + rows, mask=rows < N, other=0.0)
    if BIASED:
        shift = tl.load(bias + rows, mask=rows < N, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    position, slot = load_places(heads, tl.arange(0, 1), 1, HD)
    if x_scale is not None:
        of_token = tl.load(x_scale)
    inputs = ()
    for number in tl.static_range(HELD):
        inputs += (load_input(x, number * BK, K, BK, EVEN_K),)  # type: ignore[assignment]
    acc = tl.zeros([BN, BK], dtype=tl.float32)
    for number in tl.static_range(HELD):
        acc += held[number].to(tl.float32) * inputs[number].to(tl.float32)[None, :]
    if not ALL_HELD:
        for start in tl.range(HELD * BK, K, BK, num_stages=STAGES):
            w_tile, x_tile = load_piece(w_rows, start, K, BK, EVEN_K), load_input(x, start, K, BK, EVEN_K)
            acc += w_tile.to(tl.float32) * x_tile.to(tl.float32)[None, :]
    cos, sin = load_angles(heads, position, tile, BN, HD)
    total = tl.sum(acc, 1)
    if SCALED:
        total *= of_row
        if x_scale is not None:
            total *= of_token
    if BIASED:
        total += shift
    write_vector(
        total, cos, sin, slot, out, heads, tile, N, BN, GATED, Q_HEADS, K_HEADS, HD, PAGE, INTERLEAVED
    )  # fmt: skip


def vector_matmul(
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
    _vector[(triton.cdiv(rows, tiling.rows),)](
        x,
        w,
        out,
        x_scale,
        w_scale,
        bias,
        heads.tensors if heads else None,
        rows,
        depth,
        BN=tiling.rows,
        BK=tiling.depth,
        STAGES=1 if INTERPRETED else tiling.stages,
        EVEN_K=depth % tiling.depth == 0,
        SCALED=w_scale is not None,
        BIASED=bias is not None,
        GATED=gated,
        HELD=min(tiling.held, triton.cdiv(depth, tiling.depth)),
        ALL_HELD=tiling.held * tiling.depth >= depth,
        LINES=tiling.lines,
        PDL=early(x.device),
        **(heads.constants if heads else NOT_ROTATED),
        **options(x.device, tiling.warps, 1),
    )
    return out
