"""The experts of a few tokens without tensor cores: every chosen expert is a matrix times a vector. bf16 and float8.

No sort: a program of the first product takes a few rows of one token's expert, one of the second the same rows of all
of a token's experts, and adds them up in registers. Weights of the second depend on no result of the first, so they are
requested before it has ended. choose.py says how many rows; layer.py calls.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenmill.kernels.triton.experts.choose import Tiling
from tokenmill.kernels.triton.experts.product import activate
from tokenmill.kernels.triton.experts.stack import GpuExpertStack
from tokenmill.kernels.triton.matmul.gemv import load_input, load_piece
from tokenmill.kernels.triton.shared.launch import options, uses_pdl

EARLY_BYTES = 384  # of weights that a thread holds before the input is ready


class Variant(NamedTuple):
    """What a launch is compiled for."""

    rows: int  # of a program; of one half where halves gate each other
    depth: int  # of a piece of the rows
    pieces: int  # that make up a row
    even_depth: bool
    top_k: int
    early: int  # pieces that are requested before the input is ready
    clamped: bool
    weighted: bool  # by the routing weight
    pdl: bool


@triton.jit
def scaled_input(values, scales, line, start, K, BK: tl.constexpr):
    """The input times the scales of the weights' blocks along the depth, where there are any."""
    if scales is not None:
        k = tl.minimum(start + tl.arange(0, BK), K - 1)
        return values * tl.load(scales + line * tl.cdiv(K, 128) + k // 128)
    else:
        return values


@triton.jit(do_not_specialize=["x_stride"])
def _gate_up(x, weight, ids, weights, out, N, K, x_stride, limit, VARIANT: tl.constexpr):
    BN: tl.constexpr = VARIANT.rows
    BK: tl.constexpr = VARIANT.depth
    EVEN: tl.constexpr = VARIANT.even_depth
    PIECES: tl.constexpr = VARIANT.pieces
    if VARIANT.pdl:  # in this order: the second product reads the ids before this kernel has ended
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    tile, slot = tl.program_id(0), tl.program_id(1)
    half = N // 2
    expert = tl.load(ids + slot).to(tl.int64)
    own = tile * BN + tl.arange(0, BN)
    row = expert * N + tl.minimum(own, half - 1)
    gate_rows = weight.codes + row * K
    up_rows = gate_rows + tl.cast(half, tl.int64) * K
    x_row = x + (slot // VARIANT.top_k).to(tl.int64) * x_stride
    line = expert * 2 * tl.cdiv(half, 128) + tl.minimum(tile * BN, half - 1) // 128
    gate = tl.zeros([BN, BK], dtype=tl.float32)
    up = tl.zeros([BN, BK], dtype=tl.float32)
    for piece in tl.static_range(PIECES):
        gate_tile = load_piece(gate_rows, piece * BK, K, BK, EVEN)
        up_tile = load_piece(up_rows, piece * BK, K, BK, EVEN)
        values = load_input(x_row, piece * BK, K, BK, EVEN).to(tl.float32)
        for_gate = scaled_input(values, weight.scales, line, piece * BK, K, BK)
        for_up = scaled_input(values, weight.scales, line + tl.cdiv(half, 128), piece * BK, K, BK)
        gate += gate_tile.to(tl.float32) * for_gate[None, :]
        up += up_tile.to(tl.float32) * for_up[None, :]
    gate, up = tl.sum(gate, 1), tl.sum(up, 1)
    if weight.row_scale is not None:
        gate *= tl.load(weight.row_scale + row)
        up *= tl.load(weight.row_scale + row + half)
    if VARIANT.weighted:
        by = tl.load(weights + slot)
        gate *= by
        up *= by
    if weight.bias is not None:
        gate += tl.load(weight.bias + row)
        up += tl.load(weight.bias + row + half)
    result = activate(gate, up, limit, VARIANT.clamped)
    tl.store(out + slot.to(tl.int64) * half + own, result.to(out.dtype.element_ty), mask=own < half)


@triton.jit
def _down(x, weight, ids, weights, out, N, K, VARIANT: tl.constexpr):
    BN: tl.constexpr = VARIANT.rows
    BK: tl.constexpr = VARIANT.depth
    EVEN: tl.constexpr = VARIANT.even_depth
    PIECES: tl.constexpr = VARIANT.pieces
    TOP_K: tl.constexpr = VARIANT.top_k
    EARLY: tl.constexpr = VARIANT.early
    if VARIANT.pdl:
        tl.extra.cuda.gdc_launch_dependents()
    tile, token = tl.program_id(0), tl.program_id(1).to(tl.int64)
    own = tile * BN + tl.arange(0, BN)
    safe = tl.minimum(own, N - 1)
    experts = ()
    for place in tl.static_range(TOP_K):
        # Past the first-level cache: nothing has waited for the kernel that wrote the ids but the predecessor.
        expert = tl.load(ids + token * TOP_K + place, cache_modifier=".cg").to(tl.int64)
        experts += (expert,)  # type: ignore[assignment]
    early = ()
    for number in tl.static_range(EARLY):
        codes = weight.codes + (experts[number // PIECES] * N + safe) * K
        early += (load_piece(codes, (number % PIECES) * BK, K, BK, EVEN),)  # type: ignore[assignment]
    if VARIANT.pdl:
        tl.extra.cuda.gdc_wait()
    acc = tl.zeros([BN, BK], dtype=tl.float32)
    total = tl.zeros([BN], dtype=tl.float32)
    for number in tl.static_range(TOP_K * PIECES):
        slot = token * TOP_K + number // PIECES
        expert = experts[number // PIECES]
        row = expert * N + safe
        by = tl.load(weights + slot) if VARIANT.weighted else 1.0
        if number < EARLY:
            values = early[number].to(tl.float32)  # type: ignore[var-annotated]
        else:
            values = load_piece(weight.codes + row * K, (number % PIECES) * BK, K, BK, EVEN).to(tl.float32)
        inputs = load_input(x + slot * K, (number % PIECES) * BK, K, BK, EVEN).to(tl.float32) * by
        line = expert * tl.cdiv(N, 128) + tl.minimum(tile * BN, N - 1) // 128
        inputs = scaled_input(inputs, weight.scales, line, (number % PIECES) * BK, K, BK)
        if weight.row_scale is not None:
            values *= tl.load(weight.row_scale + row)[:, None]
        acc += values * inputs[None, :]
        if weight.bias is not None and number % PIECES == 0:
            total += tl.load(weight.bias + row) * by
    total += tl.sum(acc, 1)
    tl.store(out + token * N + own, total.to(out.dtype.element_ty), mask=own < N)


def _variant(stack: GpuExpertStack, tiling: Tiling, rows: int, top_k: int, clamp: float, weighted: bool) -> Variant:
    assert stack.group == 0 or 128 % rows == 0, "rows of one program share the scales of a block"
    pieces = triton.cdiv(stack.depth, tiling.depth)
    per_thread = rows * tiling.depth * stack.tensors.codes.element_size() // (32 * tiling.warps)
    return Variant(
        rows=rows,
        depth=tiling.depth,
        pieces=pieces,
        even_depth=stack.depth % tiling.depth == 0,
        top_k=top_k,
        early=min(top_k * pieces, EARLY_BYTES // max(1, per_thread)),
        clamped=clamp > 0,
        weighted=weighted,
        pdl=uses_pdl(stack.device),
    )


def gate_up_gemv(
    x: Tensor,
    stack: GpuExpertStack,
    ids: Tensor,
    weights: Tensor | None,
    tiling: Tiling,
    clamp: float = 0.0,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """x [T, depth], ids [T, k] -> activation of the halves of each chosen expert, [T * k, rows / 2]. `weights` [T, k]
    multiply what an expert reads."""
    slots, top_k = ids.numel(), ids.shape[1]
    out = torch.empty(slots, stack.rows // 2, dtype=out_dtype, device=x.device)
    rows = tiling.rows // 2
    _gate_up[(triton.cdiv(stack.rows // 2, rows), slots)](
        x,
        stack.tensors,
        ids,
        weights,
        out,
        stack.rows,
        stack.depth,
        x.stride(0),
        clamp,
        VARIANT=_variant(stack, tiling, rows, top_k, clamp, weights is not None),
        **options(x.device, tiling.warps, 1),
    )
    return out


def down_gemv(
    x: Tensor,
    stack: GpuExpertStack,
    ids: Tensor,
    weights: Tensor | None,
    tiling: Tiling,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """x [T * k, depth] as `gate_up_gemv` returns it, which must be the kernel before this one -> [T, rows], the sum
    over each token's experts, weighted by `weights` [T, k]."""
    tokens, top_k = ids.shape
    out = torch.empty(tokens, stack.rows, dtype=out_dtype, device=x.device)
    _down[(triton.cdiv(stack.rows, tiling.rows), tokens)](
        x,
        stack.tensors,
        ids,
        weights,
        out,
        stack.rows,
        stack.depth,
        VARIANT=_variant(stack, tiling, tiling.rows, top_k, 0.0, weights is not None),
        **options(x.device, tiling.warps, 1),
    )
    return out
