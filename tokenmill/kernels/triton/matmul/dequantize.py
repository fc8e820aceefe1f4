"""Grouped codes written out as 16-bit floats, where the vendor's library multiplies faster than codes are unpacked.

Knows the layout that grouped.py describes. Called by linear.py for products of many tokens, which keeps nothing, and by
joined.py, once, for small matrices that stay so.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenmill.kernels.triton.matmul.grouped import GroupedWeight
from tokenmill.kernels.triton.shared.device import dependent_launch
from tokenmill.kernels.triton.shared.launch import options, uses_pdl


@triton.jit
def _dequantize(
    weight, out, N, K, WIDTH: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr, BN: tl.constexpr, PDL: tl.constexpr
):
    """Grouped codes -> [N, K] in the type of `out`, for products with thousands of tokens."""
    dependent_launch(PDL)
    rows = tl.program_id(0) * BN + tl.arange(0, BN)
    step = tl.program_id(1)
    ok = rows < N
    inner = tl.arange(0, WIDTH)
    place = (tl.cast(step, tl.int64) * N + rows[:, None]) * WIDTH + inner[None, :]
    packed = tl.load(weight.codes + place, mask=ok[:, None], other=0)
    whole = tl.load(weight.row_scale + rows, mask=ok, other=0.0)
    for part in tl.static_range(8 if BITS == 4 else 1):
        first = (step * (8 if BITS == 4 else 1) + part) * WIDTH
        group = tl.cast(first // GROUP, tl.int64) * N + rows
        values = ((packed >> (4 * part)) & 15).to(tl.float32) - 8.0 if BITS == 4 else packed.to(tl.float32)
        if weight.zeros is not None:
            values -= tl.load(weight.zeros + group, mask=ok, other=0.0).to(tl.float32)[:, None]
        scale = tl.load(weight.scales + group, mask=ok & (first < K), other=0.0).to(tl.float32) * whole
        k = first + inner
        place = out + rows[:, None].to(tl.int64) * K + k[None, :]
        tl.store(place, (values * scale[:, None]).to(out.dtype.element_ty), mask=ok[:, None] & (k[None, :] < K))


def dequantize(weight: GroupedWeight, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """The matrix [N, K]."""
    device = weight.codes.device
    out = torch.empty(weight.rows, weight.depth, dtype=dtype, device=device)
    _dequantize[(triton.cdiv(weight.rows, 16), weight.codes.shape[0])](
        weight.tensors,
        out,
        weight.rows,
        weight.depth,
        WIDTH=weight.codes.shape[2],
        GROUP=weight.group,
        BITS=weight.bits,
        BN=16,
        PDL=uses_pdl(device),
        **options(device, 4, 1),
    )
    return out
