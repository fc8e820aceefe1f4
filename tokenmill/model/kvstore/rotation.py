"""Randomized Hadamard rotation of heads: outliers are spread over all coordinates before they are rounded.

Rows are stored rotated; the C++ attention rotates each query once and unrotates the output, the torch version unrotates
rows as it reads them. Any head width has one (kernels/hadamard.py); for 48 and the powers of two it is a true
Hadamard matrix.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tokenmill.kernels.cpu_pages import RowRotation
from tokenmill.kernels.hadamard import hadamard, hadamard_parts, inverse_hadamard, random_signs

SEED = 0x6B76  # fixed: pages written by one process are read by others


class Rotation:
    def __init__(self, head_dim: int, signed: bool = True) -> None:
        """`signed`: with random signs, else the plain Hadamard matrix."""
        self._signs = random_signs(head_dim, SEED) if signed else random_signs(head_dim, SEED).abs()

    def rotate(self, x: Tensor) -> Tensor:
        """Along the last dimension."""
        return hadamard(x * self._signs.to(x))

    def unrotate(self, y: Tensor) -> Tensor:
        return inverse_hadamard(y) * self._signs.to(y)

    def matrix(self, device: torch.device) -> Tensor:
        """float16 [n, n]: `rotate` of rows is x @ matrix / sqrt(n). Of a true Hadamard matrix the entries are +-1."""
        size = len(self._signs)
        return (self.rotate(torch.eye(size)) * size**0.5).to(device, torch.float16).contiguous()

    def code(self) -> RowRotation:
        power, matrix = hadamard_parts(len(self._signs))
        return RowRotation(self._signs, power, matrix)
