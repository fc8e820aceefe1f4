"""Small integers into the bytes of ggml blocks: the inverse of the unpacking in kernels/ref_ggml.py.

Knows the bit layout, not what the values mean. Tensors are [blocks, ...], uint8 unless said. Called by the type files.
"""

from __future__ import annotations

import torch
from torch import Tensor


def pack_fields(values: Tensor, run: int, bits: int) -> Tensor:
    """[B, n * 8 / bits] -> [B, n] bytes. Each run of bytes holds its first values in the lowest bits."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8).view(1, 1, -1, 1)
    fields = values.reshape(values.shape[0], -1, 8 // bits, run) << shifts
    return fields.sum(2, dtype=torch.uint8).flatten(1)


def pack_single_bits(bits: Tensor) -> Tensor:
    """[B, 8n] of 0 and 1 -> [B, n] bytes, each lowest bit first."""
    shifts = torch.arange(8, dtype=torch.uint8)
    return (bits.reshape(bits.shape[0], -1, 8) << shifts).sum(2, dtype=torch.uint8)


def half_bytes(values: Tensor) -> Tensor:
    """float32 [B] -> [B, 2] bytes of float16."""
    return values.to(torch.float16).view(-1, 1).view(torch.uint8)


def round_to_half(values: Tensor) -> Tensor:
    """What a reader gets back: float32 rounded to float16."""
    return values.to(torch.float16).to(torch.float32)


def pack_six_bit_pairs(scales: Tensor, minima: Tensor) -> Tensor:
    """8 scales and 8 minima of 6 bits -> [B, 12]. The last four keep their top two bits in the first eight bytes."""
    low = torch.cat([scales[:, :4] | (scales[:, 4:] >> 4) << 6, minima[:, :4] | (minima[:, 4:] >> 4) << 6], dim=1)
    return torch.cat([low, (scales[:, 4:] & 15) | (minima[:, 4:] & 15) << 4], dim=1)


def pack_six_bit(scales: Tensor) -> Tensor:
    """16 scales of 6 bits -> [B, 12]: eight bytes of low nibbles, four of high bit pairs."""
    return torch.cat([pack_fields(scales & 15, 8, 4), pack_fields(scales >> 4, 4, 2)], dim=1)
