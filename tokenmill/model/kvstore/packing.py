"""Codes of 1, 2, 3, 4 or 8 bits packed into bytes along the last dimension, low bits first.

Eight codes of 3 bits take three bytes; narrower and wider ones never straddle a byte. The C++ version is in
csrc/cpu/kv_rows.cpp. Used by the KV row formats.
"""

from __future__ import annotations

import torch
from torch import Tensor


def _group(bits: int) -> tuple[int, int]:
    """Codes and bytes of the smallest group that ends at a byte."""
    return (8, 3) if bits == 3 else (8 // bits, 1)


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """Integers [..., n] below 2**bits -> uint8 [..., n * bits / 8]."""
    if bits == 8:
        return codes.to(torch.uint8)
    count, num_bytes = _group(bits)
    groups = codes.to(torch.int32).unflatten(-1, (-1, count))
    shifts = torch.arange(count, device=codes.device, dtype=torch.int32) * bits
    words = (groups << shifts).sum(-1, dtype=torch.int32)
    byte_shifts = torch.arange(num_bytes, device=codes.device, dtype=torch.int32) * 8
    return ((words[..., None] >> byte_shifts) & 255).to(torch.uint8).flatten(-2)


def unpack_codes(packed: Tensor, bits: int) -> Tensor:
    """uint8 [..., m] -> int32 [..., m * 8 / bits]."""
    if bits == 8:
        return packed.to(torch.int32)
    count, num_bytes = _group(bits)
    byte_shifts = torch.arange(num_bytes, device=packed.device, dtype=torch.int32) * 8
    words = (packed.to(torch.int32).unflatten(-1, (-1, num_bytes)) << byte_shifts).sum(-1, dtype=torch.int32)
    shifts = torch.arange(count, device=packed.device, dtype=torch.int32) * bits
    return ((words[..., None] >> shifts) & ((1 << bits) - 1)).flatten(-2)


def as_bytes(values: Tensor) -> Tensor:
    """A number per row [..., k] -> its bytes, uint8 [..., k * item size]."""
    return values.contiguous().view(torch.uint8)


def from_bytes(packed: Tensor, dtype: torch.dtype) -> Tensor:
    """The inverse of `as_bytes`; the bytes need not be contiguous."""
    return packed.contiguous().view(dtype)
