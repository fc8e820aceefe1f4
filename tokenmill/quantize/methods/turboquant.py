"""TurboQuant for weights: a random rotation makes every row look normal, so one table fits all; data-free, 2 to 4 bits.

Rows are rotated along the input by a signed Hadamard transform (the input is rotated when the product runs), divided by
their root mean square, and each value takes the nearest entry of the Lloyd-Max table of the normal distribution. The
codebook format of model/formats stores codes, row scales, the table and the seed.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from math import erf, exp, pi, sqrt

import torch
from torch import Tensor

from tokenmill.errors import UserError
from tokenmill.kernels.hadamard import inverse_signed_hadamard, signed_hadamard
from tokenmill.model.formats.quantized import QuantizedMatrix, Scheme
from tokenmill.quantize.methods.blocks import MatrixSolver, check_element, nonzero
from tokenmill.quantize.methods.nf4 import nearest_in_table

BITS = (2, 3, 4)


class TurboQuant(MatrixSolver):
    name = "turboquant"

    @dataclass(frozen=True, slots=True)
    class Options:
        seed: int = 0  # of the signs; one seed for the whole model, so that an input is rotated once

    def check(self, name: str, shape: tuple[int, int], scheme: Scheme) -> None:
        del name, shape
        check_element(self.name, scheme, "codebook")
        if scheme.bits not in BITS:
            raise UserError(f"turboquant has tables of 2, 3 and 4 bits, not of {scheme.bits}", "give --bits 2, 3 or 4")
        if scheme.group_size:
            raise UserError("turboquant has one scale per row", "leave --group-size out")

    def quantize(self, weight: Tensor, scheme: Scheme) -> QuantizedMatrix:
        return to_codebook(weight, scheme, self.options.seed)

    def values(self, matrix: QuantizedMatrix) -> Tensor:
        return inverse_signed_hadamard(matrix.dequantize(), self.options.seed)


def to_codebook(weight: Tensor, scheme: Scheme, seed: int) -> QuantizedMatrix:
    rotated = signed_hadamard(weight, seed)
    table = torch.tensor(normal_table(scheme.bits), device=weight.device)
    spreads = nonzero(rotated.square().mean(1, keepdim=True).sqrt())
    codes = nearest_in_table(rotated / spreads, table)
    values = table[codes.long()]
    # The scale of least error for these codes; for wide rows it approaches `spreads`, by construction of the table.
    scales = (rotated * values).sum(1, keepdim=True) / values.square().sum(1, keepdim=True)
    return QuantizedMatrix(scheme, codes, scales.half().float(), table=table, rotation_seed=seed)


@lru_cache
def normal_table(bits: int) -> tuple[float, ...]:
    """The 2^bits values of least mean squared error for N(0, 1), ascending: Lloyd's iteration in closed form.

    Each boundary lies midway between two values, each value is the mean of the distribution between its boundaries.
    """
    count = 2 ** (bits - 1)  # the positive half; the other mirrors it
    values = [(index + 0.5) * 3.0 / count for index in range(count)]
    for _ in range(10_000):
        bounds = [0.0, *((a + b) / 2 for a, b in pairwise(values)), float("inf")]
        means = [_mean_between(low, high) for low, high in pairwise(bounds)]
        moved = max(abs(a - b) for a, b in zip(means, values, strict=True))
        values = means
        if moved < 1e-12:
            break
    return (*(-value for value in reversed(values)), *values)


def _mean_between(low: float, high: float) -> float:
    """E[x | low < x < high] for x ~ N(0, 1)."""
    density = exp(-low * low / 2) - (0.0 if high == float("inf") else exp(-high * high / 2))
    mass = (1.0 if high == float("inf") else erf(high / sqrt(2))) - erf(low / sqrt(2))
    return density / mass * 2 / sqrt(2 * pi)
