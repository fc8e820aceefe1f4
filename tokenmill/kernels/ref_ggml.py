"""What the bits of each ggml block type mean: plain torch, one small function per type. This is the spec.

Every faster kernel for these types is compared with this file. Speed is incidental, exactness is not: results equal
the `gguf` package's own dequantization bit for bit. The types of fewer than 4 bits whose codes are points of a grid, or
three levels, are in ref_ggml_grids.py. Knows nothing about files or models.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tokenmill.errors import unknown_name
from tokenmill.kernels.ggml_types import TYPES
from tokenmill.kernels.ref_ggml_grids import FP4_DOUBLED, PARTS, dequantize_parts

_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

# Fixed, uneven 4-bit levels of IQ4_NL and IQ4_XS.
IQ4_LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def dequantize(type_name: str, data: Tensor) -> Tensor:
    """Bytes [..., row_bytes] -> float32 [..., row_length]. Plain types may also come in their own dtype."""
    if type_name in _PLAIN:
        plain = data.contiguous().view(_PLAIN[type_name]) if data.dtype == torch.uint8 else data
        return plain.to(torch.float32)
    if type_name not in _UNPACK and type_name not in PARTS:
        raise unknown_name("ggml type to dequantize", type_name, [*_PLAIN, *_UNPACK, *PARTS])
    layout = TYPES[type_name]
    assert data.dtype == torch.uint8, (type_name, data.dtype)
    assert data.shape[-1] % layout.block_bytes == 0, (type_name, data.shape)
    blocks = data.reshape(-1, layout.block_bytes)
    row_length = data.shape[-1] // layout.block_bytes * layout.block_size
    values = dequantize_parts(*PARTS[type_name](blocks)) if type_name in PARTS else _UNPACK[type_name](blocks)
    return values.reshape(*data.shape[:-1], row_length)


def _half(data: Tensor) -> Tensor:
    """[B, 2n] bytes -> [B, n] float32 from little-endian float16."""
    return data.contiguous().view(torch.float16).to(torch.float32)


def _fields(packed: Tensor, run: int, bits: int) -> Tensor:
    """[B, n] bytes -> [B, n * 8 / bits] small integers. In each run of bytes the lowest fields of all come first."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device).view(1, 1, -1, 1)
    runs = packed.reshape(packed.shape[0], -1, 1, run)
    return ((runs >> shifts) & ((1 << bits) - 1)).flatten(1)


def _single_bits(packed: Tensor) -> Tensor:
    """[B, n] bytes -> [B, 8n] bits, each byte lowest bit first."""
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return ((packed.unsqueeze(-1) >> shifts) & 1).flatten(1)


def _signed(values: Tensor, offset: int) -> Tensor:
    """uint8 fields minus an offset, as int8."""
    return values.view(torch.int8) - offset


def _levels(table: tuple[int, ...], index: Tensor) -> Tensor:
    return torch.tensor(table, dtype=torch.float32, device=index.device)[index.long()]


def _q4_0(blocks: Tensor) -> Tensor:
    return _half(blocks[:, :2]) * _signed(_fields(blocks[:, 2:], 16, 4), 8)


def _q4_1(blocks: Tensor) -> Tensor:
    return _half(blocks[:, :2]) * _fields(blocks[:, 4:], 16, 4) + _half(blocks[:, 2:4])


def _q5_0(blocks: Tensor) -> Tensor:
    quants = _fields(blocks[:, 6:], 16, 4) | (_single_bits(blocks[:, 2:6]) << 4)
    return _half(blocks[:, :2]) * _signed(quants, 16)


def _q5_1(blocks: Tensor) -> Tensor:
    quants = _fields(blocks[:, 8:], 16, 4) | (_single_bits(blocks[:, 4:8]) << 4)
    return _half(blocks[:, :2]) * quants + _half(blocks[:, 2:4])


def _q8_0(blocks: Tensor) -> Tensor:
    return _half(blocks[:, :2]) * blocks[:, 2:].view(torch.int8)


def _q2_k(blocks: Tensor) -> Tensor:
    scales = blocks[:, :16]
    scale = _half(blocks[:, 80:82]) * (scales & 15)  # [B, 16]
    minimum = _half(blocks[:, 82:84]) * (scales >> 4)
    quants = _fields(blocks[:, 16:80], 32, 2).view(-1, 16, 16)
    return scale.unsqueeze(-1) * quants - minimum.unsqueeze(-1)


def _q3_k(blocks: Tensor) -> Tensor:
    packed = blocks[:, 96:108]  # 16 scales of 6 bits: eight bytes of low nibbles, four of high bit pairs
    scales = _fields(packed[:, :8], 8, 4) | (_fields(packed[:, 8:], 4, 2) << 4)
    scale = _half(blocks[:, 108:110]) * _signed(scales, 32)
    high = _fields(blocks[:, :32], 32, 1)  # set: nothing to subtract
    quants = _signed(_fields(blocks[:, 32:96], 32, 2) | (high << 2), 4)
    return scale.unsqueeze(-1) * quants.view(-1, 16, 16)


def _k_scales(packed: Tensor) -> tuple[Tensor, Tensor]:
    """12 bytes -> 8 scales and 8 minima of 6 bits. The last four of each keep their top two bits in the first bytes."""
    scale, minimum, low = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = torch.cat([scale & 63, (low & 15) | ((scale >> 6) << 4)], dim=1)
    minima = torch.cat([minimum & 63, (low >> 4) | ((minimum >> 6) << 4)], dim=1)
    return scales, minima


def _k_affine(blocks: Tensor, quants: Tensor) -> Tensor:
    """Q4_K and Q5_K: 8 groups of 32 values, each with its scale and minimum."""
    scales, minima = _k_scales(blocks[:, 4:16])
    scale = _half(blocks[:, 0:2]) * scales  # [B, 8]
    minimum = _half(blocks[:, 2:4]) * minima
    return scale.unsqueeze(-1) * quants.view(-1, 8, 32) - minimum.unsqueeze(-1)


def _q4_k(blocks: Tensor) -> Tensor:
    return _k_affine(blocks, _fields(blocks[:, 16:], 32, 4))


def _q5_k(blocks: Tensor) -> Tensor:
    return _k_affine(blocks, _fields(blocks[:, 48:], 32, 4) | (_fields(blocks[:, 16:48], 32, 1) << 4))


def _q6_k(blocks: Tensor) -> Tensor:
    scale = _half(blocks[:, 208:210]) * blocks[:, 192:208].view(torch.int8)  # [B, 16]
    quants = _fields(blocks[:, :128], 64, 4) | (_fields(blocks[:, 128:192], 32, 2) << 4)
    return scale.unsqueeze(-1) * _signed(quants, 32).view(-1, 16, 16)


def _iq4_nl(blocks: Tensor) -> Tensor:
    return _half(blocks[:, :2]) * _levels(IQ4_LEVELS, _fields(blocks[:, 2:], 16, 4))


def _iq4_xs(blocks: Tensor) -> Tensor:
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=blocks.device)
    high = ((blocks[:, 2:4].unsqueeze(-1) >> shifts) & 3).flatten(1)  # [B, 8]
    low = _fields(blocks[:, 4:8], 1, 4)
    scale = _half(blocks[:, :2]) * _signed(low | (high << 4), 32)
    levels = _levels(IQ4_LEVELS, _fields(blocks[:, 8:], 16, 4))
    return scale.unsqueeze(-1) * levels.view(-1, 8, 32)


def _mxfp4(blocks: Tensor) -> Tensor:
    exponent = blocks[:, :1].to(torch.int32)
    # Half of 2 ** (exponent - 127), built from bits; the two smallest are subnormal.
    bits = torch.where(exponent < 2, 0x00200000 << exponent.clamp(max=1), (exponent - 1) << 23)
    return bits.view(torch.float32) * _levels(FP4_DOUBLED, _fields(blocks[:, 1:], 16, 4))


_UNPACK: dict[str, Callable[[Tensor], Tensor]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
}
