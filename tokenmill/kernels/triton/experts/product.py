"""Products of tokens, sorted by expert, with the matrices of their experts, on the tensor cores.

A tile is [rows of one expert's matrix, tokens of one block of order.py]: the weights are the left operand, so that few
tokens cost what one does and 4-bit codes are unpacked into registers where the tensor core reads them. The first
product gathers its tokens and ends with the activation; the second ends with the routing weight. choose.py says how a
product is cut up; layer.py calls.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from tokenmill.kernels.triton.experts.choose import FOUR_BITS, Tiling
from tokenmill.kernels.triton.experts.order import ExpertOrder
from tokenmill.kernels.triton.experts.stack import SCALE_BLOCK, GpuExpertStack
from tokenmill.kernels.triton.experts.unpack import load_parts
from tokenmill.kernels.triton.matmul.tile import multiply, tile_rows
from tokenmill.kernels.triton.shared.device import dependent_launch
from tokenmill.kernels.triton.shared.launch import INTERPRETED, copies_by_descriptor, options, uses_pdl


class Variant(NamedTuple):
    """What a launch is compiled for."""

    kind: str
    tokens: int  # of a tile
    rows: int  # of the matrix in a tile
    depth: int  # of a step; 4 bits: of a block of codes
    words: int  # of a row in a block of codes
    group: int
    even_depth: bool  # the depth is a multiple of a step's
    gated: bool  # the first product: gathers tokens, ends with the activation
    clamped: bool
    top_k: int
    blocks: int
    descriptor: bool
    pdl: bool
    interpreted: bool


@triton.jit
def activate(gate, up, limit, CLAMPED: tl.constexpr):
    """silu(gate) * up; CLAMPED: GPT-OSS's form."""
    if CLAMPED:
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit)
        return gate * tl.sigmoid(1.702 * gate) * (up + 1.0)
    else:
        return gate * tl.sigmoid(gate) * up


@triton.jit
def find_tile(blocks, row_tiles, BLOCKS: tl.constexpr):
    """(block of tokens, tile of rows) of a program: BLOCKS neighbouring blocks, most of them of one or two experts, go
    through the tiles together, so that weights are read from memory once."""
    program = tl.program_id(0)
    width = BLOCKS * row_tiles
    first = (program // width) * BLOCKS
    size = tl.minimum(blocks - first, BLOCKS)
    return first + (program % width) % size, (program % width) // size


@triton.jit
def load_tokens(x_rows, k, K, EVEN: tl.constexpr):
    """[len(k), tokens] of the input."""
    if EVEN:
        return tl.load(x_rows[None, :] + k[:, None])
    else:
        return tl.load(x_rows[None, :] + k[:, None], mask=k[:, None] < K, other=0.0)


@triton.jit
def load_weights(weight, copier, row, expert, tile, start, K, VARIANT: tl.constexpr):
    """[rows, depth] of a tile of 8- or 16-bit weights."""
    BN: tl.constexpr = VARIANT.rows
    BK: tl.constexpr = VARIANT.depth
    HALVES: tl.constexpr = 2 if VARIANT.gated else 1
    if VARIANT.descriptor:
        loaded = copier.load([expert * HALVES, tile * (BN // HALVES), start])
        return tl.reshape(loaded, (BN, BK))
    else:
        k = start + tl.arange(0, BK)
        place = weight.codes + row.to(tl.int64)[:, None] * K + k[None, :]
        if VARIANT.even_depth:
            return tl.load(place, eviction_policy="evict_first")
        else:
            return tl.load(place, mask=k[None, :] < K, other=0.0)


@triton.jit
def multiply_blocks(
    acc, x_rows, x_scale, weight, copier, row, inside, expert, tile, source, N, K, VARIANT: tl.constexpr
):  # fmt: skip
    """float8 codes of both; the sum of every 128 is scaled by the token's and, where there are blocks, the weights'."""
    BN: tl.constexpr = VARIANT.rows
    BK: tl.constexpr = VARIANT.depth
    HALVES: tl.constexpr = 2 if VARIANT.gated else 1
    depth_blocks = tl.cdiv(K, BK)
    row_blocks = tl.cdiv(N // HALVES, 128)
    block = tl.minimum(tile * (BN // HALVES) + inside % (BN // HALVES), N // HALVES - 1) // 128
    line = (expert * HALVES + inside // (BN // HALVES)) * row_blocks + block
    for step in range(depth_blocks):
        w_tile = load_weights(weight, copier, row, expert, tile, step * BK, K, VARIANT)
        x_tile = load_tokens(x_rows, step * BK + tl.arange(0, BK), K, VARIANT.even_depth)
        of_token = tl.load(x_scale + source * depth_blocks + step)
        part = multiply(w_tile, x_tile, tl.zeros_like(acc), False, VARIANT.interpreted)
        if weight.scales is not None:
            of_rows = tl.load(weight.scales + line * depth_blocks + step)
            acc += part * (of_rows[:, None] * of_token[None, :])
        else:
            acc += part * of_token[None, :]
    return acc


@triton.jit
def accumulate(
    x, x_scale, weight, copier, row, inside, expert, tile, source, N, K, R, x_stride, VARIANT: tl.constexpr
):  # fmt: skip
    """The whole depth of a tile: [rows, tokens]."""
    BN: tl.constexpr = VARIANT.rows
    BM: tl.constexpr = VARIANT.tokens
    BK: tl.constexpr = VARIANT.depth
    W: tl.constexpr = VARIANT.words
    x_rows = x + source.to(tl.int64) * x_stride
    acc = tl.zeros([BN, BM], dtype=tl.float32)
    if W:
        for step in range(tl.cdiv(K, BK)):
            parts = load_parts(weight, row, step, R, VARIANT)
            for part in tl.static_range(8):
                k = step * BK + part * W + tl.arange(0, W)
                x_tile = load_tokens(x_rows, k, K, VARIANT.even_depth)
                acc = multiply(parts[part], x_tile, acc, False, VARIANT.interpreted)
    elif x_scale is not None:
        acc = multiply_blocks(
            acc, x_rows, x_scale, weight, copier, row, inside, expert, tile, source, N, K, VARIANT
        )  # fmt: skip
    else:
        for start in range(0, K, BK):
            w_tile = load_weights(weight, copier, row, expert, tile, start, K, VARIANT)
            x_tile = load_tokens(x_rows, start + tl.arange(0, BK), K, VARIANT.even_depth)
            acc = multiply(w_tile, x_tile, acc, False, VARIANT.interpreted)
    return acc


# A constant number of blocks or tiles would be a kernel for every number of tokens.
@triton.jit(do_not_specialize=["blocks", "row_tiles"])
def _product(
    x, x_scale, weight, copier, order, weights, out, N, K, R, blocks, row_tiles, x_stride, out_stride, limit,
    VARIANT: tl.constexpr,
):  # fmt: skip
    BN: tl.constexpr = VARIANT.rows
    BM: tl.constexpr = VARIANT.tokens
    GATED: tl.constexpr = VARIANT.gated
    dependent_launch(VARIANT.pdl)
    block, tile = find_tile(blocks, row_tiles, VARIANT.blocks)
    expert = tl.load(order.block_expert + block)
    if expert < 0:
        return
    inside = tl.arange(0, BN)
    end = tl.load(order.ends + expert)
    position = tl.load(order.block_first + block) + tl.arange(0, BM)
    # Rows and tokens past the end repeat the last one: no masks on the way, they are not written.
    assignment = tl.load(order.assignments + tl.minimum(position, end - 1))
    row = expert * N + tl.minimum(tile_rows(tile, N, BN, GATED), N - 1)
    source = assignment // VARIANT.top_k if GATED else tl.minimum(position, end - 1)
    acc = accumulate(
        x, x_scale, weight, copier, row, inside, expert, tile, source, N, K, R, x_stride, VARIANT
    )  # fmt: skip
    if weight.row_scale is not None:
        acc *= tl.load(weight.row_scale + row)[:, None]
    live = position < end
    if GATED:
        if weights is not None:  # multiply what the expert reads, so what its first product returns
            acc *= tl.load(weights + assignment)[None, :]
        if weight.bias is not None:
            acc += tl.load(weight.bias + row)[:, None]
        gate, up = tl.split(tl.permute(tl.reshape(acc, (2, BN // 2, BM)), (1, 2, 0)))
        own = tile * (BN // 2) + tl.arange(0, BN // 2)
        result = activate(gate, up, limit, VARIANT.clamped)
        place = out + position.to(tl.int64)[None, :] * out_stride + own[:, None]
        tl.store(place, result.to(out.dtype.element_ty), mask=(own < N // 2)[:, None] & live[None, :])
    else:
        if weight.bias is not None:
            acc += tl.load(weight.bias + row)[:, None]
        if weights is not None:
            acc *= tl.load(weights + assignment)[None, :]
        own = tile * BN + inside
        place = out + assignment.to(tl.int64)[None, :] * out_stride + own[:, None]
        tl.store(place, acc.to(out.dtype.element_ty), mask=(own < N)[:, None] & live[None, :])


def _copier(stack: GpuExpertStack, tiling: Tiling, gated: bool) -> Any:
    """Weights as [experts * halves, rows of a half, depth], copied in tiles."""
    halves = 2 if gated else 1
    view = stack.tensors.codes.view(stack.num_experts * halves, stack.rows // halves, stack.depth)
    return TensorDescriptor.from_tensor(view, [halves, tiling.rows // halves, tiling.depth])


def grouped_product(
    x: Tensor,
    stack: GpuExpertStack,
    order: ExpertOrder,
    top_k: int,
    token_tile: int,
    tiling: Tiling,
    weights: Tensor | None = None,
    x_scale: Tensor | None = None,
    gated: bool = False,
    clamp: float = 0.0,
    out_dtype: torch.dtype = torch.bfloat16,
    out: Tensor | None = None,
) -> Tensor:
    """Each sorted row times the matrix of its expert. `gated`: x [T, depth] is gathered, the result is the activation
    of the halves, [S, rows / 2] in sorted order. Else x [S, depth] is in sorted order, the result [S, rows] in that of
    assignments. `weights` float32 [T, k] multiply the result before the bias if gated, else after. `x_scale`
    float32 [rows of x, depth / 128]: x and the stack are float8. `out`: where the result goes; rows of blocks without
    an expert are left as they are."""
    size = order.assignments.numel()
    blocks = order.block_expert.numel()
    four_bits = stack.kind in FOUR_BITS
    depth = 8 * stack.words if four_bits else tiling.depth
    if x_scale is not None:
        assert depth == SCALE_BLOCK
        assert stack.tensors.codes.dtype == x.dtype
    width = stack.rows // 2 if gated else stack.rows
    if out is None:
        out = torch.empty(size, width, dtype=out_dtype, device=x.device)
    row_tiles = triton.cdiv(width, tiling.rows // 2 if gated else tiling.rows)
    aligned = stack.depth * stack.tensors.codes.element_size() % 16 == 0
    descriptor = tiling.descriptor and not four_bits and aligned and copies_by_descriptor()
    variant = Variant(
        kind=stack.kind,
        tokens=token_tile,
        rows=tiling.rows,
        depth=depth,
        words=stack.words,
        group=stack.group,
        even_depth=stack.depth % depth == 0,
        gated=gated,
        clamped=clamp > 0,
        top_k=top_k,
        blocks=tiling.blocks,
        descriptor=descriptor,
        pdl=uses_pdl(x.device),
        interpreted=INTERPRETED,
    )
    _product[(blocks * row_tiles,)](
        x,
        x_scale,
        stack.tensors,
        _copier(stack, tiling, gated) if descriptor else None,
        order,
        weights,
        out,
        stack.rows,
        stack.depth,
        stack.num_experts * stack.rows,
        blocks,
        row_tiles,
        x.stride(0),
        out.stride(0),
        clamp,
        VARIANT=variant,
        **options(x.device, tiling.warps, tiling.stages),
    )
    return out
