"""What compile_gpu_kernels.py compiles of a model in float16: its kernels take their type from their inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch


def float16_cases(
    steps: Mapping[str, list[int]], batch: Callable[..., Any]
) -> Iterator[tuple[str, Callable[[], object]]]:
    """Llama-3.1-8B in float16: products of plain, 4-bit (with and without zeros), 8-bit and float8 weights by every
    kernel, norms and gates, attention over pages of that type and over FP8. `steps`: tokens of each sequence, by name;
    `batch`: their table of pages, first rows and lengths."""
    from tokenmill.kernels import triton as gpu
    from tokenmill.kernels.triton.matmul.choose import GEMV, GROUPED, HOPPER, HOPPER_WIDE, SKINNY, Plan, rule
    from tokenmill.kernels.triton.matmul.grouped import GroupedWeight
    from tokenmill.kernels.triton.matmul.linear import DenseLinear, GroupedLinear, ScaledLinear

    half, rows, depth = torch.float16, 6144, 4096
    scales, ones = torch.empty(depth // 128, rows, dtype=half), torch.empty(rows)
    zeros, words = torch.empty(depth // 128, rows, dtype=torch.bfloat16), (depth // 256, rows, 32)
    codes = torch.empty(words, dtype=torch.int32)
    linears = {
        "dense": DenseLinear(torch.empty(rows, depth, dtype=half), None, dtype=half),
        "int4": GroupedLinear(GroupedWeight(4, 128, depth, codes, scales, None, ones), None, ""),
        "int4 zeros": GroupedLinear(GroupedWeight(4, 128, depth, codes, scales, zeros, ones), None, ""),
        "fp8": ScaledLinear(torch.empty(rows, depth, dtype=torch.float8_e4m3fn), ones, None),
    }
    eight = torch.empty(depth // 32, rows, 32, dtype=torch.int8)
    fine = torch.empty(depth // 32, rows, dtype=half)
    linears["int8 groups"] = GroupedLinear(GroupedWeight(8, 32, depth, eight, fine, None, ones), None, "")
    for name, linear in linears.items():
        for tokens in (1, 16, 64, 256):
            plan = rule(linear.kind, rows, depth, tokens)
            plans = [plan] if plan.kernel in (GEMV, SKINNY, GROUPED, HOPPER, HOPPER_WIDE) else []
            if linear.kind == "int4" and tokens == 256:
                plans = [Plan(HOPPER), Plan(HOPPER_WIDE)]
            for each in plans:
                x = torch.empty(tokens, depth, dtype=half)
                yield f"half {name} {each.kernel} {tokens}", partial(linear.multiply, x, half, each)
                if linear.kind == "int4" and linear.gates(tokens):
                    yield f"half {name} gated {tokens}", partial(linear.multiply, x, half, each, True)
    x = torch.empty(64, depth, dtype=half)
    yield "half norm", partial(gpu.add_rms_norm, x, x, torch.empty(depth), 1e-5)
    yield "half norm in 8 bits", partial(gpu.add_rms_norm_quantized, x, x, torch.empty(depth), 1e-5, "fp8", 0.0)
    yield "half gate", partial(gpu.gated, x, x, "silu")
    for dtype in (half, torch.float8_e4m3fn):
        pages = torch.empty(4, 8, 16, 128, dtype=dtype)
        by = None if dtype == half else (torch.empty(8), torch.empty(8))
        for step, counts in steps.items():
            q = torch.empty(sum(counts), 4096, dtype=half)
            call = partial(gpu.paged_attention, q, pages, pages, *batch(counts, 16), 0.1, scales=by)
            yield f"half attention {dtype} {step}", call
        for runs in (1, 64):
            shared = gpu.SharedPrefixes(
                torch.zeros(runs, 3, dtype=torch.int32), torch.zeros(64, dtype=torch.int32), 4096
            )
            q = torch.empty(64, 4096, dtype=half)
            call = partial(gpu.paged_attention, q, pages, pages, *batch([1] * 64, 16), 0.1, shared=shared, scales=by)
            yield f"half attention {dtype} shared {runs}", call
