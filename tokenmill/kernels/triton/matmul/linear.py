"""Weights made ready for a GPU: 16-bit floats, a scale per row (fp8, int8) or grouped codes (blocks.py: fp8 in blocks).

Decides nothing itself: choose.py names the kernel for each token count, repack.py makes the layout. A call never
synchronizes and allocates only its output, so it can be captured. Activations are bf16 or float16 inside, as the input
is (float32 becomes the type of the weights, or bf16); the result has the type of the input. Made by the loader;
executors call `multiply` and ask what it fuses.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tokenmill.kernels.triton.fused.elementwise import quantize_rows
from tokenmill.kernels.triton.fused.rotary_epilogue import HeadPlaces
from tokenmill.kernels.triton.matmul import choose
from tokenmill.kernels.triton.matmul.choose import GEMV, HOPPER, HOPPER_WIDE, LIBRARY, Plan, plan_table
from tokenmill.kernels.triton.matmul.dequantize import dequantize
from tokenmill.kernels.triton.matmul.gemv import gemv
from tokenmill.kernels.triton.matmul.grouped import GroupedWeight, grouped_matmul
from tokenmill.kernels.triton.matmul.grouped_gemv import grouped_gemv
from tokenmill.kernels.triton.matmul.skinny import skinny_matmul


def float_name(dtype: torch.dtype) -> str:
    """Of a 16-bit float, as kernels are described."""
    return "fp16" if dtype == torch.float16 else "bf16"


def in_sixteen_bits(x: Tensor) -> Tensor:
    """Activations as products take them: float16 and bf16 as they are, others as bf16."""
    return x if x.dtype == torch.float16 else x.to(torch.bfloat16)


class GpuLinear:
    """What the three kinds share: the bias, the plan for a token count, what that plan fuses."""

    backend = "triton"
    kind: str
    activations = ""  # "fp8" or "int8" where the input is quantized per token
    input_scale = 0.0  # of quantized inputs: calibrated; 0: each token has its own

    def __init__(self, rows: int, depth: int, bias: Tensor | None, device: torch.device, detail: str) -> None:
        self.rows, self.depth, self.device, self.detail = rows, depth, device, detail
        self.bias = None if bias is None else bias.to(device, torch.float32).contiguous()
        self.plans = plan_table(device)

    @property
    def nbytes(self) -> int:
        raise NotImplementedError

    def __call__(self, x: Tensor) -> Tensor:
        return self.multiply(x, x.dtype)

    def multiply(
        self,
        x: Tensor,
        out_dtype: torch.dtype = torch.bfloat16,
        plan: Plan | None = None,
        gated: bool = False,
        heads: HeadPlaces | None = None,
    ) -> Tensor:
        """x [M, K] in any float type -> [M, N]. `gated`, only where `gates` says so: silu of the first half of rows
        times the second, [M, N / 2]. `heads`, only where `rotates` says so: rotated and stored there, the queries."""
        raise NotImplementedError

    def multiply_quantized(
        self,
        codes: Tensor,
        scales: Tensor,
        out_dtype: torch.dtype = torch.bfloat16,
        plan: Plan | None = None,
        gated: bool = False,
        heads: HeadPlaces | None = None,
    ) -> Tensor:
        """As `multiply`, of codes [M, K] and scales [M] as fused/elementwise.py makes them; where `activations`."""
        raise NotImplementedError

    def gates(self, tokens: int) -> bool:
        """Whether `multiply` of this many tokens takes `gated`."""
        return choose.fuses_gate(self.choose(tokens), self.rows, tokens)

    def rotates(self, tokens: int) -> bool:
        """Whether `multiply` of this many tokens takes `heads`."""
        return choose.fuses_rotary(self.choose(tokens), tokens)

    def takes_codes(self, tokens: int) -> bool:
        """Whether a product of this many tokens wants its input in 8 bits, as a fused norm or gate writes it."""
        return bool(self.activations) and choose.takes_codes(self.choose(tokens), self.rows, tokens)

    def choose(self, tokens: int) -> Plan:
        return self.plans.plan(self.kind, self.rows, self.depth, tokens)

    def tune(self, tokens: int) -> Plan:
        """Measure once which plan is fastest for this many tokens; later calls, in later processes too, use it."""
        x = torch.randn(tokens, self.depth, device=self.device, dtype=torch.bfloat16)
        return self.plans.measure(
            self.kind, self.rows, self.depth, tokens, lambda plan: self.multiply(x, torch.bfloat16, plan)
        )

    def _add_bias(self, y: Tensor) -> Tensor:
        return y if self.bias is None else y.add_(self.bias)


class DenseLinear(GpuLinear):
    kind = "bf16"  # plans are those of all 16-bit floats

    def __init__(
        self, weight: Tensor, bias: Tensor | None, detail: str = "", dtype: torch.dtype = torch.bfloat16
    ) -> None:
        super().__init__(weight.shape[0], weight.shape[1], bias, weight.device, detail or float_name(dtype))
        self.weight = weight.to(dtype).contiguous()
        # The bias, if 16 bits hold it: the library adds it to a product by itself.
        self._short_bias: Tensor | None = None
        if self.bias is not None and torch.equal(self.bias, self.bias.to(dtype).float()):
            self._short_bias = self.bias.to(dtype)

    @property
    def nbytes(self) -> int:
        return self.weight.numel() * 2

    def multiply(
        self,
        x: Tensor,
        out_dtype: torch.dtype = torch.bfloat16,
        plan: Plan | None = None,
        gated: bool = False,
        heads: HeadPlaces | None = None,
    ) -> Tensor:
        plan = plan or self.choose(x.shape[0])
        x = x.to(self.weight.dtype)
        if plan.kernel == LIBRARY:
            return self._library(x, out_dtype)
        if plan.kernel == GEMV and x.shape[0] == 1:
            return gemv(x, self.weight, None, None, self.bias, out_dtype, plan.tiling, gated, heads)
        return skinny_matmul(x, self.weight, None, None, self.bias, out_dtype, plan.tiling)

    def _library(self, x: Tensor, out_dtype: torch.dtype) -> Tensor:
        if out_dtype == torch.float32:  # the sums themselves, not rounded in between
            return self._add_bias(torch.mm(x, self.weight.T, out_dtype=torch.float32))
        if self._short_bias is not None:
            return torch.addmm(self._short_bias, x, self.weight.T).to(out_dtype)
        return self._add_bias(torch.mm(x, self.weight.T).to(out_dtype))


class RouterLinear(DenseLinear):
    """Scores of experts: bf16 operands, float32 sums that are never rounded. Few rows, so that for up to some hundred
    tokens only a split of the depth fills the GPU."""

    def choose(self, tokens: int) -> Plan:
        return choose.router_rule(self.rows, self.depth, tokens)

    def multiply(
        self,
        x: Tensor,
        out_dtype: torch.dtype = torch.float32,
        plan: Plan | None = None,
        gated: bool = False,
        heads: HeadPlaces | None = None,
    ) -> Tensor:
        return super().multiply(x, torch.float32, plan, gated, heads).to(out_dtype)


class ScaledLinear(GpuLinear):
    """float8_e4m3fn or int8 codes [N, K] with a scale per row; the input is quantized per token to the same type."""

    def __init__(
        self, codes: Tensor, scales: Tensor, bias: Tensor | None, detail: str = "", input_scale: float = 0.0
    ) -> None:
        self.kind = self.activations = "int8" if codes.dtype == torch.int8 else "fp8"
        super().__init__(codes.shape[0], codes.shape[1], bias, codes.device, detail or f"{self.kind} per row x token")
        self.input_scale = input_scale
        self.codes = codes.contiguous()
        self.scales = scales.to(codes.device, torch.float32).reshape(-1).contiguous()

    @property
    def nbytes(self) -> int:
        return self.codes.numel() + 4 * self.scales.numel()

    def multiply(
        self,
        x: Tensor,
        out_dtype: torch.dtype = torch.bfloat16,
        plan: Plan | None = None,
        gated: bool = False,
        heads: HeadPlaces | None = None,
    ) -> Tensor:
        plan = plan or self.choose(x.shape[0])
        if plan.kernel == GEMV and x.shape[0] == 1:
            x = in_sixteen_bits(x)
            return gemv(x, self.codes, None, self.scales, self.bias, out_dtype, plan.tiling, gated, heads)
        return self.multiply_quantized(*quantize_rows(x, self.activations, self.input_scale), out_dtype, plan)

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
        if plan.kernel == LIBRARY:
            return self._add_bias(self._library(codes, scales, out_dtype))
        if plan.kernel == GEMV and codes.shape[0] == 1:
            rest = (self.bias, out_dtype, plan.tiling, gated, heads)
            return gemv(codes, self.codes, scales, self.scales, *rest)
        return skinny_matmul(codes, self.codes, scales, self.scales, self.bias, out_dtype, plan.tiling)

    def _library(self, codes: Tensor, scales: Tensor, out_dtype: torch.dtype) -> Tensor:
        if self.kind == "int8":
            total = torch._int_mm(codes, self.codes.T)
            return (total.float() * scales[:, None] * self.scales).to(out_dtype)
        product = torch._scaled_mm(
            codes,
            self.codes.T,
            scale_a=scales[:, None],
            scale_b=self.scales[None, :],
            out_dtype=torch.bfloat16,  # the one type that the library has for scales by row and token
            use_fast_accum=True,
        )
        return product.to(out_dtype)


class GroupedLinear(GpuLinear):
    def __init__(self, weight: GroupedWeight, bias: Tensor | None, detail: str) -> None:
        # "int4": what matmul/hopper and grouped_gemv.py read; TMA wants rows of tokens at multiples of 16 bytes.
        regular = weight.codes.shape[2] == 32 and weight.group >= 32 and weight.depth % 8 == 0
        self.kind = "grouped8" if weight.bits == 8 else "int4" if regular else "grouped4"
        super().__init__(weight.rows, weight.depth, bias, weight.codes.device, detail)
        self.weight = weight

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes

    def like(self, weight: GroupedWeight, bias: Tensor | None) -> GroupedLinear:
        """Other codes that are multiplied as these are."""
        return GroupedLinear(weight, bias, self.detail)

    def multiply(
        self,
        x: Tensor,
        out_dtype: torch.dtype = torch.bfloat16,
        plan: Plan | None = None,
        gated: bool = False,
        heads: HeadPlaces | None = None,
    ) -> Tensor:
        plan = plan or self.choose(x.shape[0])
        x = in_sixteen_bits(x)
        if plan.kernel == LIBRARY:
            return self._add_bias(torch.mm(x, dequantize(self.weight, x.dtype).T).to(out_dtype))
        if plan.kernel == HOPPER:
            from tokenmill.kernels.triton.matmul.hopper.narrow import narrow_matmul  # imports Gluon

            return narrow_matmul(x, self.weight, self.bias, out_dtype, gated)
        if plan.kernel == HOPPER_WIDE:
            from tokenmill.kernels.triton.matmul.hopper.wide import wide_matmul  # imports Gluon

            return wide_matmul(x, self.weight, self.bias, out_dtype, gated)
        if plan.kernel == GEMV and x.shape[0] == 1:
            return grouped_gemv(x, self.weight, self.bias, out_dtype, plan.tiling, gated, heads)
        return grouped_matmul(x, self.weight, self.bias, out_dtype, plan.tiling, gated, heads)
