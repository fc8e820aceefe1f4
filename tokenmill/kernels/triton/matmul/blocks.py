"""Products with float8 weights that have a scale for every block of 128 x 128, as DeepSeek and Qwen publish them.

The input is rounded to float8 with a scale per token and 128 columns. A step of the depth is one block, so that its sum
is scaled by two numbers of the tile: the weights' and the token's. Where tiles do not fill the GPU, several programs
split a tile's depth as in skinny.py. Joined with others of its kind by joined.py; `tiling` here says how it is cut up.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenmill.kernels.triton.experts.rows import quantize_groups
from tokenmill.kernels.triton.matmul.choose import Plan, Tiling, choose_splits
from tokenmill.kernels.triton.matmul.linear import GpuLinear
from tokenmill.kernels.triton.matmul.tile import SplitSums, multiply, write_tile
from tokenmill.kernels.triton.shared.device import arrive_last, dependent_launch, sum_partials
from tokenmill.kernels.triton.shared.launch import INTERPRETED, options, power_of_two, uses_pdl, workspace

BLOCK = 128


class Variant(NamedTuple):
    """What a launch is compiled for."""

    tokens: int  # of a tile
    rows: int  # of the matrix in a tile; divides a block
    split: bool
    even_depth: bool  # the depth is a multiple of a block
    pdl: bool
    interpreted: bool


@triton.jit(do_not_specialize=["M", "splits"])
def _block_product(x, x_scale, w, w_scale, out, bias, sums, M, N, K, out_stride, splits, VARIANT: tl.constexpr):
    BM: tl.constexpr = VARIANT.tokens
    BN: tl.constexpr = VARIANT.rows
    BK: tl.constexpr = 128
    INTERPRET: tl.constexpr = VARIANT.interpreted
    dependent_launch(VARIANT.pdl)
    tile, split, token_tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    rows = tile * BN + tl.arange(0, BN)
    tokens = token_tile * BM + tl.arange(0, BM)
    steps = tl.cdiv(K, BK)
    per_split = tl.cdiv(steps, splits)
    first = split * per_split
    # Rows and tokens past the end repeat the last one: no masks on the way, they are not written.
    token = tl.minimum(tokens, M - 1).to(tl.int64)
    w_rows = w + tl.minimum(rows, N - 1).to(tl.int64) * K
    x_rows = x + token * K
    of_tile = w_scale + (tile * BN // BK) * steps
    acc = tl.zeros([BN, BM], dtype=tl.float32)
    for step in range(first, tl.minimum(first + per_split, steps)):
        k = step * BK + tl.arange(0, BK)
        if VARIANT.even_depth:
            w_tile = tl.load(w_rows[:, None] + k[None, :])
            x_tile = tl.load(x_rows[None, :] + k[:, None])
        else:
            w_tile = tl.load(w_rows[:, None] + k[None, :], mask=k[None, :] < K, other=0.0)
            x_tile = tl.load(x_rows[None, :] + k[:, None], mask=k[:, None] < K, other=0.0)
        by = tl.load(x_scale + token * steps + step) * tl.load(of_tile + step)
        acc += multiply(w_tile, x_tile, tl.zeros([BN, BM], dtype=tl.float32), False, INTERPRET) * by[None, :]
    if not VARIANT.split:
        write_tile(acc, out, None, None, bias, rows, tokens, M, N, out_stride)
    else:
        tiles = tl.num_programs(0) * tl.num_programs(2)
        number = token_tile * tl.num_programs(0) + tile
        inside = tl.arange(0, BN)[:, None] * BM + tl.arange(0, BM)[None, :]
        tl.store(sums.partial + (split * tiles + number) * BN * BM + inside, acc)
        if arrive_last(sums.counters + number, splits):
            total = sum_partials(sums.partial, number, tiles, inside, splits, BN * BM)
            tl.store(sums.counters + number, 0)
            write_tile(total, out, None, None, bias, rows, tokens, M, N, out_stride)


def tiling(rows: int, tokens: int) -> Tiling:
    """Few tokens: bound by reading the weights. Many: by the tensor cores, with tiles as large as their sums allow."""
    if INTERPRETED:
        return Tiling(64, BLOCK, 0, 4, 1, tokens=32)
    if tokens <= 64:
        return Tiling(64, BLOCK, 0, 4, 4, tokens=64)
    many = rows * tokens >= 132 * BLOCK * BLOCK
    return Tiling(BLOCK, BLOCK, 0, 8, 4, tokens=BLOCK) if many else Tiling(64, BLOCK, 0, 4, 4, tokens=64)


class BlockLinear(GpuLinear):
    """codes float8_e4m3fn [N, K], scales float32 [N / 128, K / 128], each rounded up."""

    kind = "fp8 blocks"

    def __init__(self, codes: Tensor, scales: Tensor, bias: Tensor | None) -> None:
        super().__init__(codes.shape[0], codes.shape[1], bias, codes.device, "fp8 in blocks of 128 x 128")
        self.codes, self.scales = codes.contiguous(), scales.to(codes.device, torch.float32).contiguous()

    @property
    def nbytes(self) -> int:
        return self.codes.numel() + 4 * self.scales.numel()

    def gates(self, tokens: int) -> bool:  # noqa: ARG002
        return False

    def rotates(self, tokens: int) -> bool:  # noqa: ARG002
        return False

    def choose(self, tokens: int) -> Plan:
        return Plan("blocks", tiling(self.rows, tokens))

    def multiply(
        self,
        x: Tensor,
        out_dtype: torch.dtype = torch.bfloat16,
        plan: Plan | None = None,
        gated: bool = False,
        heads: object = None,
    ) -> Tensor:
        assert not gated and heads is None, "nothing is fused"  # noqa: PT018
        cut = None if plan is None else plan.tiling
        return block_product(*quantize_groups(x), self.codes, self.scales, self.bias, out_dtype, cut)


def block_product(
    x: Tensor,
    x_scale: Tensor,
    w: Tensor,
    w_scale: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype = torch.bfloat16,
    cut: Tiling | None = None,
) -> Tensor:
    """x float8 [M, K] with x_scale [M, K / 128], w float8 [N, K] with w_scale [N / 128, K / 128] -> [M, N]."""
    tokens, depth = x.shape
    rows = w.shape[0]
    cut = cut or tiling(rows, tokens)
    out = torch.empty(tokens, rows, dtype=out_dtype, device=x.device)
    token_tile = min(cut.tokens, power_of_two(tokens, 16))
    tiles, token_tiles = triton.cdiv(rows, cut.rows), triton.cdiv(tokens, token_tile)
    steps = triton.cdiv(depth, BLOCK)
    splits = choose_splits(tiles * token_tiles, steps, x.device)
    splits = triton.cdiv(steps, triton.cdiv(steps, splits))  # none without work
    scratch = workspace(x.device)
    partial = scratch.partials(splits * tiles * token_tiles * cut.rows * token_tile if splits > 1 else 0)
    variant = Variant(token_tile, cut.rows, splits > 1, depth % BLOCK == 0, uses_pdl(x.device), INTERPRETED)
    _block_product[(tiles, splits, token_tiles)](
        x,
        x_scale,
        w,
        w_scale,
        out,
        bias,
        SplitSums(partial, scratch.counters(tiles * token_tiles)),
        tokens,
        rows,
        depth,
        out.stride(0),
        splits,
        VARIANT=variant,
        **options(x.device, cut.warps, cut.stages),
    )
    return out
