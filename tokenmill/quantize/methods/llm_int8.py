"""LLM.int8(): int8 rows scaled by their peak, for products that keep large inputs in floating point.

The weights are ordinary int8: the peak of a row becomes 127. The method is defined by the rounding of the inputs, which
the scheme names ("llm_int8"): per token to int8, except for inputs of 6 and more. Data-free.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tokenmill.errors import UserError
from tokenmill.model.formats.quantized import QuantizedMatrix, Scheme
from tokenmill.quantize.methods.blocks import MatrixSolver, block_peaks, check_element, nonzero


class LlmInt8(MatrixSolver):
    name = "llm_int8"

    def check(self, name: str, shape: tuple[int, int], scheme: Scheme) -> None:
        del name, shape
        check_element(self.name, scheme, "int")
        if (scheme.bits, scheme.group_size, scheme.block_rows, scheme.symmetric) != (8, 0, 1, True):
            raise UserError("llm.int8 makes 8-bit symmetric rows with one scale each", "leave the other options out")

    def quantize(self, weight: Tensor, scheme: Scheme) -> QuantizedMatrix:
        return to_int8_rows(weight, scheme)


def to_int8_rows(weight: Tensor, scheme: Scheme) -> QuantizedMatrix:
    peaks = nonzero(block_peaks(weight, 1, 0))
    codes = (weight * (127 / peaks)).round() + 128
    return QuantizedMatrix(scheme, codes.to(torch.uint8), peaks / 127)
