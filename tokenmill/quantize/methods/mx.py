"""Microscaling (OCP MX): groups of 32 columns under a power of two, elements 4-bit (e2m1) or 8-bit (e4m3) floats.

The published rule takes the exponent of the group's peak, which clips peaks in the upper part of the last binade;
compressed-tensors rounds such peaks up. Either can be written, or the better of the two for each group. Data-free.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tokenmill.errors import unknown_name
from tokenmill.kernels.rounding import nearest_e2m1, power_of_two, power_of_two_scale
from tokenmill.model.formats.quantized import QuantizedMatrix, Scheme
from tokenmill.quantize.methods.blocks import MatrixSolver, block_peaks, check_element, check_groups
from tokenmill.quantize.methods.fp8 import e4m3_codes

RULES = ("ct", "ocp", "best")
_LARGEST_EXPONENT = {"e2m1": 2, "e4m3": 8}  # of 6 and of 448


class Microscaling(MatrixSolver):
    name = "mx"

    @dataclass(frozen=True, slots=True)
    class Options:
        rule: str = "ct"  # how a group's exponent is chosen: "ct", "ocp", or "best": whichever has less error

    def check(self, name: str, shape: tuple[int, int], scheme: Scheme) -> None:
        if self.options.rule not in RULES:
            raise unknown_name("rule of mx", self.options.rule, RULES)
        check_element(self.name, scheme, "e2m1", "e4m3")
        check_groups(self.name, name, shape, scheme.group_size)

    def quantize(self, weight: Tensor, scheme: Scheme) -> QuantizedMatrix:
        return to_microscaling(weight, scheme, self.options.rule)


def to_microscaling(weight: Tensor, scheme: Scheme, rule: str = "ct") -> QuantizedMatrix:
    peaks = block_peaks(weight, 1, scheme.group_size)
    largest = _LARGEST_EXPONENT[scheme.element]
    if rule == "ct":
        return _round(weight, scheme, power_of_two_scale(peaks, largest))
    published = _round(weight, scheme, ocp_scale(peaks, largest))
    if rule == "ocp":
        return published
    raised = _round(weight, scheme, ocp_scale(peaks, largest - 1))
    better = _errors(weight, raised) < _errors(weight, published)
    wide = better.repeat_interleave(scheme.group_size, 1)
    codes = torch.where(wide, raised.codes, published.codes)
    return QuantizedMatrix(scheme, codes, torch.where(better, raised.scales, published.scales))


def ocp_scale(peaks: Tensor, largest_exponent: int) -> Tensor:
    """2^(floor(log2 peak) - largest_exponent), within what a byte of exponent holds."""
    _, powers = torch.frexp(peaks)  # peak = mantissa * 2^power with mantissa in [0.5, 1)
    exponents = torch.where(peaks > 0, powers - 1 - largest_exponent, torch.full_like(powers, -127))
    return power_of_two(exponents)


def _round(weight: Tensor, scheme: Scheme, scales: Tensor) -> QuantizedMatrix:
    relative = weight / scales.repeat_interleave(scheme.group_size, 1)
    codes = nearest_e2m1(relative) if scheme.element == "e2m1" else e4m3_codes(relative)
    return QuantizedMatrix(scheme, codes, scales)


def _errors(weight: Tensor, matrix: QuantizedMatrix) -> Tensor:
    """Squared error of each group [out, groups]."""
    return (matrix.dequantize() - weight).square().unflatten(1, (-1, matrix.scheme.group_size)).sum(-1)
