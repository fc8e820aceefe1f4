"""A quantized matrix in plain tensors: where methods, which choose the values, meet formats, which store them.

A method returns a `QuantizedMatrix`; a format's `encode` turns it into the tensors of a file, and its `decode` back,
losing nothing. Codes are unpacked here (one byte each); packing is the format's business. Knows nothing of files.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # code 0..7; bit 3 is the sign
NF4_VALUES = (  # the quantiles of a normal distribution that bitsandbytes stores as a table
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)


@dataclass(frozen=True, slots=True)
class Scheme:
    """Which numbers a matrix may hold, and how its scales are shared.

    `element`: "int" (unsigned codes of `bits` bits), "e4m3" (a float8 byte), "e2m1", "nf4", "codebook" (`bits` bits,
    table in the matrix) or "float" (pruned only, not rounded). One scale serves `block_rows` rows by `group_size`
    columns; 0 means all.
    `scale_type`: "float", "e8m0" (powers of two) or "e4m3" (times one float32 per tensor).
    `activations`: how the input is rounded when the product runs: "none", "int8_token", "fp8_token", "fp8_static" or
    another kind of kernels/rounding.py.
    `sparsity`: "2:4" where two of four neighbours are zero and the file may leave them out (floats only).
    """

    element: str
    bits: int
    group_size: int = 0
    block_rows: int = 1
    symmetric: bool = True
    scale_type: str = "float"
    activations: str = "none"
    sparsity: str = ""

    @property
    def bits_per_weight(self) -> float:
        """With its scales and zero points; a scale per row or per tensor is not counted. Zeros are counted."""
        if not self.group_size:
            return float(self.bits)
        scale_bits = 16 if self.scale_type == "float" else 8
        zero_bits = 0 if self.symmetric else self.bits
        return self.bits + (scale_bits + zero_bits) / (self.group_size * max(1, self.block_rows))


@dataclass(frozen=True, slots=True)
class QuantizedMatrix:
    """W [out, in] as codes and scales; `dequantize` says what it means.

    codes  uint8 [out, in]: int codes in 0 .. 2^bits - 1 (symmetric ones too: the zero point is 2^(bits-1)), the raw
           e4m3 byte, the e2m1 or nf4 code, or an index into `table`. Of element "float" the values themselves.
    scales float32 [out / block_rows, in / group_size]: true multipliers, before `global_scale`.
    zeros  float32, like scales, for asymmetric ints: w = scale * (code - zero). Whole numbers unless the method
           (HQQ) says otherwise.
    global_scale  a further multiplier of the whole matrix (NVFP4).
    input_scale   the calibrated static activation scale ("int8_static", "fp8_static", "nvfp4"), a multiplier.
    table  float32 [2^bits], codebooks only.
    rotation_seed  codebooks only: rows were rotated by the signed Hadamard transform of this seed before rounding.
    """

    scheme: Scheme
    codes: Tensor
    scales: Tensor
    zeros: Tensor | None = None
    global_scale: float = 1.0
    input_scale: float | None = None
    table: Tensor | None = None
    rotation_seed: int | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1]

    def to(self, device: torch.device | str) -> QuantizedMatrix:
        tensors = (self.codes, self.scales, self.zeros, self.table)
        codes, scales, zeros, table = (None if each is None else each.to(device) for each in tensors)
        assert codes is not None
        assert scales is not None
        return replace(self, codes=codes, scales=scales, zeros=zeros, table=table)

    def dequantize(self) -> Tensor:
        """float32 [out, in]; for a rotated codebook still in the rotated basis."""
        values = element_values(self)
        return values * (spread(self.scales, self) * self.global_scale)


def element_values(matrix: QuantizedMatrix) -> Tensor:
    """The codes as numbers, before scaling."""
    scheme, codes = matrix.scheme, matrix.codes
    if scheme.element == "int":
        zeros: float | Tensor = 2.0 ** (scheme.bits - 1)
        if matrix.zeros is not None:
            zeros = spread(matrix.zeros, matrix)
        return codes.float() - zeros
    if scheme.element == "e4m3":
        return codes.view(torch.float8_e4m3fn).float()
    if scheme.element == "float":
        return codes.float()
    return table_values(matrix)[codes.long()]


def table_values(matrix: QuantizedMatrix) -> Tensor:
    """float32: what each code stands for, for elements that index a table."""
    if matrix.scheme.element == "codebook":
        assert matrix.table is not None
        return matrix.table
    assert matrix.scheme.element in ("nf4", "e2m1"), matrix.scheme.element
    values = NF4_VALUES if matrix.scheme.element == "nf4" else (*E2M1_VALUES, *(-v for v in E2M1_VALUES))
    return torch.tensor(values, device=matrix.codes.device)


def spread(shared: Tensor, matrix: QuantizedMatrix) -> Tensor:
    """A value per scale block -> one per weight [out, in]; the last block of each direction may be short."""
    rows, columns = matrix.shape
    block_rows = matrix.scheme.block_rows or rows
    group_size = matrix.scheme.group_size or columns
    wide = shared.repeat_interleave(group_size, 1)[:, :columns] if shared.shape[1] > 1 else shared.expand(-1, columns)
    return wide.repeat_interleave(block_rows, 0)[:rows] if block_rows > 1 else wide
