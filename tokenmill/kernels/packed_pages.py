"""Quantized KV pages as the GPU kernels take them: planes of codes and of numbers, and how a row is read.

In memory the block of one page and KV head is [page_size, code bytes], then [page_size, number bytes]: rows of codes
are contiguous and aligned, whatever the size of a scale. The stores (model/kvstore) own the torch version of each kind;
kernels/triton/fused/rotary_packed.py writes and attention/packed*.py reads them. Imports no triton.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

INT8_HALF, INT8_FLOAT, HIDDEN_ZERO, CODEBOOK, PAIRED_ZERO = range(5)  # kinds of rows
NUMBER_TYPES = (torch.float16, torch.float32, torch.int32, torch.float16, torch.int32)

# The upper half of the levels of CODEBOOK for a row of length sqrt(head_dim), as bits of float16; the lower half are
# their negatives. Attention has them in its code; the stores compute them (model/kvstore/codebook.py).
CODEBOOK_HALVES = (0x301C, 0x3635, 0x3941, 0x3B8A, 0x3D06, 0x3E79, 0x4023, 0x4177)


@dataclass(frozen=True, slots=True, eq=False)
class PackedRows:
    """How one token's key or value of one KV head is stored in a page.

    INT8_HALF, INT8_FLOAT: code * scale. HIDDEN_ZERO: (code - zero) * scale, the zero point in the scale's four lowest
    bits. CODEBOOK: levels[code] * length. PAIRED_ZERO: as HIDDEN_ZERO with two halves for scales, that of the even
    dimensions in the low 16 bits. The last three hold two codes a byte, the even dimension in the low half."""

    kind: int
    head_dim: int
    turn: Tensor | None = None  # float16 [head_dim, head_dim]: rows hold x @ turn / sqrt(head_dim)
    # Of a codebook, for rows of length one, float32: [16] ascending, the [15] between them, and the multiples of a
    # row's norm that are tried when it is rounded.
    levels: Tensor | None = None
    bounds: Tensor | None = None
    gains: Tensor | None = None

    @property
    def codes_per_element(self) -> int:
        """Of 16 bits, in which attention reads rows."""
        return 4 if self.kind >= HIDDEN_ZERO else 2

    @property
    def code_bytes(self) -> int:
        return self.head_dim // self.codes_per_element * 2

    @property
    def number_type(self) -> torch.dtype:
        return NUMBER_TYPES[self.kind]


@dataclass(frozen=True, slots=True, eq=False)
class KeyTransform:
    """What makes keys easier to round: rows hold (key - center) * scale, and queries are divided by the scale."""

    center: Tensor  # float32 [kv_heads, head_dim]
    scale: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class PackedPages:
    """Of one layer slot."""

    k: Tensor  # uint8 [pages, kv_heads, page_size * row bytes]
    v: Tensor
    page_size: int
    rows: PackedRows  # of both
    keys: KeyTransform | None = None  # before they are rotated

    @property
    def elements(self) -> tuple[Tensor, Tensor]:
        """The same memory as elements of 16 bits."""
        return self.k.view(torch.int16), self.v.view(torch.int16)

    @property
    def numbers(self) -> tuple[Tensor, Tensor]:
        """The same memory as scales."""
        return self.k.view(self.rows.number_type), self.v.view(self.rows.number_type)
