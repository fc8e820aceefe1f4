"""What the products of this room share on the device: rows of a tile, prefetching, one tensor-core step, the epilogues.

A tile is [rows of the matrix, tokens]: the weights are the tensor core's left operand. Knows no weight format. Called
by skinny.py, grouped.py, gemv.py and grouped_gemv.py.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor


class SplitSums(NamedTuple):
    """Scratch of products whose depth is split over programs; unused where it is not."""

    partial: Tensor  # float32 [splits, tiles, rows * tokens of a tile]
    counters: Tensor  # int32 [tiles], zero between launches


@triton.jit
def prefetch_rows(pointers, LINE_ELEMENTS: tl.constexpr, LINES: tl.constexpr):
    """Prefetch the first LINES * 128 bytes of each row into L2: weights depend on no earlier kernel."""
    lines = tl.arange(0, LINES) * LINE_ELEMENTS
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;",
        "=r,l",
        [pointers[:, None] + lines[None, :]],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def tile_rows(tile, N, BN: tl.constexpr, GATED: tl.constexpr):
    """The rows of the matrix in a tile; GATED: rows of its first half, then those of the second that they gate."""
    inside = tl.arange(0, BN)
    if GATED:
        return tile * (BN // 2) + inside % (BN // 2) + (inside // (BN // 2)) * (N // 2)
    else:
        return tile * BN + inside


@triton.jit
def multiply(w_tile, x_tile, acc, INTEGER: tl.constexpr, INTERPRET: tl.constexpr):
    """acc + w_tile @ x_tile on the tensor cores. The interpreter reads bf16 as integers, so there it is float32."""
    if INTEGER:
        return tl.dot(w_tile, x_tile, acc, out_dtype=tl.int32)
    elif INTERPRET:
        return tl.dot(w_tile.to(tl.float32), x_tile.to(tl.float32), acc, input_precision="ieee")
    else:
        return tl.dot(w_tile, x_tile, acc)


@triton.jit
def write_tile(acc, out, x_scale, w_scale, bias, rows, tokens, M, N, out_stride):
    """acc [rows, tokens] -> out [tokens, rows], scaled per token and row, plus the bias, where not None."""
    row_ok = rows < N
    token_ok = tokens < M
    if w_scale is not None:
        of_row = tl.load(w_scale + rows, mask=row_ok, other=0.0)
        of_token = tl.load(x_scale + tokens, mask=token_ok, other=0.0)
        acc = acc * of_row[:, None] * of_token[None, :]
    if bias is not None:
        acc += tl.load(bias + rows, mask=row_ok, other=0.0)[:, None].to(tl.float32)
    place = out + tokens[None, :].to(tl.int64) * out_stride + rows[:, None]
    tl.store(place, acc.to(out.dtype.element_ty), mask=row_ok[:, None] & token_ok[None, :])


@triton.jit
def silu_gate(gate, up, DTYPE: tl.constexpr):
    """silu(gate) * up in float32, of the values that a product without a fused gate would have written as DTYPE: how
    many rows a step has must not change its tokens."""
    gate, up = gate.to(DTYPE).to(tl.float32), up.to(DTYPE).to(tl.float32)
    return gate * tl.sigmoid(gate) * up


@triton.jit
def write_gated(acc, out, bias, tile, tokens, M, N, out_stride, BN: tl.constexpr, BM: tl.constexpr):
    """acc [BN, BM] of `tile_rows` -> silu of its first half times the second, in out [tokens, N / 2]."""
    if bias is not None:
        rows = tile_rows(tile, N, BN, True)
        acc += tl.load(bias + rows, mask=rows < N, other=0.0)[:, None].to(tl.float32)
    gate, up = tl.split(tl.permute(tl.reshape(acc, (2, BN // 2, BM)), (1, 2, 0)))
    own = tile_rows(tile, N // 2, BN // 2, False)
    gated = silu_gate(gate, up, out.dtype.element_ty)
    write_tile(gated, out, None, None, None, own, tokens, M, N // 2, out_stride)
