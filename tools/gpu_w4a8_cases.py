"""What compile_gpu_kernels.py compiles of W4A8: 4-bit groups with float8 inputs, by every plan that is measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch


def w4a8_cases() -> Iterator[tuple[str, Callable[[], object]]]:
    """The joined projections of Llama-3.1-8B, groups of all sizes, with and without zero points."""
    from tokenmill.kernels.triton.matmul.choose import GEMV, GROUPED, GROUPED_FP8, candidates
    from tokenmill.kernels.triton.matmul.grouped import GroupedWeight
    from tokenmill.kernels.triton.matmul.w4a8 import RoundedGroupedLinear

    rows, depth = 6144, 4096
    for group, affine in ((128, False), (64, False), (32, False), (128, True), (32, True)):
        scales = torch.zeros(depth // group, rows, dtype=torch.float16)
        zeros = scales.to(torch.bfloat16) if affine else None
        codes = torch.empty(depth // 256, rows, 32, dtype=torch.int32)
        linear = RoundedGroupedLinear(GroupedWeight(4, group, depth, codes, scales, zeros, torch.empty(rows)), None, "")
        name = f"w4a8 {group}{' zeros' if affine else ''}"
        for tokens in (1, 16, 64, 4096):
            x = torch.empty(tokens, depth, dtype=torch.float8_e4m3fn), torch.empty(tokens)
            for plan in candidates(linear.kind, rows, depth, tokens):
                fused = plan.kernel in (GEMV, GROUPED) and tokens <= 16
                if fused or plan.kernel == GROUPED_FP8:
                    cut = f"{plan.kernel} {tokens} {plan.tiling.rows} x {plan.tiling.tokens}"
                    yield f"{name} {cut}", partial(linear.multiply_quantized, *x, torch.bfloat16, plan)
                if fused:
                    yield f"{name} gated {tokens}", partial(linear.multiply_quantized, *x, torch.bfloat16, plan, True)
