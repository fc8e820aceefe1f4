"""What happens to rows around the products: rounding to float8 with a scale for every 128 columns, and the sum over a
token's experts. Knows no weights. Called by layer.py.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenmill.kernels.triton.experts.stack import SCALE_BLOCK
from tokenmill.kernels.triton.shared.device import dependent_launch
from tokenmill.kernels.triton.shared.launch import options, uses_pdl


@triton.jit
def _quantize(x, codes, scales, K, GROUPS, stride, BG: tl.constexpr, PDL: tl.constexpr):
    dependent_launch(PDL)
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * BG + tl.arange(0, BG)
    k = group[:, None] * 128 + tl.arange(0, 128)[None, :]
    values = tl.load(x + row * stride + k, mask=k < K, other=0.0).to(tl.float32)
    scale = tl.max(tl.abs(values), 1) / 448.0
    scale = tl.where(scale > 0, scale, 1.0)
    rounded = (values / scale[:, None]).to(codes.dtype.element_ty)
    tl.store(codes + row * K + k, rounded, mask=k < K)
    tl.store(scales + row * GROUPS + group, scale, mask=group < GROUPS)


def quantize_groups(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [T, width] -> (codes float8_e4m3fn [T, width], scales float32 [T, width / 128])."""
    rows, width = x.shape
    groups = triton.cdiv(width, SCALE_BLOCK)
    codes = torch.empty(rows, width, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(rows, groups, dtype=torch.float32, device=x.device)
    block = 8
    _quantize[(rows, triton.cdiv(groups, block))](
        x,
        codes,
        scales,
        width,
        groups,
        x.stride(0),
        BG=block,
        PDL=uses_pdl(x.device),
        **options(x.device, 4, 1),
    )
    return codes, scales


@triton.jit
def _add_experts(x, out, N, K: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    dependent_launch(PDL)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for place in tl.static_range(K):
        total += tl.load(x + (token * K + place) * N + column, mask=column < N, other=0.0).to(tl.float32)
    tl.store(out + token * N + column, total.to(out.dtype.element_ty), mask=column < N)


def add_experts(x: Tensor, top_k: int, out_dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """x [T * k, width] -> [T, width], the sum over each token's k rows, in their order."""
    tokens, width = x.shape[0] // top_k, x.shape[1]
    out = torch.empty(tokens, width, dtype=out_dtype, device=x.device)
    block = 1024
    _add_experts[(tokens, triton.cdiv(width, block))](
        x, out, width, K=top_k, BLOCK=block, PDL=uses_pdl(x.device), **options(x.device, 4, 1)
    )
    return out
