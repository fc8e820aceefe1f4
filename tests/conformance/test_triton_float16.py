"""Triton's products with float16 input against float64 twins: plain weights, a scale per row, groups of codes."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

if os.environ.get("TRITON_INTERPRET") != "1" and not torch.cuda.is_available():
    pytest.skip("no GPU: test_triton.py runs this file under the interpreter", allow_module_level=True)

from tokenmill.kernels.triton.matmul import dequantize as expansion
from tokenmill.kernels.triton.matmul import repack
from tokenmill.kernels.triton.matmul.choose import GEMV, GROUPED, SKINNY, Plan, Tiling
from tokenmill.kernels.triton.matmul.joined import join_linears
from tokenmill.kernels.triton.matmul.linear import DenseLinear, GroupedLinear
from tokenmill.kernels.triton.matmul.make import quantize_at_load

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HALF = torch.float16
ERROR = 1e-3  # float16 input and output; a sixth of what bf16 is allowed
FLOAT8_ERROR = 0.04 if torch.cuda.is_available() else 0.14  # the interpreter cuts off instead of rounding


def error(got: Tensor, wanted: Tensor) -> float:
    assert not got.isnan().any()
    return float((got.double().cpu() - wanted.double().cpu()).norm() / wanted.double().cpu().norm())


def tokens(count: int, depth: int) -> Tensor:
    return torch.randn(count, depth).to(DEVICE, HALF)


@pytest.mark.parametrize("kernel", [SKINNY, GEMV])
def test_dense_in_float16(kernel: str) -> None:
    count, rows, depth = (1, 70, 208) if kernel == GEMV else (18, 33, 320)
    weight, bias, x = torch.randn(rows, depth).half(), torch.randn(rows), tokens(count, depth)
    linear = DenseLinear(weight.to(DEVICE), bias, dtype=HALF)
    wanted = x.double().cpu() @ weight.double().T + bias.double()
    got = linear.multiply(x, HALF, Plan(kernel, Tiling(16, 64, 1, 4, 2)))
    assert (linear.weight.dtype, linear.detail, got.dtype) == (HALF, "fp16", HALF)
    assert error(got, wanted) < ERROR
    assert error(linear(x.float()), wanted) < ERROR
    joined = join_linears([linear, linear])
    assert isinstance(joined, DenseLinear)
    assert joined.weight.dtype == HALF


@pytest.mark.parametrize(("kind", "count"), [("fp8", 1), ("int8", 3)])
def test_scaled_codes_with_float16_input(kind: str, count: int) -> None:
    values, x = torch.randn(40, 96), tokens(count, 96)
    linear = quantize_at_load(values.to(DEVICE), None, kind)
    got = linear.multiply(x, HALF)
    assert got.dtype == HALF
    assert error(got, x.double().cpu() @ values.double().T) < (FLOAT8_ERROR if kind == "fp8" else 0.03)


@pytest.mark.parametrize(("bits", "affine", "count"), [(4, False, 1), (4, True, 70), (8, True, 3)])
def test_groups_with_float16_input(bits: int, affine: bool, count: int) -> None:
    """One token without tensor cores; scales in the weights from 64 tokens on; and expanded."""
    rows, depth, group = 22, 256, 32
    top = 8 if bits == 4 else 128
    codes, scales = torch.randint(-top, top, (rows, depth), dtype=torch.int8), torch.rand(rows, depth // group) + 0.1
    zeros = torch.randint(-5, 5, scales.shape).float() if affine else torch.zeros_like(scales)
    weight = repack.pack_groups(codes.to(DEVICE), scales.to(DEVICE), zeros.to(DEVICE), bits)
    exact = (codes.double() - zeros.double().repeat_interleave(group, 1)) * scales.double().repeat_interleave(group, 1)
    x, linear = tokens(count, depth), GroupedLinear(weight, torch.ones(rows), "")
    plan = Plan(GEMV, Tiling(4, warps=1)) if count == 1 else Plan(GROUPED, Tiling(16, 0, 1, 4, 2, 0, 64))
    got = linear.multiply(x, HALF, plan)
    assert got.dtype == HALF
    assert error(got, x.double().cpu() @ exact.T + 1) < ERROR
    expanded = expansion.dequantize(weight, HALF)
    assert expanded.dtype == HALF
    assert error(expanded, exact) < ERROR


def test_a_zero_that_float16_cannot_hold_makes_a_group_flat() -> None:
    codes, scales = torch.ones(1, 32, dtype=torch.int8), torch.tensor([[1e-6]])
    codes, scales, zeros = repack._affine(codes, scales, torch.tensor([[0.5]]))
    assert (float(scales), float(zeros), set(codes.flatten().tolist())) == (0.5, 0.0, {1})
