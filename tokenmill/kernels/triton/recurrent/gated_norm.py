"""RMS norm over groups of each row times silu of a gate, which comes before or after the norm: one pass."""

# mypy: allow-untyped-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenmill.kernels.triton.recurrent.sequences import check_rows
from tokenmill.kernels.triton.shared.device import dependent_launch
from tokenmill.kernels.triton.shared.launch import options, power_of_two, uses_pdl

_NUMBERS = 1024  # of a program, at least


@triton.jit(do_not_specialize=["count"])
def _gated_norm(
    x,
    gate,
    weight,
    out,
    count,
    eps,
    gate_scale,
    width,
    x_stride,
    gate_stride,
    PER_ROW: tl.constexpr,
    WEIGHTS: tl.constexpr,
    SLICES: tl.constexpr,
    BLOCK: tl.constexpr,
    NORM_FIRST: tl.constexpr,
    PDL: tl.constexpr,
):
    """SLICES of `width` numbers; those of a row take turns with the WEIGHTS."""
    slices = tl.program_id(0) * SLICES + tl.arange(0, SLICES)
    columns = tl.arange(0, BLOCK)[None, :]
    row, group = (slices // PER_ROW).to(tl.int64)[:, None], (slices % PER_ROW)[:, None]
    ok = (slices < count)[:, None] & (columns < width)
    gain = tl.load(weight + group % WEIGHTS * width + columns, mask=ok, other=0.0).to(tl.float32)
    dependent_launch(PDL)
    inside = group * width + columns
    values = tl.load(x + row * x_stride + inside, mask=ok, other=0.0).to(tl.float32)
    factor = tl.load(gate + row * gate_stride + inside, mask=ok, other=0.0).to(tl.float32) * gate_scale
    factor *= tl.sigmoid(factor)
    if not NORM_FIRST:
        values *= factor
    values *= tl.rsqrt(tl.sum(values * values, 1) / width + eps)[:, None] * gain
    if NORM_FIRST:
        values *= factor
    tl.store(out + row * (PER_ROW * width) + inside, values.to(out.dtype.element_ty), mask=ok)


def gated_norm(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, norm_first: bool, gate_scale: float = 1.0
) -> Tensor:
    """x and gate [T, W]; weight [groups, W / groups], or [W'] for all slices of that width."""
    check_rows(x, gate)
    rows, width, device = x.shape[0], weight.shape[-1], x.device
    per_row, block = x.shape[1] // width, power_of_two(width, 16)
    slices = max(1, _NUMBERS // block)
    out = torch.empty((rows, x.shape[1]), dtype=x.dtype, device=device)
    _gated_norm[(triton.cdiv(rows * per_row, slices),)](
        x, gate, weight, out, rows * per_row, eps, float(gate_scale), width, x.stride(0), gate.stride(0),
        PER_ROW=per_row, WEIGHTS=weight.numel() // width, SLICES=slices, BLOCK=block, NORM_FIRST=norm_first,
        PDL=uses_pdl(device), **options(device, max(4, min(16, block // 512)), 1),
    )  # fmt: skip
    return out
