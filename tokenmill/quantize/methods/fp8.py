"""float8 (e4m3): the weight's peak per tensor, row or 128 x 128 block becomes the largest float8; nothing is searched.

Per row with inputs rounded per token needs no data and is the usual choice. Per tensor with static inputs needs
calibration for the input's scale; there, matrices that read the same input share one scale, because engines that fuse
them would otherwise requantize all but one.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from tokenmill.kernels.rounding import CALIBRATED
from tokenmill.model.formats.quantized import QuantizedMatrix, Scheme, spread
from tokenmill.quantize.base import BlockView, LinearGroup, Solver
from tokenmill.quantize.methods.blocks import block_peaks, check_element, nonzero

E4M3_MAX = 448.0


class Fp8(Solver):
    name = "fp8"

    def check(self, name: str, shape: tuple[int, int], scheme: Scheme) -> None:
        del name, shape  # the last block of each direction may be short
        check_element(self.name, scheme, "e4m3")

    def solve(self, block: BlockView, scheme_of: Mapping[str, Scheme]) -> dict[str, QuantizedMatrix]:
        matrices = {}
        for group in block.groups:
            names = [name for name in group.names if name in scheme_of]
            peaks = [block.weight(name).abs().amax() for name in names if scheme_of[name].block_rows == 0]
            shared = float(torch.stack(peaks).amax()) if peaks else None
            for name in names:
                scheme = scheme_of[name]
                input_scale = static_input_scale(block, group, scheme, E4M3_MAX)
                matrices[name] = to_float8(block.weight(name), scheme, shared, input_scale)
            for name in names:  # afterwards: they read one input
                block.replace(name, matrices[name].dequantize())
        return matrices


def to_float8(
    weight: Tensor, scheme: Scheme, peak: float | None = None, input_scale: float | None = None
) -> QuantizedMatrix:
    """`peak`: of all matrices that share the scale of a per-tensor scheme; None: of this one."""
    scales = nonzero(block_peaks(weight, scheme.block_rows, scheme.group_size) / E4M3_MAX)
    if scheme.block_rows == 0 and peak:
        scales = torch.full_like(scales, peak / E4M3_MAX)
    empty = QuantizedMatrix(scheme, torch.zeros(weight.shape, dtype=torch.uint8), scales)
    return QuantizedMatrix(scheme, e4m3_codes(weight / spread(scales, empty)), scales, input_scale=input_scale)


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
