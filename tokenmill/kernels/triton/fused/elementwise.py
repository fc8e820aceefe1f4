"""Norms, gates, sums and lookups: one pass over the activations each, with an optional 8-bit copy for the next product.

Activations are [tokens, width] in bf16, float16 or float32; arithmetic is float32. The 8-bit copy has one scale per
token: value = code * scale, float8_e4m3fn up to 448 or int8 up to 127.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenmill.kernels.triton.shared.device import dependent_launch
from tokenmill.kernels.triton.shared.launch import INTERPRETED, options, power_of_two, uses_pdl

FLOAT8_MAX = 448.0
INT8_MAX = 127.0
QUANTIZED_TYPES = {"fp8": (torch.float8_e4m3fn, FLOAT8_MAX), "int8": (torch.int8, INT8_MAX)}


@triton.jit
def write_codes(values, codes, scales, fixed, row, width, columns, LIMIT: tl.constexpr, INTEGER: tl.constexpr):
    """Quantize one row of `values` (0 where past the width) with its own scale, or with `fixed` where that is not 0."""
    scale = tl.where(fixed > 0, fixed, tl.maximum(tl.max(tl.abs(values), 0) / LIMIT, 1e-12))
    scaled = tl.minimum(tl.maximum(values / scale, -LIMIT), LIMIT)
    if INTEGER:
        scaled = tl.floor(scaled + 0.5)
    tl.store(codes + row * width + columns, scaled.to(codes.dtype.element_ty), mask=columns < width)
    tl.store(scales + row, scale)


@triton.jit
def _rms_norm(
    x,
    y,
    weight,
    total,
    out,
    codes,
    scales,
    fixed,
    eps,
    width,
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
    LIMIT: tl.constexpr,
    INTEGER: tl.constexpr,
    PDL: tl.constexpr,
):
    """A row per program: (x + y) -> total, its norm -> out, or (LIMIT > 0) -> codes and scales."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    ok = columns < width
    gain = tl.load(weight + columns, mask=ok, other=0.0).to(tl.float32)
    dependent_launch(PDL)
    values = tl.load(x + row * width + columns, mask=ok, other=0.0).to(tl.float32)
    if ADD:
        values += tl.load(y + row * width + columns, mask=ok, other=0.0).to(tl.float32)
        tl.store(total + row * width + columns, values.to(total.dtype.element_ty), mask=ok)
    values *= tl.rsqrt(tl.sum(values * values, 0) / width + eps)
    values *= gain
    if LIMIT > 0:
        write_codes(values, codes, scales, fixed, row, width, columns, LIMIT, INTEGER)
    else:
        tl.store(out + row * width + columns, values.to(out.dtype.element_ty), mask=ok)


@triton.jit
def _layer_norm(
    x, weight, bias, out, eps, width, GROUPS: tl.constexpr, BLOCK: tl.constexpr, BIASED: tl.constexpr, PDL: tl.constexpr
):
    """A slice of `width` numbers per program; slices take turns with the GROUPS weights."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    ok = columns < width
    own = (row % GROUPS) * width + columns
    gain = tl.load(weight + own, mask=ok, other=0.0).to(tl.float32)
    dependent_launch(PDL)
    values = tl.load(x + row * width + columns, mask=ok, other=0.0).to(tl.float32)
    values = tl.where(ok, values - tl.sum(values, 0) / width, 0.0)
    values *= tl.rsqrt(tl.sum(values * values, 0) / width + eps)
    values *= gain
    if BIASED:
        values += tl.load(bias + own, mask=ok, other=0.0).to(tl.float32)
    tl.store(out + row * width + columns, values.to(out.dtype.element_ty), mask=ok)


KINDS = {"silu": 0, "gelu_tanh": 1, "gelu": 2, "relu": 3, "relu2": 4, "sigmoid": 5}  # of `activated`


@triton.jit
def activated(gate, KIND: tl.constexpr):
    if KIND == 1:
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        return gate * tl.sigmoid(2 * inner)  # 0.5 * (1 + tanh(a)) = sigmoid(2a)
    elif KIND == 2:
        return 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    elif KIND == 3:
        return tl.maximum(gate, 0.0)
    elif KIND == 4:
        return tl.maximum(gate, 0.0) * tl.maximum(gate, 0.0)
    elif KIND == 5:
        return tl.sigmoid(gate)
    else:
        return gate * tl.sigmoid(gate)


@triton.jit
def _gated(
    gate,
    up,
    out,
    codes,
    scales,
    fixed,
    width,
    gate_stride,
    up_stride,
    BLOCK: tl.constexpr,
    KIND: tl.constexpr,
    LIMIT: tl.constexpr,
    INTEGER: tl.constexpr,
    PDL: tl.constexpr,
):
    dependent_launch(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ok = columns < width
    left = tl.load(gate + row * gate_stride + columns, mask=ok, other=0.0).to(tl.float32)
    right = tl.load(up + row * up_stride + columns, mask=ok, other=0.0).to(tl.float32)
    values = activated(left, KIND) * right
    if LIMIT > 0:
        write_codes(values, codes, scales, fixed, row, width, columns, LIMIT, INTEGER)
    else:
        tl.store(out + row * width + columns, values.to(out.dtype.element_ty), mask=ok)


@triton.jit
def _quantize(
    x,
    codes,
    scales,
    fixed,
    width,
    stride,
    BLOCK: tl.constexpr,
    LIMIT: tl.constexpr,
    INTEGER: tl.constexpr,
    PDL: tl.constexpr,
):
    dependent_launch(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    values = tl.load(x + row * stride + columns, mask=columns < width, other=0.0).to(tl.float32)
    write_codes(values, codes, scales, fixed, row, width, columns, LIMIT, INTEGER)


@triton.jit
def _combine(x, y, out, count, cap, BLOCK: tl.constexpr, CAP: tl.constexpr, PDL: tl.constexpr):
    """out = x + y, or (CAP) cap * tanh(x / cap)."""
    dependent_launch(PDL)
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    ok = places < count
    values = tl.load(x + places, mask=ok, other=0.0).to(tl.float32)
    if CAP:
        values = cap * (2 * tl.sigmoid(2 * values / cap) - 1)
    else:
        values += tl.load(y + places, mask=ok, other=0.0).to(tl.float32)
    tl.store(out + places, values.to(out.dtype.element_ty), mask=ok)


@triton.jit
def _embed(ids, table, out, width, scale, BLOCK: tl.constexpr, PDL: tl.constexpr):
    dependent_launch(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ok = columns < width
    token = tl.load(ids + row).to(tl.int64)
    values = tl.load(table + token * width + columns, mask=ok, other=0.0).to(tl.float32) * scale
    tl.store(out + row * width + columns, values.to(out.dtype.element_ty), mask=ok)


def _codes(x: Tensor, width: int, quantize: str) -> tuple[Tensor, Tensor, float]:
    dtype, limit = QUANTIZED_TYPES[quantize]
    rows = x.shape[0]
    return torch.empty(rows, width, dtype=dtype, device=x.device), x.new_empty(rows, dtype=torch.float32), limit


def _warps(block: int) -> int:
    return 1 if INTERPRETED else max(1, min(16, block // 512))


def _norm(
    x: Tensor, y: Tensor | None, weight: Tensor, eps: float, width: int, quantize: str, fixed: float = 0.0
) -> tuple[Tensor, ...]:
    """(total or x, out) or (total or x, codes, scales)."""
    rows, block = x.numel() // width, power_of_two(width)
    total = x if y is None else torch.empty_like(x)
    codes, scales, limit = _codes(x, width, quantize) if quantize else (None, None, 0.0)
    out = None if quantize else torch.empty_like(x)
    _rms_norm[(rows,)](
        x,
        y,
        weight,
        total,
        out,
        codes,
        scales,
        fixed,
        eps,
        width,
        BLOCK=block,
        ADD=y is not None,
        LIMIT=limit,
        INTEGER=quantize == "int8",
        PDL=uses_pdl(x.device),
        **options(x.device, _warps(block), 1),
    )
    if codes is None or scales is None:
        assert out is not None
        return total, out
    return total, codes, scales


def rms_norm(x: Tensor, weight: Tensor, eps: float, head_dim: int = 0) -> Tensor:
    return _norm(x.contiguous(), None, weight, eps, head_dim or x.shape[-1], "")[1]


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, head_dim: int = 0) -> Tensor:
    x = x.contiguous()
    out, width = torch.empty_like(x), head_dim or x.shape[-1]
    block = power_of_two(width)
    _layer_norm[(x.numel() // width,)](
        x,
        weight,
        bias,
        out,
        eps,
        width,
        GROUPS=weight.numel() // width,
        BLOCK=block,
        BIASED=bias is not None,
        PDL=uses_pdl(x.device),
        **options(x.device, _warps(block), 1),
    )
    return out


def add_rms_norm(x: Tensor, y: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total, out = _norm(x, y, weight, eps, x.shape[-1], "")
    return total, out


def add_rms_norm_quantized(
    x: Tensor, y: Tensor | None, weight: Tensor, eps: float, quantize: str, fixed: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    """(x + y, codes, scales) of the norm; y None: (x, codes, scales). `quantize`: "fp8" or "int8"; `fixed`: the
    calibrated scale, where the weight has one."""
    total, codes, scales = _norm(x, y, weight, eps, x.shape[-1], quantize, fixed)
    return total, codes, scales


def _gate(gate: Tensor, up: Tensor, activation: str, quantize: str, fixed: float = 0.0) -> tuple[Tensor, ...]:
    rows, width = gate.shape
    block = power_of_two(width) if quantize else min(power_of_two(width), 2048)
    codes, scales, limit = _codes(gate, width, quantize) if quantize else (None, None, 0.0)
    out = None if quantize else torch.empty(rows, width, dtype=gate.dtype, device=gate.device)
    _gated[(rows, triton.cdiv(width, block))](
        gate,
        up,
        out,
        codes,
        scales,
        fixed,
        width,
        gate.stride(0),
        up.stride(0),
        BLOCK=block,
        KIND=KINDS[activation],
        LIMIT=limit,
        INTEGER=quantize == "int8",
        PDL=uses_pdl(gate.device),
        **options(gate.device, _warps(block), 1),
    )
    return tuple(each for each in (out, codes, scales) if each is not None)


def gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """activation(gate) * up; the two may be halves of one matrix."""
    return _gate(gate, up, activation, "")[0]


def gated_quantized(
    gate: Tensor, up: Tensor, activation: str, quantize: str, fixed: float = 0.0
) -> tuple[Tensor, Tensor]:
    codes, scales = _gate(gate, up, activation, quantize, fixed)
    return codes, scales


def quantize_rows(x: Tensor, quantize: str, fixed: float = 0.0) -> tuple[Tensor, Tensor]:
    """(codes [T, width], scales [T])."""
    codes, scales, limit = _codes(x, x.shape[1], quantize)
    block = power_of_two(x.shape[1])
    _quantize[(x.shape[0],)](
        x,
        codes,
        scales,
        fixed,
        x.shape[1],
        x.stride(0),
        BLOCK=block,
        LIMIT=limit,
        INTEGER=quantize == "int8",
        PDL=uses_pdl(x.device),
        **options(x.device, _warps(block), 1),
    )
    return codes, scales


def _combined(x: Tensor, y: Tensor | None, cap: float) -> Tensor:
    x = x.contiguous()
    out = torch.empty_like(x)
    block = 1024
    _combine[(triton.cdiv(x.numel(), block),)](
        x,
        y,
        out,
        x.numel(),
        cap,
        BLOCK=block,
        CAP=y is None,
        PDL=uses_pdl(x.device),
        **options(x.device, 4, 1),
    )
    return out


def add(x: Tensor, y: Tensor) -> Tensor:
    return _combined(x, y.contiguous(), 0.0)


def softcap(x: Tensor, cap: float) -> Tensor:
    return _combined(x, None, cap)


def embed(ids: Tensor, table: Tensor, scale: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Rows of `table` [vocab, width] for ids [T], times `scale`."""
    width = table.shape[1]
    out = torch.empty(ids.shape[0], width, dtype=dtype, device=ids.device)
    block = min(power_of_two(width), 1024)
    _embed[(ids.shape[0], triton.cdiv(width, block))](
        ids, table, out, width, scale, BLOCK=block, PDL=uses_pdl(ids.device), **options(ids.device, 4, 1)
    )
    return out
