"""What a draft head reads: a hidden state and the embedding of the next token, side by side, each RMS-normalized.

One launch instead of four for every draft of a captured step, where launches are what a draft costs. Called by
runtime/speculation/captured_heads.py; its plain twin is the first line of EagleHead.forward.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from tokenmill.kernels.triton.shared.device import dependent_launch
from tokenmill.kernels.triton.shared.launch import options, power_of_two, uses_pdl


@triton.jit
def _draft_inputs(
    hidden,
    ids,
    table,
    out,
    scale,
    eps,
    hidden_stride,
    table_stride,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    dependent_launch(PDL)
    row = tl.program_id(0).to(tl.int64)
    is_token = tl.program_id(1)
    dims = tl.arange(0, BLOCK)
    ok = dims < WIDTH
    if is_token == 0:
        x = tl.load(hidden + row * hidden_stride + dims, mask=ok, other=0.0).to(tl.float32)
    else:
        token = tl.load(ids + row).to(tl.int64)
        x = tl.load(table + token * table_stride + dims, mask=ok, other=0.0).to(tl.float32) * scale
    x *= tl.rsqrt(tl.sum(x * x, 0) / WIDTH + eps)
    tl.store(out + row * (2 * WIDTH) + is_token * WIDTH + dims, x.to(out.dtype.element_ty), mask=ok)


def draft_inputs(hidden: Tensor, ids: Tensor, table: Tensor, scale: float, eps: float) -> Tensor:
    """hidden [R, width], ids int64 [R] into table [vocab, width] -> [R, 2 * width] in the type of `hidden`."""
    rows, width = hidden.shape
    out = hidden.new_empty(rows, 2 * width)
    _draft_inputs[(rows, 2)](
        hidden,
        ids,
        table,
        out,
        scale,
        eps,
        hidden.stride(0),
        table.stride(0),
        WIDTH=width,
        BLOCK=power_of_two(width),
        PDL=uses_pdl(hidden.device),
        **options(hidden.device, 4, 1),
    )
    return out
