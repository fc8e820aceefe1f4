"""Stored weights -> what the kernels multiply: grouped codes (grouped.py), or one scale per row (fp8, int8), or bf16.

Runs once at load, on the device the weight goes to, in plain torch. Knows the ggml block types and the neutral
`QuantizedMatrix` by their fields only; nothing is rounded again except where a docstring says so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tokenmill.kernels import ref_ggml, ref_ggml_grids
from tokenmill.kernels.ggml_types import TYPES
from tokenmill.kernels.triton.matmul.grouped import GroupedWeight

ROWS_AT_ONCE = 4096  # bounds the unpacked copy of a large matrix
_LARGEST_ZERO = 32768.0  # of groups with a minimum: kernels subtract it in 16 bits


def pack_groups(codes: Tensor, scales: Tensor, zeros: Tensor | None, bits: int, words: int = 32) -> GroupedWeight:
    """codes int8 [N, K] (4 bits: -8 .. 7), scales and zeros float32 [N, groups], w = scale * (code - zero).

    Scales become float16 relative to the row's largest (2^-11 apart), zeros bfloat16 (whole ones up to 256 exact)."""
    rows, depth = codes.shape
    group = -(-depth // scales.shape[1])
    group, scales, zeros = _split_groups(group, scales, zeros)
    block = max(128, 8 * min(words, group)) if bits == 4 else group
    padding = -depth % block
    if padding:
        codes = torch.nn.functional.pad(codes, (0, padding))
        missing = (depth + padding) // group - scales.shape[1]
        scales = torch.nn.functional.pad(scales, (0, missing))
        zeros = None if zeros is None else torch.nn.functional.pad(zeros, (0, missing))
    row_scale = scales.abs().amax(1).clamp(min=1e-30)
    relative = (scales / row_scale[:, None]).to(torch.float16).t().contiguous()
    blocks = codes.view(rows, -1, block).transpose(0, 1)  # [blocks, N, block]
    packed = _pack_nibbles(blocks) if bits == 4 else blocks.contiguous()
    kept = None if zeros is None or not bool(zeros.any()) else zeros.to(torch.bfloat16).t().contiguous()
    return GroupedWeight(bits, group, depth, packed, relative, kept, row_scale)


def _split_groups(group: int, scales: Tensor, zeros: Tensor | None) -> tuple[int, Tensor, Tensor | None]:
    """Groups of at most 128, a power of two: longer ones repeat their scale."""
    size = group
    while size > 128 or size & (size - 1):
        size = 128 if size % 128 == 0 else 64 if size % 64 == 0 else 32 if size % 32 == 0 else 16
    times = group // size
    if times > 1:
        scales = scales.repeat_interleave(times, 1)
        zeros = None if zeros is None else zeros.repeat_interleave(times, 1)
    return size, scales, zeros


def _pack_nibbles(blocks: Tensor) -> Tensor:
    """int8 [blocks, N, block] in -8 .. 7 -> int32 [blocks, N, block / 8]; see GroupedWeight."""
    nibbles = (blocks + 8).view(torch.uint8).reshape(*blocks.shape[:2], 8, -1)
    words = torch.zeros(*blocks.shape[:2], nibbles.shape[3], dtype=torch.int32, device=blocks.device)
    for place in range(8):
        words |= nibbles[:, :, place].int() << (4 * place)
    return words


def from_matrix(matrix: Any, device: torch.device) -> GroupedWeight | None:
    """A QuantizedMatrix of 4- or 8-bit integers (or 4-bit floats) in groups; None for elements of another kind."""
    scheme = matrix.scheme
    codes, scales = matrix.codes.to(device), matrix.scales.to(device).float() * matrix.global_scale
    rows, depth = codes.shape
    if scheme.block_rows != 1:
        scales = scales.repeat_interleave(scheme.block_rows or rows, 0)[:rows]
    group = scheme.group_size or depth
    if group % 16 or (group < depth and depth % group):
        return None
    zeros = None if matrix.zeros is None else matrix.zeros.to(device).float()
    if scheme.element == "int" and scheme.bits <= 8:
        bits = 4 if scheme.bits <= 4 else 8
        bias = 8 if bits == 4 else 128
        middle = 2 ** (scheme.bits - 1)
        if zeros is None and middle != bias:
            codes = codes + (bias - middle)
        elif zeros is not None:
            if scheme.block_rows != 1:
                zeros = zeros.repeat_interleave(scheme.block_rows or rows, 0)[:rows]
            zeros = zeros - bias
        return pack_groups((codes.to(torch.int16) - bias).to(torch.int8), scales, zeros, bits)
    if scheme.element == "e2m1":
        doubled = torch.tensor(ref_ggml_grids.FP4_DOUBLED, dtype=torch.int8, device=device)
        return pack_groups(doubled[codes.long()], scales / 2, None, 8)
    return None


def from_ggml(type_name: str, blocks: Tensor, depth: int) -> GroupedWeight:
    """Any ggml block type, exactly up to the float16 of scales: 4-bit ones as nibbles, all others as int8."""
    pieces = [
        _GGML[type_name](blocks[begin : begin + ROWS_AT_ONCE].reshape(-1, TYPES[type_name].block_bytes))
        for begin in range(0, blocks.shape[0], ROWS_AT_ONCE)
    ]
    rows = blocks.shape[0]
    codes = torch.cat([piece[0].reshape(-1, depth) for piece in pieces])
    scales = torch.cat([piece[1] for piece in pieces]).reshape(rows, -1)
    found = [piece[2] for piece in pieces if piece[2] is not None]
    minima = torch.cat(found).reshape(rows, -1) if found else None
    bits = 4 if type_name in _NIBBLES else 8
    if minima is None:
        return pack_groups(codes, scales, None, bits)
    return pack_groups(*_affine(codes, scales, minima), bits)


def _affine(codes: Tensor, scales: Tensor, minima: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """scale * code + minimum -> scale * (code - zero). A group with scale 0 is its minimum: code 1, zero 0; so is one
    whose zero would not fit float16, where the codes are less than the rounding of the zero."""
    flat = minima.abs() >= _LARGEST_ZERO * scales.abs()
    group = codes.shape[1] // scales.shape[1]
    codes = torch.where(flat.repeat_interleave(group, 1), torch.ones_like(codes), codes)
    zeros = torch.where(flat, torch.zeros_like(minima), -minima / torch.where(flat, torch.ones_like(scales), scales))
    return codes, torch.where(flat, minima, scales), zeros


Pieces = tuple[Tensor, Tensor, Tensor | None]  # int8 [B, block], float32 [B, groups], minima like the scales


def _shifted(fields: Tensor, by: int) -> Tensor:
    return fields.view(torch.int8) - by


def _q4_0(b: Tensor) -> Pieces:
    return _shifted(ref_ggml._fields(b[:, 2:], 16, 4), 8), ref_ggml._half(b[:, :2]), None


def _q4_1(b: Tensor) -> Pieces:
    scale = ref_ggml._half(b[:, :2])
    return _shifted(ref_ggml._fields(b[:, 4:], 16, 4), 8), scale, ref_ggml._half(b[:, 2:4]) + 8 * scale


def _q5_0(b: Tensor) -> Pieces:
    quants = ref_ggml._fields(b[:, 6:], 16, 4) | (ref_ggml._single_bits(b[:, 2:6]) << 4)
    return _shifted(quants, 16), ref_ggml._half(b[:, :2]), None


def _q5_1(b: Tensor) -> Pieces:
    quants = ref_ggml._fields(b[:, 8:], 16, 4) | (ref_ggml._single_bits(b[:, 4:8]) << 4)
    scale = ref_ggml._half(b[:, :2])
    return _shifted(quants, 16), scale, ref_ggml._half(b[:, 2:4]) + 16 * scale


def _q8_0(b: Tensor) -> Pieces:
    return b[:, 2:].contiguous().view(torch.int8), ref_ggml._half(b[:, :2]), None


def _q2_k(b: Tensor) -> Pieces:
    scale = ref_ggml._half(b[:, 80:82]) * (b[:, :16] & 15)
    minimum = -ref_ggml._half(b[:, 82:84]) * (b[:, :16] >> 4)
    return _shifted(ref_ggml._fields(b[:, 16:80], 32, 2), 0), scale, minimum


def _q3_k(b: Tensor) -> Pieces:
    packed = b[:, 96:108]
    scales = ref_ggml._fields(packed[:, :8], 8, 4) | (ref_ggml._fields(packed[:, 8:], 4, 2) << 4)
    quants = ref_ggml._fields(b[:, 32:96], 32, 2) | (ref_ggml._fields(b[:, :32], 32, 1) << 2)
    return _shifted(quants, 4), ref_ggml._half(b[:, 108:110]) * _shifted(scales, 32), None


def _k_affine(b: Tensor, quants: Tensor, middle: int) -> Pieces:
    scales, minima = ref_ggml._k_scales(b[:, 4:16])
    scale = ref_ggml._half(b[:, 0:2]) * scales
    return _shifted(quants, middle), scale, middle * scale - ref_ggml._half(b[:, 2:4]) * minima


def _q4_k(b: Tensor) -> Pieces:
    return _k_affine(b, ref_ggml._fields(b[:, 16:], 32, 4), 8)


def _q5_k(b: Tensor) -> Pieces:
    return _k_affine(b, ref_ggml._fields(b[:, 48:], 32, 4) | (ref_ggml._fields(b[:, 16:48], 32, 1) << 4), 16)


def _q6_k(b: Tensor) -> Pieces:
    quants = ref_ggml._fields(b[:, :128], 64, 4) | (ref_ggml._fields(b[:, 128:192], 32, 2) << 4)
    return _shifted(quants, 32), ref_ggml._half(b[:, 208:210]) * b[:, 192:208].contiguous().view(torch.int8), None


def _levels(table: tuple[int, ...], index: Tensor) -> Tensor:
    return torch.tensor(table, dtype=torch.int8, device=index.device)[index.long()]


def _iq4_nl(b: Tensor) -> Pieces:
    return _levels(ref_ggml.IQ4_LEVELS, ref_ggml._fields(b[:, 2:], 16, 4)), ref_ggml._half(b[:, :2]), None


def _iq4_xs(b: Tensor) -> Pieces:
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=b.device)
    high = ((b[:, 2:4].unsqueeze(-1) >> shifts) & 3).flatten(1)
    scale = ref_ggml._half(b[:, :2]) * _shifted(ref_ggml._fields(b[:, 4:8], 1, 4) | (high << 4), 32)
    return _levels(ref_ggml.IQ4_LEVELS, ref_ggml._fields(b[:, 8:], 16, 4)), scale, None


def _mxfp4(b: Tensor) -> Pieces:
    scale = torch.exp2(b[:, :1].float() - 128)
    return _levels(ref_ggml_grids.FP4_DOUBLED, ref_ggml._fields(b[:, 1:], 16, 4)), scale, None


def _whole_values(parts: Callable[[Tensor], ref_ggml_grids.Parts]) -> Callable[[Tensor], Pieces]:
    """Types whose values are whole numbers below 128: points of grids, three levels, NVFP4."""
    return lambda blocks: (*parts(blocks), None)


# Three levels are nibbles, too: 4 bits of memory for each weight instead of 8.
_NIBBLES = {"Q4_0", "Q4_1", "Q4_K", "Q2_K", "Q3_K", "TQ1_0", "TQ2_0"}
_GGML: dict[str, Callable[[Tensor], Pieces]] = {
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
} | {name: _whole_values(parts) for name, parts in ref_ggml_grids.PARTS.items()}
