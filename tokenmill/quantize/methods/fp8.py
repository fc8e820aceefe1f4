"""float8 (e4m3): scales per tensor, row or 128 x 128 block at which the weight's peak is a large float8.

Any scale within a binade of the peak holds all values; of a few tried, each row or block takes that of least error,
some 15 % less of it than at the peak. Per row with inputs rounded per token needs no data and is the usual choice. Per
tensor with static inputs needs calibration for the input's scale; there, matrices that read the same input share one
scale, because engines that fuse them would otherwise requantize all but one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tokenmill.errors import UserError
from tokenmill.kernels.rounding import CALIBRATED
from tokenmill.model.formats.quantized import QuantizedMatrix, Scheme, spread
from tokenmill.quantize.base import BlockView, LinearGroup, Solver
from tokenmill.quantize.methods.blocks import block_peaks, block_sums, check_element, nonzero

E4M3_MAX = 448.0


class Fp8(Solver):
    name = "fp8"

    @dataclass(frozen=True, slots=True)
    class Options:
        tries: int = 16  # scales tried for each row or block; 1: only the peak's

    def check(self, name: str, shape: tuple[int, int], scheme: Scheme) -> None:
        del name, shape  # the last block of each direction may be short
        check_element(self.name, scheme, "e4m3")
        if self.options.tries < 1:
            raise UserError(f"tries is {self.options.tries}", "give 1 or more")

    def solve(self, block: BlockView, scheme_of: Mapping[str, Scheme]) -> dict[str, QuantizedMatrix]:
        matrices = {}
        for group in block.groups:
            names = [name for name in group.names if name in scheme_of]
            peaks = [block.weight(name).abs().amax() for name in names if scheme_of[name].block_rows == 0]
            shared = float(torch.stack(peaks).amax()) if peaks else None
            for name in names:
                scheme = scheme_of[name]
                input_scale = static_input_scale(block, group, scheme, E4M3_MAX)
                matrix = to_float8(block.weight(name), scheme, shared, self.options.tries)
                matrices[name] = replace(matrix, input_scale=input_scale)
            for name in names:  # afterwards: they read one input
                block.replace(name, matrices[name].dequantize())
        return matrices


def to_float8(weight: Tensor, scheme: Scheme, peak: float | None = None, tries: int = 1) -> QuantizedMatrix:
    """`peak`: of all matrices that share the scale of a per-tensor scheme; None: of this one. Such a scale is not
    searched: over a whole matrix all are alike."""
    smallest = nonzero(block_peaks(weight, scheme.block_rows, scheme.group_size) / E4M3_MAX)
    if scheme.block_rows == 0:
        return _round(weight, scheme, torch.full_like(smallest, peak / E4M3_MAX) if peak else smallest)
    scales, least = smallest, torch.full_like(smallest, torch.inf)
    for place in range(tries if tries > 1 else 0):
        tried = smallest * 2 ** (place / tries)
        errors = (_round(weight, scheme, tried).dequantize() - weight).square_()
        total = block_sums(errors, scheme.block_rows, scheme.group_size)
        scales = torch.where(total < least, tried, scales)
        least = torch.minimum(total, least)
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
    seen = block.statistics(group, ("max_abs",)).max_abs
    assert seen is not None
    return float(torch.tensor(float(seen.amax()) / largest or 1.0))  # as float32 holds it
