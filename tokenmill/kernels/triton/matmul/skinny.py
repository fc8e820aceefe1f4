"""Products of a few tokens with a weight matrix [out, in]: bf16, fp8 x fp8, int8 x int8. Bound by reading the weights.

The weight tile is the tensor core's left operand (64 or more rows), the tokens its right one, so that 16 tokens cost
what one costs. Where the matrix has too few rows to fill the chip, several programs share a tile's depth and the last
to finish adds up. Of one token vector.py does it. `tuning.py` says when the vendor's library is faster.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenmill.kernels.triton.launch import INTERPRETED, early, num_processors, options, workspace


@triton.jit
def prefetch_rows(pointers, LINE_ELEMENTS: tl.constexpr, LINES: tl.constexpr):
    """Ask the cache for the first LINES * 128 bytes of each row: weights depend on no earlier kernel."""
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
def write_tile(
    acc, out, x_scale, w_scale, bias, rows, tokens, M, N, out_stride, SCALED: tl.constexpr, BIASED: tl.constexpr
):
    """acc [rows, tokens] -> out [tokens, rows], scaled per token and per row."""
    row_ok = rows < N
    token_ok = tokens < M
    if SCALED:
        of_row = tl.load(w_scale + rows, mask=row_ok, other=0.0)
        of_token = tl.load(x_scale + tokens, mask=token_ok, other=0.0)
        acc = acc * of_row[:, None] * of_token[None, :]
    if BIASED:
        acc += tl.load(bias + rows, mask=row_ok, other=0.0)[:, None].to(tl.float32)
    place = out + tokens[None, :].to(tl.int64) * out_stride + rows[:, None]
    tl.store(place, acc.to(out.dtype.element_ty), mask=row_ok[:, None] & token_ok[None, :])


@triton.jit
def tile_rows(tile, N, BN: tl.constexpr, GATED: tl.constexpr):
    """The rows of the matrix in a tile; GATED: rows of its first half, then those of the second that they gate."""
    inside = tl.arange(0, BN)
    if GATED:
        return tile * (BN // 2) + inside % (BN // 2) + (inside // (BN // 2)) * (N // 2)
    else:
        return tile * BN + inside


@triton.jit
def gate_by_silu(gate, up, DTYPE: tl.constexpr):
    """silu(gate) * up in float32, of what a product that does not gate by itself would have written as DTYPE: how many
    rows a step has must not change its tokens."""
    gate, up = gate.to(DTYPE).to(tl.float32), up.to(DTYPE).to(tl.float32)
    return gate * tl.sigmoid(gate) * up


@triton.jit
def write_gated(
    acc, out, bias, tile, tokens, M, N, out_stride, BN: tl.constexpr, BM: tl.constexpr, BIASED: tl.constexpr
):
    """acc [BN, BM] of `tile_rows` -> silu of its first half times the second, in out [tokens, N / 2]."""
    if BIASED:
        rows = tile_rows(tile, N, BN, True)
        acc += tl.load(bias + rows, mask=rows < N, other=0.0)[:, None].to(tl.float32)
    gate, up = tl.split(tl.permute(tl.reshape(acc, (2, BN // 2, BM)), (1, 2, 0)))
    own = tile_rows(tile, N // 2, BN // 2, False)
    gated = gate_by_silu(gate, up, out.dtype.element_ty)
    write_tile(gated, out, out, out, bias, own, tokens, M, N // 2, out_stride, False, False)


@triton.jit
def arrive_last(counter, splits):
    """True for the last of `splits` programs to come here; what the others stored before can then be read."""
    tl.debug_barrier()  # all threads have stored before one of them counts
    arrived = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
    return arrived == splits - 1


@triton.jit
def sum_parts(partial, number, tiles, inside, splits, SIZE: tl.constexpr):
    """The partial results of tile `number` added up, four in flight: one by one their latencies would add up."""
    total = tl.load(partial + number * SIZE + inside, cache_modifier=".cg")
    for first in range(1, splits, 4):
        for ahead in tl.static_range(4):
            place = partial + ((first + ahead) * tiles + number) * SIZE + inside
            total += tl.load(place, mask=(inside >= 0) & (first + ahead < splits), other=0.0, cache_modifier=".cg")
    return total


@triton.jit
def multiply(w_tile, x_tile, acc, INTEGER: tl.constexpr, INTERPRET: tl.constexpr):
    """acc + w_tile @ x_tile on the tensor cores; the interpreter takes bf16 for its bits, so it gets float32."""
    if INTEGER:
        return tl.dot(w_tile, x_tile, acc, out_dtype=tl.int32)
    elif INTERPRET:
        return tl.dot(w_tile.to(tl.float32), x_tile.to(tl.float32), acc, input_precision="ieee")
    else:
        return tl.dot(w_tile, x_tile, acc)


# M = 1 as a constant would make all token rows one address; a number of splits as one, a kernel for every shape.
@triton.jit(do_not_specialize=["M", "splits"])
def _skinny(
    x,
    w,
    out,
    x_scale,
    w_scale,
    bias,
    partial,
    counter,
    M,
    N,
    K,
    x_stride,
    out_stride,
    splits,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    SPLIT: tl.constexpr,
    EVEN_K: tl.constexpr,
    SCALED: tl.constexpr,
    BIASED: tl.constexpr,
    INTEGER: tl.constexpr,
    LINES: tl.constexpr,
    PDL: tl.constexpr,
    INTERPRET: tl.constexpr,
):
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
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        if LINES:
            prefetch_rows(w_rows + first * BK, 128 // (w.dtype.element_ty.primitive_bitwidth // 8), LINES)
        tl.extra.cuda.gdc_wait()
    acc = tl.zeros([BN, BM], dtype=tl.int32 if INTEGER else tl.float32)
    for step in range(first, last):
        k = step * BK + tl.arange(0, BK)
        if EVEN_K:
            w_tile = tl.load(w_rows[:, None] + k[None, :], eviction_policy="evict_first")
            x_tile = tl.load(x_rows[None, :] + k[:, None])
        else:
            w_tile = tl.load(w_rows[:, None] + k[None, :], mask=k[None, :] < K, other=0.0)
            x_tile = tl.load(x_rows[None, :] + k[:, None], mask=k[:, None] < K, other=0.0)
        acc = multiply(w_tile, x_tile, acc, INTEGER, INTERPRET)
    total = acc.to(tl.float32)
    if not SPLIT:
        write_tile(total, out, x_scale, w_scale, bias, rows, tokens, M, N, out_stride, SCALED, BIASED)
    else:
        tiles = tl.num_programs(0) * tl.num_programs(2)
        number = token_tile * tl.num_programs(0) + tile
        inside = tl.arange(0, BN)[:, None] * BM + tl.arange(0, BM)[None, :]
        tl.store(partial + (split * tiles + number) * BN * BM + inside, total)
        if arrive_last(counter + number, splits):
            total = sum_parts(partial, number, tiles, inside, splits, BN * BM)
            tl.store(counter + number, 0)
            write_tile(total, out, x_scale, w_scale, bias, rows, tokens, M, N, out_stride, SCALED, BIASED)


@dataclass(frozen=True, slots=True)
class Tiling:
    """How a product is cut up; `splits` 0: as many programs per tile as fill the chip."""

    rows: int = 64
    depth: int = 128
    splits: int = 0
    warps: int = 4
    stages: int = 4
    lines: int = 0  # 128-byte lines of each row asked for before the input is ready
    tokens: int = 128  # at most this many in a tile
    held: int = 0  # pieces of `depth` of each row read before the input is ready; of products of one token


def choose_splits(tiles: int, steps: int, device: torch.device, per_processor: int = 2) -> int:
    """Programs per tile: enough for `per_processor` on each, none with fewer than two steps."""
    wanted = max(1, per_processor * num_processors(device) // max(1, tiles))
    return max(1, min(wanted, steps // 2, 16))


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
    _skinny[(tiles, splits, token_tiles)](
        x,
        w,
        out,
        x_scale,
        w_scale,
        bias,
        scratch.partials(splits * tiles * token_tiles * tiling.rows * token_tile if splits > 1 else 0),
        scratch.counters(tiles * token_tiles),
        tokens,
        rows,
        depth,
        x.stride(0),
        out.stride(0),
        splits,
        BM=token_tile,
        BN=tiling.rows,
        BK=tiling.depth,
        SPLIT=splits > 1,
        EVEN_K=depth % tiling.depth == 0,
        SCALED=w_scale is not None,
        BIASED=bias is not None,
        INTEGER=w.dtype == torch.int8,
        LINES=tiling.lines,
        PDL=early(x.device),
        INTERPRET=INTERPRETED,
        **options(x.device, tiling.warps, tiling.stages),
    )
    return out
