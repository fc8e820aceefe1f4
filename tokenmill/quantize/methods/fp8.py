"""float8 (e4m3): scales per tensor, row or 128 x 128 block at which the weight's peak is a large float8.

Any scale within a binade of the peak holds all values; each row or block takes the one of least error among a few,
which is about 15 % less than at the peak. Per row with inputs rounded per token needs no data and is the usual choice.
Per tensor with static inputs needs calibration for the input's scale; there, matrices that read the same input share
one scale, because engines that fuse them would otherwise requantize all but one. With `compensate`, columns are rounded
as GPTQ rounds them, each one's error pushed onto the next: the same files, less error where there is data.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tokenmill.errors import UserError
from tokenmill.kernels.rounding import CALIBRATED
from tokenmill.model.formats.quantized import QuantizedMatrix, Scheme, spread
from tokenmill.quantize.base import BlockView, LinearGroup, Solver
from tokenmill.quantize.methods.blocks import block_peaks, block_sums, check_element, nonzero
from tokenmill.quantize.methods.gptq import Columns, column_order, factor_hessian

E4M3_MAX = 448.0


class Fp8(Solver):
    name = "fp8"

    @dataclass(frozen=True, slots=True)
    class Options:
        tries: int = 16  # scales tried for each row or block; 1: only the peak's
        compensate: bool = False  # push the error of each column onto those not yet rounded; needs calibration
        damping: float = 0.01  # of `compensate`, as in gptq

    def __init__(self, options: Mapping[str, Any] | None = None) -> None:
        super().__init__(options)
        self.needs_calibration = self.options.compensate

    def memory_bytes(self, shape: tuple[int, int]) -> int:
        """With `compensate` that of GPTQ, one matrix at a time."""
        if not self.options.compensate:
            return super().memory_bytes(shape)
        return 4 * shape[1] * max(3 * shape[1], 2 * shape[1] + 4 * shape[0])

    def check(self, name: str, shape: tuple[int, int], scheme: Scheme) -> None:
        del name, shape  # the last block of each direction may be short
        check_element(self.name, scheme, "e4m3")
        if self.options.tries < 1:
            raise UserError(f"tries is {self.options.tries}", "give 1 or more")
        if not 0 <= self.options.damping < 1:
            raise UserError(f"damping is {self.options.damping}", "give a share between 0 and 1, such as 0.01")

    def solve(self, block: BlockView, scheme_of: Mapping[str, Scheme]) -> dict[str, QuantizedMatrix]:
        matrices = {}
        for group in block.groups:
            names = [name for name in group.names if name in scheme_of]
            peaks = [block.weight(name).abs().amax() for name in names if scheme_of[name].block_rows == 0]
            shared = float(torch.stack(peaks).amax()) if peaks else None
            factored = self._factor(block, group) if names and self.options.compensate else None
            for name in names:
                scheme = scheme_of[name]
                input_scale = static_input_scale(block, group, scheme, E4M3_MAX)
                matrix = to_float8(block.weight(name), scheme, shared, self.options.tries)
                if factored is not None:
                    matrix = replace(matrix, codes=compensated_codes(block.weight(name), matrix, *factored))
                matrices[name] = replace(matrix, input_scale=input_scale)
            for name in names:  # afterwards: they read one input
                block.replace(name, matrices[name].dequantize())
        return matrices

    def _factor(self, block: BlockView, group: LinearGroup) -> tuple[Tensor, Tensor]:
        """(factor of the inverse Hessian, order of columns) of a group's input."""
        hessian = block.statistics(group, ("hessian",)).hessian
        assert hessian is not None
        order = column_order(hessian.diagonal(), 0, "static")
        assert order is not None
        return factor_hessian(hessian, self.options.damping, order)[0], order


class _Float8Columns(Columns):
    """GPTQ's columns on the float8 grid; scales are fixed beforehand."""

    def round(self, column: int, value: Tensor, group: int) -> Tensor:
        scale = self.scales[group]
        code = e4m3_codes(value / scale)
        self.codes[column] = code
        return code.view(torch.float8_e4m3fn).float().mul_(scale)


def compensated_codes(weight: Tensor, plain: QuantizedMatrix, factor: Tensor, order: Tensor) -> Tensor:
    """uint8 [out, in]: the codes of `weight` on the scales of `plain`, the error of each column compensated by those
    after it in `order`, which is also the column order of `factor`."""
    scheme = replace(plain.scheme, group_size=min(plain.scheme.group_size, weight.shape[1]))
    state = _Float8Columns(weight.T[order], factor, scheme, 0.0)
    state.scales = spread(plain.scales, plain).T[:: state.group].contiguous()  # [column blocks, out]
    state.group_of = (order // state.group).tolist()
    state.solve(0, weight.shape[1])
    codes = torch.empty_like(state.codes)
    codes[order] = state.codes
    return codes.T.contiguous()


def to_float8(weight: Tensor, scheme: Scheme, peak: float | None = None, tries: int = 1) -> QuantizedMatrix:
    """`peak`: of all matrices that share the scale of a per-tensor scheme; None: of this one. Such a scale is not
    searched: over a whole matrix all give about the same error."""
    smallest = nonzero(block_peaks(weight, scheme.block_rows, scheme.group_size) / E4M3_MAX)
    if scheme.block_rows == 0:
        return _round(weight, scheme, torch.full_like(smallest, peak / E4M3_MAX) if peak else smallest)
    scales, least_error = smallest, torch.full_like(smallest, torch.inf)
    for step in range(tries if tries > 1 else 0):
        tried = smallest * 2 ** (step / tries)
        errors = (_round(weight, scheme, tried).dequantize() - weight).square_()
        total = block_sums(errors, scheme.block_rows, scheme.group_size)
        scales = torch.where(total < least_error, tried, scales)
        least_error = torch.minimum(total, least_error)
    return _round(weight, scheme, scales)


def _round(weight: Tensor, scheme: Scheme, scales: Tensor) -> QuantizedMatrix:
    empty = QuantizedMatrix(scheme, weight, scales)  # only the shape matters
    return QuantizedMatrix(scheme, e4m3_codes(weight / spread(scales, empty)), scales)


def e4m3_codes(values: Tensor) -> Tensor:
    """The bytes of the nearest float8 numbers, saturated: the cast alone would give NaN past the largest."""
    return values.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)


def static_input_scale(block: BlockView, group: LinearGroup, scheme: Scheme, largest: float) -> float | None:
    """The calibrated scale at which the input's peak becomes `largest`; None for schemes that need none."""
    if scheme.activations not in CALIBRATED:
        return None
    max_abs = block.statistics(group, ("max_abs",)).max_abs
    assert max_abs is not None
    return float(np.float32(float(max_abs.amax()) / largest or 1.0))  # as files hold it
