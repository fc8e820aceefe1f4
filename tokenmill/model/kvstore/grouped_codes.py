"""Uniform codes with a step and a least value in half precision per group of numbers: the arithmetic of KIVI.

Knows nothing of pages; a group is the second-last dimension (keys: tokens of one channel) or a run of the last one
(values: channels of one token).
"""

from __future__ import annotations

import torch
from torch import Tensor

from tokenmill.model.kvstore.packing import pack_codes, unpack_codes

_SMALLEST_STEP = 1e-6


def encode_over_rows(x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """x [..., rows, n] -> codes uint8 [..., rows, n * bits / 8], numbers float16 [..., 2, n]: step and least."""
    codes, numbers = _encode(x, x.amin(-2, keepdim=True), x.amax(-2, keepdim=True), bits)
    return pack_codes(codes, bits), torch.cat(numbers, -2)


def decode_over_rows(codes: Tensor, numbers: Tensor, bits: int) -> Tensor:
    step, least = numbers.float().chunk(2, -2)
    return unpack_codes(codes, bits) * step + least


def encode_over_channels(x: Tensor, group: int, bits: int) -> tuple[Tensor, Tensor]:
    """x [..., n] -> codes uint8 [..., n * bits / 8], numbers float16 [..., n / group, 2]: step and least."""
    runs = x.unflatten(-1, (-1, group))
    codes, numbers = _encode(runs, runs.amin(-1, keepdim=True), runs.amax(-1, keepdim=True), bits)
    return pack_codes(codes.flatten(-2), bits), torch.cat(numbers, -1)


def decode_over_channels(codes: Tensor, numbers: Tensor, bits: int) -> Tensor:
    step, least = numbers.float().chunk(2, -1)
    runs = unpack_codes(codes, bits).unflatten(-1, (numbers.shape[-2], -1))
    return (runs * step + least).flatten(-2)


def _encode(x: Tensor, least: Tensor, largest: Tensor, bits: int) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    highest = (1 << bits) - 1
    least = least.half()
    step = ((largest - least) / highest).clamp(min=_SMALLEST_STEP).half()
    codes = torch.round((x - least) / step).nan_to_num(0).clamp(0, highest)
    return codes, (step, least)
