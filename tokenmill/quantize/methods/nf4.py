"""NF4: 4-bit codes of a fixed table, the quantiles of a normal distribution, scaled by each block's peak.

Blocks are groups of 64 columns, which is how bitsandbytes cuts the flattened matrix where rows are whole blocks.
Data-free; whether the scales themselves are quantized (double quantization) is decided by the file format.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tokenmill.errors import UserError
from tokenmill.model.formats.quantized import NF4_VALUES, QuantizedMatrix, Scheme
from tokenmill.quantize.methods.blocks import MatrixSolver, block_peaks, check_element, nonzero

_SIZES = (64, 32)


class NormalFloat(MatrixSolver):
    name = "nf4"

    def check(self, name: str, shape: tuple[int, int], scheme: Scheme) -> None:
        check_element(self.name, scheme, "nf4")
        if scheme.group_size and shape[1] % scheme.group_size:
            good = [size for size in _SIZES if shape[1] % size == 0]
            raise UserError(
                f"{name} has {shape[1]} inputs, not whole blocks of {scheme.group_size}",
                f"use --group-size {good[0]}" if good else f"leave the matrix out (--ignore {name})",
            )

    def quantize(self, weight: Tensor, scheme: Scheme) -> QuantizedMatrix:
        return to_normal_float(weight, scheme)


def to_normal_float(weight: Tensor, scheme: Scheme) -> QuantizedMatrix:
    peaks = block_peaks(weight, 1, scheme.group_size)
    blocks = weight.reshape(*peaks.shape, -1) / nonzero(peaks).unsqueeze(-1)
    codes = nearest_in_table(blocks, torch.tensor(NF4_VALUES, device=weight.device))
    return QuantizedMatrix(scheme, codes.view(weight.shape), peaks)


def nearest_in_table(values: Tensor, table: Tensor) -> Tensor:
    """uint8 index of the nearest entry of an ascending table."""
    return torch.bucketize(values.contiguous(), (table[:-1] + table[1:]) / 2).to(torch.uint8)
