"""What the bits of ggml's low-bit types mean: points of grids (IQ1, IQ2, IQ3), three levels (TQ) and NVFP4. The spec.

A second part of ref_ggml.py, by the same rules: plain torch, equal to the `gguf` package bit for bit. Each function
gives the parts of its blocks: whole values, and the scale of each group of them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tokenmill.kernels.ggml_grids import grid

# Twice the values of a 4-bit float (E2M1), so that they are whole; the block scale is halved in turn.
FP4_DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)

Parts = tuple[Tensor, Tensor]  # int8 [B, block], float32 [B, groups]


def half(data: Tensor) -> Tensor:
    """[B, 2n] bytes -> [B, n] float32 from little-endian float16."""
    return data.contiguous().view(torch.float16).to(torch.float32)


def dequantize_parts(values: Tensor, scales: Tensor) -> Tensor:
    groups = scales.shape[1]
    return (scales.unsqueeze(-1) * values.view(values.shape[0], groups, -1)).flatten(1)


def _words(data: Tensor, size: int) -> Tensor:
    """[B, size * n] bytes -> [B, n] int64 from little-endian integers."""
    parts = data.reshape(data.shape[0], -1, size).long()
    return (parts << 8 * torch.arange(size, device=data.device)).sum(-1)


def _fields(words: Tensor, shifts: tuple[int, ...], bits: int) -> Tensor:
    """[B, n] -> [B, n * len(shifts)], the fields of a word one after the other."""
    places = torch.tensor(shifts, device=words.device)
    return ((words.unsqueeze(-1) >> places) & ((1 << bits) - 1)).flatten(1)


def _points(name: str, index: Tensor) -> Tensor:
    return grid(name).to(index.device)[index].flatten(1)


def _signed(values: Tensor, signs: Tensor) -> Tensor:
    """Values [B, 8n], negative where a bit of the sign bytes [B, n] is set."""
    negative = _fields(signs.long(), (0, 1, 2, 3, 4, 5, 6, 7), 1).to(torch.int8)
    return values * (1 - 2 * negative)


def _even_signs(index: Tensor) -> Tensor:
    """Seven sign bits -> eight: the last one makes the number of minus signs even."""
    parity = index
    for shift in (4, 2, 1):
        parity = parity ^ (parity >> shift)
    return index | (parity & 1) << 7


def _odd_scale(d: Tensor, scales: Tensor, unit: float) -> Tensor:
    return d * (2 * scales + 1).float() * unit


def iq2_xxs(b: Tensor) -> Parts:
    words = _words(b[:, 2:], 4).view(-1, 8, 2)  # of each 32: four points, then 4 x 7 sign bits and the scale
    index = _fields(words[:, :, 0], (0, 8, 16, 24), 8)
    signs = _even_signs(_fields(words[:, :, 1], (0, 7, 14, 21), 7))
    scale = _odd_scale(half(b[:, :2]), words[:, :, 1] >> 28, 0.125)
    return _signed(_points("IQ2_XXS", index), signs), scale


def iq2_xs(b: Tensor) -> Parts:
    words = _words(b[:, 2:66], 2)  # 9 bits of point, 7 of signs
    scale = _odd_scale(half(b[:, :2]), _fields(b[:, 66:].long(), (0, 4), 4), 0.125)
    return _signed(_points("IQ2_XS", words & 511), _even_signs(words >> 9)), scale


def iq2_s(b: Tensor) -> Parts:
    index = b[:, 2:34].long() | _fields(b[:, 66:74].long(), (0, 2, 4, 6), 2) << 8
    scale = _odd_scale(half(b[:, :2]), _fields(b[:, 74:].long(), (0, 4), 4), 0.125)
    return _signed(_points("IQ2_S", index), b[:, 34:66]), scale


def iq3_xxs(b: Tensor) -> Parts:
    words = _words(b[:, 66:], 4)  # of each 32: 4 x 7 sign bits and the scale
    signs = _even_signs(_fields(words, (0, 7, 14, 21), 7))
    scale = _odd_scale(half(b[:, :2]), words >> 28, 0.25)
    return _signed(_points("IQ3_XXS", b[:, 2:66].long()), signs), scale


def iq3_s(b: Tensor) -> Parts:
    index = b[:, 2:66].long() | _fields(b[:, 66:74].long(), (0, 1, 2, 3, 4, 5, 6, 7), 1) << 8
    scale = _odd_scale(half(b[:, :2]), _fields(b[:, 106:].long(), (0, 4), 4), 1.0)
    return _signed(_points("IQ3_S", index), b[:, 74:106]), scale


def _shifted_points(index: Tensor, shift: Tensor) -> Tensor:
    """Eight times a point of IQ1_S, plus or minus one; `shift`: 1 where minus, for each point."""
    return 8 * _points("IQ1_S", index) + (1 - 2 * shift).to(torch.int8).repeat_interleave(8, 1)


def iq1_s(b: Tensor) -> Parts:
    high = _words(b[:, 34:], 2)  # of each 32: 4 x 3 high bits of points, 3 bits of scale, sign of the shift
    index = b[:, 2:34].long() | _fields(high, (0, 3, 6, 9), 3) << 8
    shift = (high >> 15).repeat_interleave(4, 1)
    return _shifted_points(index, shift), _odd_scale(half(b[:, :2]), high >> 12 & 7, 0.125)


def iq1_m(b: Tensor) -> Parts:
    high = _fields(b[:, 32:48].long(), (0, 4), 4)  # of each 8: 3 high bits of the point, sign of the shift
    words = _words(b[:, 48:], 2)  # 4 x 3 bits of scale, and 4 bits of d
    d = ((words >> 12) << 4 * torch.arange(4, device=b.device)).sum(1, keepdim=True)
    index = b[:, :32].long() | (high & 7) << 8
    scale = _odd_scale(half(d.to(torch.int16).view(torch.uint8)), _fields(words, (0, 3, 6, 9), 3), 0.125)
    return _shifted_points(index, high >> 3), scale


def tq1_0(b: Tensor) -> Parts:
    """Five digits of three in a byte, read by multiplying: byte * 3^i, and of its low 8 bits the three thirds."""

    def digits(packed: Tensor, run: int, count: int) -> Tensor:
        powers = 3 ** torch.arange(count, device=b.device).view(1, 1, -1, 1)
        return ((packed.long().reshape(packed.shape[0], -1, 1, run) * powers & 255) * 3 >> 8).flatten(1)

    codes = torch.cat([digits(b[:, :32], 32, 5), digits(b[:, 32:48], 16, 5), digits(b[:, 48:52], 4, 4)], 1)
    return (codes - 1).to(torch.int8), half(b[:, 52:])


def tq2_0(b: Tensor) -> Parts:
    runs = b[:, :64].reshape(-1, 2, 1, 32)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device=b.device).view(1, 1, -1, 1)
    return (runs >> shifts & 3).flatten(1).to(torch.int8) - 1, half(b[:, 64:])


def nvfp4(b: Tensor) -> Parts:
    """Four groups of 16, each with a scale of eight bits (E4M3, here without a sign; 127 means nothing: zero)."""
    code = b[:, :4].int()
    exponent, fraction = code >> 3 & 15, (code & 7).float()
    normal = (1 + fraction / 8) * torch.exp2(exponent.float() - 7)
    scale = torch.where(exponent == 0, fraction * 2**-9, normal) * 0.5
    scale = torch.where((code == 0) | (code == 127), 0.0, scale)
    packed = b[:, 4:].reshape(-1, 4, 8)
    index = torch.cat([packed & 15, packed >> 4], -1).flatten(1)
    return torch.tensor(FP4_DOUBLED, dtype=torch.int8, device=b.device)[index.long()], scale


PARTS: dict[str, Callable[[Tensor], Parts]] = {
    "IQ2_XXS": iq2_xxs,
    "IQ2_XS": iq2_xs,
    "IQ2_S": iq2_s,
    "IQ3_XXS": iq3_xxs,
    "IQ3_S": iq3_s,
    "IQ1_S": iq1_s,
    "IQ1_M": iq1_m,
    "TQ1_0": tq1_0,
    "TQ2_0": tq2_0,
    "NVFP4": nvfp4,
}
