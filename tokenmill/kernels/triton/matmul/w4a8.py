"""W4A8 and its relatives: grouped codes whose input is rounded to float8 per token, which is part of what they mean.

Decides nothing: choose.py names the kernel by its kinds "w4a8", "w4a8g32" and "w4a8row" (others, such as 8-bit groups,
have the plans of grouped codes). Few tokens are multiplied in float16, which holds every float8 number, so that all
kernels give the rounded input times the exact weights. Made by make.py.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from tokenmill.kernels.triton.fused.elementwise import quantize_rows
from tokenmill.kernels.triton.fused.rotary_epilogue import HeadPlaces
from tokenmill.kernels.triton.matmul.choose import GEMV, GROUPED, GROUPED_FP8, LIBRARY, Plan
from tokenmill.kernels.triton.matmul.dequantize import dequantize
from tokenmill.kernels.triton.matmul.grouped import GroupedWeight, grouped_matmul
from tokenmill.kernels.triton.matmul.grouped_fp8 import grouped_fp8
from tokenmill.kernels.triton.matmul.grouped_gemv import grouped_gemv
from tokenmill.kernels.triton.matmul.linear import GroupedLinear


def has_row_scales(weight: GroupedWeight) -> bool:
    """Whether all groups of a row share a scale, without zero points, in a shape that the library takes."""
    whole = weight.scales[: weight.depth // weight.group]
    return weight.zeros is None and not (weight.rows | weight.depth) % 16 and bool((whole == 1).all())


class RoundedGroupedLinear(GroupedLinear):
    activations = "fp8"

    def __init__(self, weight: GroupedWeight, bias: Tensor | None, detail: str, input_scale: float = 0.0) -> None:
        super().__init__(weight, bias, detail)
        self.input_scale = input_scale
        if self.kind == "int4":
            self.kind = "w4a8row" if has_row_scales(weight) else "w4a8" if weight.group > 32 else "w4a8g32"

    def like(self, weight: GroupedWeight, bias: Tensor | None) -> RoundedGroupedLinear:
        return RoundedGroupedLinear(weight, bias, self.detail, self.input_scale)

    def takes_codes(self, tokens: int) -> bool:  # noqa: ARG002
        return True

    def multiply(
        self,
        x: Tensor,
        out_dtype: torch.dtype = torch.bfloat16,
        plan: Plan | None = None,
        gated: bool = False,
        heads: HeadPlaces | None = None,
    ) -> Tensor:
        codes, scales = quantize_rows(x, self.activations, self.input_scale)
        return self.multiply_quantized(codes, scales, out_dtype, plan, gated, heads)

    def multiply_quantized(
        self,
        codes: Tensor,
        scales: Tensor,
        out_dtype: torch.dtype = torch.bfloat16,
        plan: Plan | None = None,
        gated: bool = False,
        heads: HeadPlaces | None = None,
    ) -> Tensor:
        plan = plan or self.choose(codes.shape[0])
        if plan.kernel == GROUPED_FP8:
            assert not gated, "nothing is fused"
            assert heads is None, "nothing is fused"
            return grouped_fp8(codes, scales, self.weight, self.bias, out_dtype, plan.tiling)
        rest = (self.weight, self.bias, out_dtype, plan.tiling, gated, heads, scales)
        if plan.kernel == GEMV and codes.shape[0] == 1:
            return grouped_gemv(codes, *rest)
        if plan.kernel == GROUPED:
            return grouped_matmul(codes, *rest)
        if plan.kernel == LIBRARY and self.kind == "w4a8row":
            return self._add_bias(self._library(codes, scales, out_dtype))
        rounded = (codes.float() * scales[:, None]).to(torch.bfloat16)
        if plan.kernel == LIBRARY:
            return self._add_bias(torch.mm(rounded, dequantize(self.weight).T).to(out_dtype))
        return super().multiply(rounded, out_dtype, plan, gated, heads)

    def _library(self, codes: Tensor, scales: Tensor, out_dtype: torch.dtype) -> Tensor:
        """One scale for a row: its codes are float8 numbers, so that the library's product is exact."""
        plain = replace(self.weight, row_scale=torch.ones_like(self.weight.row_scale))
        weight, by = dequantize(plain, torch.float8_e4m3fn), self.weight.row_scale[None, :]
        bf16 = torch.bfloat16  # the one type that the library has for scales by row and token
        product = torch._scaled_mm(codes, weight.T, scales[:, None], by, out_dtype=bf16, use_fast_accum=False)
        return product.to(out_dtype)
