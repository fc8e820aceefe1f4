"""Shared by the data-free methods: the peak of each scale block, shape checks, and the loop over a block's matrices.

Independent of the number type. Used by fp8, mx, nvfp4, nf4, llm_int8, hqq and turboquant.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor

from tokenmill.errors import UserError
from tokenmill.model.formats.quantized import QuantizedMatrix, Scheme
from tokenmill.quantize.base import BlockView, Solver


class MatrixSolver(Solver):
    """A solver that quantizes one matrix at a time without calibration data."""

    @abstractmethod
    def quantize(self, weight: Tensor, scheme: Scheme) -> QuantizedMatrix: ...

    def solve(self, block: BlockView, scheme_of: Mapping[str, Scheme]) -> dict[str, QuantizedMatrix]:
        matrices = {}
        for name, scheme in scheme_of.items():
            matrices[name] = self.quantize(block.weight(name), scheme)
            block.replace(name, self.values(matrices[name]))
        return matrices

    def values(self, matrix: QuantizedMatrix) -> Tensor:
        """The dequantized matrix, for the block's unrotated input."""
        return matrix.dequantize()


def check_element(step: str, scheme: Scheme, *elements: str) -> None:
    if scheme.element not in elements:
        raise UserError(
            f"{step} makes {' or '.join(elements)} numbers, not {scheme.element}", "use the method of that number type"
        )


def check_groups(step: str, name: str, shape: tuple[int, int], group_size: int) -> None:
    """Formats whose groups have one size: a row must be whole groups."""
    if group_size and shape[1] % group_size:
        raise UserError(
            f"{name} has {shape[1]} inputs, which {step} cannot cut into groups of {group_size}",
            f"leave the matrix out (--ignore {name}), or use fp8 or rtn",
        )


def block_peaks(weight: Tensor, block_rows: int, group_size: int) -> Tensor:
    """The largest magnitude of each block [ceil(out / block_rows), ceil(in / group_size)]; 0 is the whole extent."""
    return _in_blocks(weight.abs(), block_rows, group_size).amax((1, 3))


def block_sums(values: Tensor, block_rows: int, group_size: int) -> Tensor:
    return _in_blocks(values, block_rows, group_size).sum((1, 3))


def _in_blocks(values: Tensor, block_rows: int, group_size: int) -> Tensor:
    """[blocks down, rows of a block, blocks across, columns of a block], filled up with zeros at the edges."""
    rows, columns = values.shape
    tall, wide = block_rows or rows, group_size or columns
    padded = torch.nn.functional.pad(values, (0, -columns % wide, 0, -rows % tall))
    return padded.unflatten(1, (-1, wide)).unflatten(0, (-1, tall))


def nonzero(scales: Tensor) -> Tensor:
    """Scales with zeros replaced by one, so that they can be divided by (blocks of zeros)."""
    return torch.where(scales > 0, scales, torch.ones_like(scales))
