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
    def code_bytes(self) -> int:
        return self.head_dim // 2 * self.pair_type.itemsize

    @property
    def pair_type(self) -> torch.dtype:
        """Of an element that holds two codes."""
        return torch.uint8 if self.kind >= HIDDEN_ZERO else torch.int16

    @property
    def number_type(self) -> torch.dtype:
        return NUMBER_TYPES[self.kind]


@dataclass(frozen=True, slots=True, eq=False)
class PackedPages:
    """Of one layer slot."""

    k: Tensor  # uint8 [pages, kv_heads, page_size * row bytes]
    v: Tensor
    page_size: int
    rows: PackedRows  # of both

    @property
    def pairs(self) -> tuple[Tensor, Tensor]:
        """The same memory as elements of two codes."""
        return self.k.view(self.rows.pair_type), self.v.view(self.rows.pair_type)

    @property
    def numbers(self) -> tuple[Tensor, Tensor]:
        """The same memory as scales."""
        return self.k.view(self.rows.number_type), self.v.view(self.rows.number_type)
