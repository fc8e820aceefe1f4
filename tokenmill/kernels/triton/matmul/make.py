"""Stored and quantized weights made into linears of a GPU: which class multiplies which format, and what is declined.

Repacks on the device; knows no kernel's inside. Called through the package when a model is loaded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tokenmill.errors import CheckpointError, UserError
from tokenmill.kernels import gpu_generation
from tokenmill.kernels.base import Declined
from tokenmill.kernels.triton.fused.elementwise import quantize_rows
from tokenmill.kernels.triton.matmul import repack
from tokenmill.kernels.triton.matmul.blocks import BlockLinear
from tokenmill.kernels.triton.matmul.linear import (
    DenseLinear,
    GpuLinear,
    GroupedLinear,
    RouterLinear,
    ScaledLinear,
    float_name,
)
from tokenmill.kernels.triton.matmul.w4a8 import RoundedGroupedLinear
from tokenmill.kernels.triton.shared.launch import INTERPRETED

if TYPE_CHECKING:
    from tokenmill.kernels.base import StoredWeight


def quantize_at_load(values: Tensor, bias: Tensor | None, scheme: str, group: int = 128) -> GpuLinear:
    """A float matrix [N, K] rounded to nearest on its device: "fp8", "int8" (per row), "int4" (groups, symmetric)
    or "w4a8" (int4, and the input rounded to fp8)."""
    values = values.float()
    declined = gpu_generation.declines_float8(values.device.type) if scheme == "fp8" else None
    if declined is not None:
        raise UserError(f"--quantization fp8 cannot be used: {declined}", "use --quantization int8 or int4")
    if scheme in ("fp8", "int8"):
        codes, scales = quantize_rows(values.contiguous(), scheme)
        scales = scales.clone()  # by an ordinary kernel: no dependent launch of a product reads codes half written
        return ScaledLinear(codes, scales, bias, f"{scheme} per row x token, rounded at load")
    assert scheme in ("int4", "w4a8"), scheme
    grouped = values.view(values.shape[0], -1, group)
    scales = (grouped.abs().amax(-1) / 7.5).clamp(min=1e-12)
    codes = (grouped / scales[..., None]).round().clamp(-8, 7).to(torch.int8).view_as(values)
    kind = GroupedLinear if scheme == "int4" else RoundedGroupedLinear
    return kind(repack.pack_groups(codes, scales, None, 4), bias, f"{scheme} g{group}, rounded at load")


def make_router(values: Tensor, bias: Tensor | None) -> RouterLinear | None:
    """A router's matrix [experts, hidden] on its device; None if bf16 would round it, and so change who is chosen."""
    rounded = values.to(torch.bfloat16)
    exact = values.dtype == torch.bfloat16 or bool((rounded == values).all())
    return RouterLinear(rounded, bias, "bf16, float32 sums") if exact else None


def make_linear(weight: StoredWeight, dtype: torch.dtype = torch.bfloat16) -> GpuLinear:
    """Repack a stored weight on the GPU (on the CPU under Triton's interpreter); declines what no kernel multiplies.
    `dtype`: of matrices that are not codes."""
    parts = weight.parts()
    device = _device(parts)
    if set(parts) == {"values"}:
        detail = f"{float_name(dtype)} (stored {weight.type_name})"
        return DenseLinear(parts["values"].to(device), weight.bias, detail, dtype)
    if set(parts) == {"blocks"}:
        if weight.type_name not in repack._GGML:
            raise Declined(f"no kernel for {weight.type_name} blocks")
        grouped = repack.from_ggml(weight.type_name, parts["blocks"].to(device), weight.in_features)
        return GroupedLinear(
            grouped, weight.bias, f"{weight.type_name} as {grouped.bits}-bit groups of {grouped.group}"
        )
    decode = getattr(weight, "decode", None)
    if decode is None:
        raise Declined(f"no kernel for weights made of {', '.join(sorted(parts))}")
    try:
        matrix = decode()
    except CheckpointError as error:  # groups in activation order
        raise Declined(str(error)) from None
    return from_quantized(matrix, weight.bias, device, getattr(weight, "input_scale", None), dtype)


def from_quantized(
    matrix: Any,
    bias: Tensor | None,
    device: torch.device,
    input_scale: float | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> GpuLinear:
    """A `QuantizedMatrix` (model/formats/quantized.py) on a device; `input_scale` where the matrix has none; `dtype`
    where it is expanded."""
    scheme = matrix.scheme
    if matrix.rotation_seed is not None:
        raise Declined("codes are in a rotated basis")
    if scheme.element == "e4m3" and (reason := gpu_generation.declines_float8(device.type)) is not None:
        detail = f"{float_name(dtype)} (expanded from e4m3, input not rounded: {reason})"
        return DenseLinear(matrix.dequantize().to(device), bias, detail, dtype)
    scaled = _scaled(matrix, bias, device, matrix.input_scale or input_scale)
    if scaled is not None:
        return scaled
    if (scheme.element, scheme.block_rows, scheme.group_size, scheme.activations) == ("e4m3", 128, 128, "fp8_group128"):
        scales = matrix.scales.float() * matrix.global_scale
        return BlockLinear(matrix.codes.to(device).view(torch.float8_e4m3fn), scales, bias)
    if scheme.element == "int" and scheme.activations in ("fp8_token", "fp8_static"):
        return _rounded(matrix, bias, device, matrix.input_scale or input_scale)
    if scheme.activations != "none":
        raise Declined(f"no kernel rounds its input as {scheme.activations} for {scheme.element} weights of this shape")
    grouped = repack.from_matrix(matrix, device)
    if grouped is not None:
        return GroupedLinear(grouped, bias, f"{scheme.element}{scheme.bits} as {grouped.bits}-bit g{grouped.group}")
    detail = f"{float_name(dtype)} (expanded from {scheme.element}{scheme.bits})"
    return DenseLinear(matrix.dequantize().to(device), bias, detail, dtype)


def _rounded(matrix: Any, bias: Tensor | None, device: torch.device, input_scale: float | None) -> RoundedGroupedLinear:
    """W4A8: integers in groups, or a scale per row, times inputs rounded to float8."""
    scheme = matrix.scheme
    if (reason := gpu_generation.declines_float8(device.type)) is not None:
        raise Declined(reason)
    grouped = repack.from_matrix(matrix, device)
    if grouped is None:
        raise Declined(f"no kernel for float8 inputs and groups of {scheme.group_size or matrix.codes.shape[1]}")
    fixed = float(input_scale or 0.0) if scheme.activations == "fp8_static" else 0.0
    detail = f"int{scheme.bits} as {grouped.bits}-bit g{grouped.group} x fp8 per {'tensor' if fixed else 'token'}"
    return RoundedGroupedLinear(grouped, bias, detail, fixed)


def _scaled(matrix: Any, bias: Tensor | None, device: torch.device, input_scale: float | None) -> ScaledLinear | None:
    """fp8 x fp8 or int8 x int8: the weight has one scale per row or in all, the input one per token or in all."""
    scheme, rows = matrix.scheme, matrix.codes.shape[0]
    if scheme.group_size != 0 or scheme.block_rows not in (0, 1) or matrix.zeros is not None:
        return None
    scales = (matrix.scales.float() * matrix.global_scale).reshape(-1).expand(rows)
    fixed = float(input_scale or 0.0) if scheme.activations.endswith("_static") else 0.0
    if scheme.element == "e4m3" and scheme.activations in ("fp8_token", "fp8_static"):
        return ScaledLinear(matrix.codes.to(device).view(torch.float8_e4m3fn), scales, bias, input_scale=fixed)
    if scheme.element == "int" and scheme.bits == 8 and scheme.activations in ("int8_token", "int8_static"):
        codes = (matrix.codes.to(device).to(torch.int16) - 128).to(torch.int8)
        return ScaledLinear(codes, scales, bias, input_scale=fixed)
    return None


def _device(parts: dict[str, Tensor]) -> torch.device:
    first = next(iter(parts.values())).device
    if first.type == "cuda" or INTERPRETED:
        return first
    return torch.device("cuda", torch.cuda.current_device())
