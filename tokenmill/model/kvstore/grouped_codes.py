"""Uniform codes with a step and a minimum in half precision per group of numbers: the arithmetic of KIVI.

Knows nothing of pages; a group is the second-last dimension (keys: tokens of one channel) or a run of the last one
(values: channels of one token).
"""

from __future__ import annotations

import torch
from torch import Tensor

from tokenmill.model.kvstore.packing import pack_codes, unpack_codes

_MIN_STEP = 1e-6


def encode_over_rows(x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """x [..., rows, n] -> codes uint8 [..., rows, n * bits / 8], numbers float16 [..., 2, n]: step and minimum."""
    codes, numbers = _encode(x, x.amin(-2, keepdim=True), x.amax(-2, keepdim=True), bits)
    return pack_codes(codes, bits), torch.cat(numbers, -2)


def decode_over_rows(codes: Tensor, numbers: Tensor, bits: int) -> Tensor:
    step, minimum = numbers.float().chunk(2, -2)
    return unpack_codes(codes, bits) * step + minimum


def encode_over_channels(x: Tensor, group: int, bits: int) -> tuple[Tensor, Tensor]:
    """x [..., n] -> codes uint8 [..., n * bits / 8], numbers float16 [..., n / group, 2]: step and minimum."""
    runs = x.unflatten(-1, (-1, group))
    codes, numbers = _encode(runs, runs.amin(-1, keepdim=True), runs.amax(-1, keepdim=True), bits)
    return pack_codes(codes.flatten(-2), bits), torch.cat(numbers, -1)


def decode_over_channels(codes: Tensor, numbers: Tensor, bits: int) -> Tensor:
    step, minimum = numbers.float().chunk(2, -1)
    runs = unpack_codes(codes, bits).unflatten(-1, (numbers.shape[-2], -1))
    return (runs * step + minimum).flatten(-2)


def _encode(x: Tensor, minimum: Tensor, maximum: Tensor, bits: int) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    max_code = (1 << bits) - 1
    minimum = minimum.half()
    step = ((maximum - minimum) / max_code).clamp(min=_MIN_STEP).half()
    codes = torch.round((x - minimum) / step).nan_to_num(0).clamp(0, max_code)
    return codes, (step, minimum)
