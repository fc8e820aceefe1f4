"""Matrices that share an input as one matrix: one launch reads it once and fills the GPU better than three small ones.

Joins what is ready for the GPU already, so it does not matter which format the parts came from; parts of different
kinds stay apart. Grouped codes of small matrices become 16-bit floats before: unpacking would take longer than reading.
Called by the loader; executors recognise the parts by `JoinedRows`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from tokenmill.kernels.triton.matmul.blocks import BLOCK, BlockLinear
from tokenmill.kernels.triton.matmul.choose import worth_expanding
from tokenmill.kernels.triton.matmul.dequantize import dequantize
from tokenmill.kernels.triton.matmul.grouped import GroupedWeight
from tokenmill.kernels.triton.matmul.linear import DenseLinear, GpuLinear, GroupedLinear, ScaledLinear, float_name

Kind = TypeVar("Kind", bound=GpuLinear)


class JoinedRows:
    """Rows [begin, end) of a joined matrix: a LinearKernel for whoever wants only these."""

    backend = "triton"

    def __init__(self, whole: GpuLinear, begin: int, end: int) -> None:
        self.whole, self.begin, self.end = whole, begin, end
        self.detail = f"{whole.detail}, joined"
        self.activations = whole.activations

    @property
    def nbytes(self) -> int:
        return self.whole.nbytes * (self.end - self.begin) // self.whole.rows

    def __call__(self, x: Tensor) -> Tensor:
        return self.whole(x)[:, self.begin : self.end]


def expand_small(parts: Sequence[GpuLinear], dtype: torch.dtype = torch.bfloat16) -> list[GpuLinear]:
    """Matrices that share an input, those of grouped codes in `dtype` if all parts together are small. (What the user
    asked to round at load stays as it is: the loader does not call this for it; so does what rounds its input.)"""
    if not worth_expanding(sum(part.rows for part in parts), parts[0].depth):
        return list(parts)
    return [
        _expanded(part, dtype) if isinstance(part, GroupedLinear) and not part.activations else part for part in parts
    ]


def _expanded(linear: GroupedLinear, dtype: torch.dtype) -> DenseLinear:
    detail = f"{float_name(dtype)}, being small ({linear.detail})"
    return DenseLinear(dequantize(linear.weight, dtype), linear.bias, detail, dtype)


def join_linears(parts: Sequence[GpuLinear]) -> GpuLinear | None:
    """One matrix with the rows of all parts; None where their kinds, depths or layouts differ."""
    first = parts[0]
    if any(type(part) is not type(first) or part.kind != first.kind or part.depth != first.depth for part in parts):
        return None
    bias = _join_biases(parts)
    if isinstance(first, DenseLinear):
        whole = torch.cat([part.weight for part in _all(parts, DenseLinear)])
        return DenseLinear(whole, bias, first.detail, first.weight.dtype)
    if isinstance(first, ScaledLinear):
        scaled = _all(parts, ScaledLinear)
        if len({part.input_scale for part in scaled}) > 1:
            return None
        codes = torch.cat([part.codes.view(torch.uint8) for part in scaled]).view(first.codes.dtype)
        scales = torch.cat([part.scales for part in scaled])
        return ScaledLinear(codes, scales, bias, first.detail, first.input_scale)
    if isinstance(first, GroupedLinear):
        weight = _join_grouped([part.weight for part in _all(parts, GroupedLinear)])
        if weight is None or len({part.input_scale for part in parts}) > 1:
            return None
        return first.like(weight, bias)
    if isinstance(first, BlockLinear) and not any(part.rows % BLOCK for part in parts[:-1]):
        blocks = _all(parts, BlockLinear)
        codes = torch.cat([part.codes.view(torch.uint8) for part in blocks]).view(first.codes.dtype)
        return BlockLinear(codes, torch.cat([part.scales for part in blocks]), bias)
    return None


def _all(parts: Sequence[GpuLinear], kind: type[Kind]) -> list[Kind]:
    return [part for part in parts if isinstance(part, kind)]


def _join_grouped(parts: list[GroupedWeight]) -> GroupedWeight | None:
    first = parts[0]
    shape = (first.bits, first.group, first.codes.shape[0], first.codes.shape[2])
    if any((part.bits, part.group, part.codes.shape[0], part.codes.shape[2]) != shape for part in parts):
        return None
    zeros = None
    if any(part.zeros is not None for part in parts):
        zeros = torch.cat(
            [
                torch.zeros_like(part.scales, dtype=torch.bfloat16) if part.zeros is None else part.zeros
                for part in parts
            ],
            1,
        )
    return replace(
        first,
        codes=torch.cat([part.codes for part in parts], 1),
        scales=torch.cat([part.scales for part in parts], 1),
        zeros=zeros,
        row_scale=torch.cat([part.row_scale for part in parts]),
    )


def _join_biases(parts: Sequence[GpuLinear]) -> Tensor | None:
    if all(part.bias is None for part in parts):
        return None
    return torch.cat([torch.zeros(part.rows, device=part.device) if part.bias is None else part.bias for part in parts])
