"""NVFP4: groups of 16 columns of 4-bit floats (e2m1) under a float8 scale, and one float32 scale for the matrix.

Matrices that read the same input share the float32 scale: engines fuse them and keep only one. "Four over six" lets
each group map its peak to 4 instead of 6 where that lowers its error: the step between 4 and 6 is the coarsest.
Data-free, unless the scheme rounds the inputs too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tokenmill.kernels.rounding import nearest_e2m1
from tokenmill.model.formats.quantized import QuantizedMatrix, Scheme
from tokenmill.quantize.base import BlockView, Solver
from tokenmill.quantize.methods.blocks import block_peaks, check_element, check_groups
from tokenmill.quantize.methods.fp8 import E4M3_MAX, static_input_scale

E2M1_MAX = 6.0
_SMALLEST_E4M3 = 2.0**-9
_ROOM_FOR_FOUR = 256.0  # the largest float8 scale at peak 6, so that 1.5 times it (peak 4) is a float8 number as well


class NvFp4(Solver):
    name = "nvfp4"

    @dataclass(frozen=True, slots=True)
    class Options:
        four_over_six: bool = False

    def check(self, name: str, shape: tuple[int, int], scheme: Scheme) -> None:
        check_element(self.name, scheme, "e2m1")
        check_groups(self.name, name, shape, scheme.group_size)

    def solve(self, block: BlockView, scheme_of: Mapping[str, Scheme]) -> dict[str, QuantizedMatrix]:
        matrices = {}
        for group in block.groups:
            names = [name for name in group.names if name in scheme_of]
            peak = max((float(block.weight(name).abs().amax()) for name in names), default=0.0)
            for name in names:
                scale = static_input_scale(block, group, scheme_of[name], E4M3_MAX * E2M1_MAX)
                matrices[name] = to_nvfp4(block.weight(name), scheme_of[name], peak, self.options.four_over_six, scale)
            for name in names:
                block.replace(name, matrices[name].dequantize())
        return matrices


def to_nvfp4(
    weight: Tensor,
    scheme: Scheme,
    peak: float,
    four_over_six: bool = False,
    input_scale: float | None = None,
) -> QuantizedMatrix:
    """`peak`: the largest magnitude of all matrices that share the float32 scale."""
    largest = (_ROOM_FOR_FOUR if four_over_six else E4M3_MAX) * E2M1_MAX
    # Files hold the reciprocal as float32: start from that, so that writing and reading change nothing.
    global_scale = 1.0 / float(np.float32(largest / peak)) if peak else 1.0
    peaks = block_peaks(weight, 1, scheme.group_size)
    matrix = _round(weight, scheme, peaks / E2M1_MAX, global_scale)
    if four_over_six:
        other = _round(weight, scheme, peaks / 4.0, global_scale)
        better = _errors(weight, other) < _errors(weight, matrix)
        codes = torch.where(better.repeat_interleave(scheme.group_size, 1), other.codes, matrix.codes)
        scales = torch.where(better, other.scales, matrix.scales)
        matrix = QuantizedMatrix(scheme, codes, scales, global_scale=global_scale)
    return QuantizedMatrix(scheme, matrix.codes, matrix.scales, global_scale=global_scale, input_scale=input_scale)


def _round(weight: Tensor, scheme: Scheme, exact_scales: Tensor, global_scale: float) -> QuantizedMatrix:
    scales = (exact_scales / global_scale).clamp(_SMALLEST_E4M3, E4M3_MAX).to(torch.float8_e4m3fn).float()
    relative = weight / (scales.repeat_interleave(scheme.group_size, 1) * global_scale)
    return QuantizedMatrix(scheme, nearest_e2m1(relative), scales, global_scale=global_scale)


def _errors(weight: Tensor, matrix: QuantizedMatrix) -> Tensor:
    return (matrix.dequantize() - weight).square().unflatten(1, (-1, matrix.scheme.group_size)).sum(-1)
