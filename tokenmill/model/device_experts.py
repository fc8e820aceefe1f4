"""Experts of a layer onto a GPU: all matrices of a projection as one stack that grouped kernels multiply.

Experts pass through one at a time, so that the peak is the stack plus one matrix. Declines, with a reason, formats that
no grouped kernel reads: then the experts are placed as single matrices. Called by device_weights.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tokenmill.errors import UserError
from tokenmill.kernels.base import Choice, Declined
from tokenmill.kernels.gpu_generation import declines_float8
from tokenmill.kernels.routing import RoutingSpec
from tokenmill.model.formats.base import LinearWeight
from tokenmill.model.formats.coded import CodedWeight
from tokenmill.model.formats.dense import DenseWeight
from tokenmill.model.formats.stacks import ExpertStacks, WeightStack

Upload = Callable[[LinearWeight], LinearWeight]
_INT4_GROUPS = (128, 64, 32)
_E4M3_MAX = 448.0


def place_experts(stacks: ExpertStacks, routing: RoutingSpec, upload: Upload, quantization: str) -> Choice:
    """`quantization`: "", "fp8" or "int4": how float matrices are quantized."""
    from tokenmill.kernels.triton.experts.layer import GpuExperts  # here: triton is not installed everywhere

    gate_up, down = (stack_for_gpu(stack, upload, quantization) for stack in (stacks.gate_up, stacks.down))
    return Choice("experts", "triton", GpuExperts(gate_up, down, routing))


def stack_for_gpu(stack: WeightStack, upload: Upload, quantization: str) -> Any:
    """A GpuExpertStack, on the device that `upload` copies to."""
    from tokenmill.kernels.triton.experts import stack as gpu

    first = stack.experts[0][0]
    if any(block.type_name != first.type_name for blocks in stack.experts for block in blocks):
        raise Declined("the experts of a layer have different types")
    bias = stack.bias
    if isinstance(first, DenseWeight):
        if not quantization:
            return gpu.bf16_stack(_gather(stack, upload, lambda w: [w.parts()["values"].to(torch.bfloat16)])[0], bias)
        if quantization == "fp8":
            declined = _float8_declined()
            if declined is not None:
                raise UserError(f"--quantization fp8 cannot be used: {declined}", "use --quantization int4")
            codes, scales = _gather(stack, upload, _to_fp8)
            return gpu.fp8_stack(codes, scales, bias)
        group = next((size for size in _INT4_GROUPS if stack.in_features % size == 0), 0)
        if not group:
            raise Declined(f"groups do not divide {stack.in_features} inputs of an expert")
        codes, scales = _gather(stack, upload, lambda weight: _to_int4(weight, group))
        return gpu.int4_stack(codes, scales, None, bias)
    if not isinstance(first, CodedWeight) or first.activations not in ("none", "fp8_group128"):
        raise Declined(f"no grouped kernel for experts of type {first.type_name} ({first.activations} inputs)")
    scheme = first.scheme
    if scheme.element == "e2m1" and scheme.scale_type == "e8m0":
        blocks, scales = _gather(stack, upload, lambda w: [w.parts()["packed"], w.parts()["scales"].view(torch.uint8)])
        return gpu.mxfp4_stack(blocks, scales, bias)
    if scheme.element == "e4m3" and scheme.scale_type == "float":
        if _float8_declined() is not None:  # twice the bytes, but it runs
            return gpu.bf16_stack(_gather(stack, upload, _widened)[0], bias)
        return _float8(stack, upload, bias)
    if scheme.element == "int" and scheme.bits == 4 and scheme.group_size:
        codes, scales, *zeros = _gather(stack, upload, _int4_parts)
        return gpu.int4_stack(codes, scales, zeros[0] if zeros else None, bias)
    raise Declined(f"no grouped kernel for experts of type {first.type_name}")


def _gather(stack: WeightStack, upload: Upload, read: Callable[[LinearWeight], Sequence[Tensor]]) -> list[Tensor]:
    """What `read` gives of each block, rows joined and experts stacked: [experts, rows, ...] each."""
    stacked: list[Tensor] = []
    for expert, blocks in enumerate(stack.experts):
        columns = list(zip(*(read(upload(block)) for block in blocks), strict=True))
        parts = [torch.cat([_as_bytes(each) for each in column]) for column in columns]
        if not stacked:
            stacked = [part.new_empty(len(stack), *part.shape) for part in parts]
        for target, part in zip(stacked, parts, strict=True):
            target[expert] = part
    return [target.view(column[0].dtype) for target, column in zip(stacked, columns, strict=True)]


def _float8_declined() -> str | None:
    """Stacks are multiplied by the GPU, wherever they lie; where there is none, by the interpreter."""
    return declines_float8("cuda" if torch.cuda.is_available() else "cpu")


def _widened(weight: LinearWeight) -> list[Tensor]:
    return [weight.dequantize(0, weight.out_features).to(torch.bfloat16)]


def _as_bytes(values: Tensor) -> Tensor:
    """Not every version of torch joins float8."""
    return values.view(torch.uint8) if values.element_size() == 1 else values


def _to_fp8(weight: LinearWeight) -> list[Tensor]:
    values = weight.parts()["values"].float()
    scales = (values.abs().amax(-1) / _E4M3_MAX).clamp(min=1e-12)
    return [(values / scales[:, None]).to(torch.float8_e4m3fn), scales]


def _to_int4(weight: LinearWeight, group: int) -> list[Tensor]:
    grouped = weight.parts()["values"].float().unflatten(1, (-1, group))
    scales = (grouped.abs().amax(-1) / 7.5).clamp(min=1e-12)
    return [(grouped / scales[..., None]).round().clamp(-8, 7).to(torch.int8).flatten(1), scales]


def _float8(stack: WeightStack, upload: Upload, bias: Tensor | None) -> Any:
    from tokenmill.kernels.triton.experts.stack import SCALE_BLOCK, fp8_stack

    first = stack.experts[0][0]
    assert isinstance(first, CodedWeight)
    rows, columns = first.scheme.block_rows, first.scheme.group_size
    if (rows, columns) == (0, 0):  # one scale a matrix: gate and up have one each

        def read(weight: LinearWeight) -> list[Tensor]:
            parts = weight.parts()
            return [parts["values"], parts["scales"].float().reshape(1).expand(weight.out_features)]

    elif (rows, columns) in ((1, 0), (SCALE_BLOCK, SCALE_BLOCK)):

        def read(weight: LinearWeight) -> list[Tensor]:
            parts = weight.parts()
            scales = parts["scales"].float()
            return [parts["values"], scales.flatten() if rows == 1 else scales]

    else:
        raise Declined(f"no grouped kernel for float8 experts with a scale for {rows} x {columns}")
    codes, scales = _gather(stack, upload, read)
    return fp8_stack(codes, scales, bias, halves=len(stack.experts[0]) if rows > 1 else 1)


def _int4_parts(weight: LinearWeight) -> list[Tensor]:
    """Codes -8 .. 7 with scales, and zero points in the same numbers."""
    assert isinstance(weight, CodedWeight)
    matrix = weight.decode()
    codes = (matrix.codes.to(torch.int16) - 8).to(torch.int8)
    return [codes, matrix.scales] if matrix.zeros is None else [codes, matrix.scales, matrix.zeros - 8]
