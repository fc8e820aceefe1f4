"""Products that rotate and store q, k and v by themselves: bit for bit what the product and `rope_store` give."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

if os.environ.get("TRITON_INTERPRET") != "1" and not torch.cuda.is_available():
    pytest.skip("no GPU: test_triton.py runs this file under the interpreter", allow_module_level=True)

from tokenmill.kernels import triton as gpu
from tokenmill.kernels.triton.matmul.choose import GEMV, GROUPED, Plan, Tiling
from tokenmill.kernels.triton.matmul.linear import DenseLinear, GpuLinear, ScaledLinear
from tokenmill.kernels.triton.matmul.make import quantize_at_load

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
Q_HEADS, KV_HEADS, DEPTH = 3, 2, 512


def weights(kind: str, head_dim: int, biased: bool) -> GpuLinear:
    rows = (Q_HEADS + 2 * KV_HEADS) * head_dim
    values, bias = torch.randn(rows, DEPTH), torch.randn(rows) if biased else None
    if kind == "bf16":
        return DenseLinear(values.bfloat16().to(DEVICE), bias)
    return quantize_at_load(values.to(DEVICE), bias, kind)


def pages(head_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    shape = (3, KV_HEADS, 16, head_dim)
    return torch.zeros(shape, dtype=dtype, device=DEVICE), torch.zeros(shape, dtype=dtype, device=DEVICE)


def assert_same(linear: GpuLinear, head_dim: int, interleaved: bool, dtype: torch.dtype, slots: list[int]) -> None:
    count = len(slots)
    assert linear.rotates(count)
    x = torch.randn(count, DEPTH).to(DEVICE, torch.bfloat16)
    positions, slot = torch.arange(5, 5 + count, device=DEVICE), torch.tensor(slots, device=DEVICE)
    angles = torch.outer(torch.arange(40.0), torch.rand(head_dim // 2))
    tables = (angles.cos().to(DEVICE), angles.sin().to(DEVICE))
    quantized = dtype == torch.float8_e4m3fn
    scales = (torch.rand(2, device=DEVICE) + 0.5, torch.rand(2, device=DEVICE) + 0.5) if quantized else None
    wanted, found = pages(head_dim, dtype), pages(head_dim, dtype)
    product = linear.multiply(x)
    apart = gpu.rope_store(product, Q_HEADS, *wanted, positions, slot, *tables, interleaved, scales=scales)
    heads = gpu.head_places(count, Q_HEADS, *found, positions, slot, *tables, interleaved, scales)
    together = linear.multiply(x, heads=heads)
    assert together.float().abs().max() > 0
    assert torch.equal(together, apart)
    for one, other in zip(wanted, found, strict=True):
        assert torch.equal(one.float(), other.float())
        assert one.float().any() == any(each >= 0 for each in slots)
    if isinstance(linear, ScaledLinear):
        codes, token_scales = gpu.quantize_rows(x, linear.activations)
        product = linear.multiply_quantized(codes, token_scales)
        apart = gpu.rope_store(product, Q_HEADS, *wanted, positions, slot, *tables, interleaved, scales=scales)
        assert torch.equal(linear.multiply_quantized(codes, token_scales, heads=heads), apart)


@pytest.mark.parametrize("kind", ["bf16", "fp8", "int4"])
@pytest.mark.parametrize(
    ("head_dim", "interleaved", "biased", "dtype", "slot"),
    [
        (64, False, True, torch.bfloat16, 17),
        (64, True, False, torch.float8_e4m3fn, 40),
        (24, False, True, torch.float8_e4m3fn, 3),  # tiles with pairs of several heads, and past the last
        (24, True, False, torch.bfloat16, -1),  # a padding row
    ],
)
def test_one_token(kind: str, head_dim: int, interleaved: bool, biased: bool, dtype: torch.dtype, slot: int) -> None:
    assert_same(weights(kind, head_dim, biased), head_dim, interleaved, dtype, [slot])


@pytest.mark.parametrize(
    ("head_dim", "interleaved", "dtype"), [(64, False, torch.bfloat16), (24, True, torch.float8_e4m3fn)]
)
def test_one_token_of_groups_without_tensor_cores(
    head_dim: int, interleaved: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    linear = weights("int4", head_dim, True)
    monkeypatch.setattr(linear, "choose", lambda _tokens: Plan(GEMV, Tiling(8, warps=1)))
    assert_same(linear, head_dim, interleaved, dtype, [17])


@pytest.mark.parametrize("splits", [1, 2])
def test_a_few_tokens_of_groups(splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    linear = weights("int4", 48, True)
    monkeypatch.setattr(linear, "choose", lambda _tokens: Plan(GROUPED, Tiling(32, 0, splits, 4, 1)))
    assert_same(linear, 48, False, torch.bfloat16, [17, -1, 40])


@pytest.mark.parametrize("preloaded", [1, 3, 9])
def test_pieces_loaded_before_the_input_is_ready_change_nothing(preloaded: int) -> None:
    """Also where the depth is no whole number of pieces, or fewer than are asked for."""
    linear = DenseLinear(torch.randn(20, 208).bfloat16().to(DEVICE), None)
    x = torch.randn(1, 208).to(DEVICE, torch.bfloat16)
    plain, ahead = (Plan(GEMV, Tiling(4, 64, stages=1, preloaded=count)) for count in (0, preloaded))
    assert torch.equal(linear.multiply(x, torch.float32, ahead), linear.multiply(x, torch.float32, plain))
