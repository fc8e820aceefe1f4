"""Blocks of 32 with one scale: Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, IQ4_NL. Plain torch; the spec of the C++ twin.

Without importance the first five round to the range of each block, as llama.cpp does (byte for byte); with it, and
always for IQ4_NL, the scale is searched. Takes rows as blocks, gives bytes. Called by blocks.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tokenmill.kernels.ref_ggml import IQ4_LEVELS
from tokenmill.quantize.ggml.packing import half_bytes, pack_fields, pack_single_bits, round_to_half
from tokenmill.quantize.ggml.search import (
    AffineGrid,
    fit_affine,
    fit_levels,
    fit_symmetric,
    nearest_level,
    ordered_sum,
    signed_extreme,
)

BLOCK = 32
LEVEL_TRIES = 7
WEIGHTED_GRID = AffineGrid(-0.9, 0.05, 36)


def row_weights(x: Tensor, importance: Tensor, blocks_per_row: int) -> Tensor:
    """importance * sqrt(mean square of the row + x^2): large weights count more, zero ones still count. [32, B]"""
    squares = x * x
    totals = ordered_sum(squares).view(-1, blocks_per_row).double().sum(1)
    mean = (totals / (blocks_per_row * BLOCK)).float().repeat_interleave(blocks_per_row)
    return importance * (mean + squares).sqrt()


def block_weights(x: Tensor, importance: Tensor, _blocks_per_row: int) -> Tensor:
    """As `row_weights`, against twice the mean square of the block alone."""
    squares = x * x
    return importance * (2.0 * ordered_sum(squares) / float(BLOCK) + squares).sqrt()


def q4_0(x: Tensor, weights: Tensor | None) -> Tensor:
    scale, codes = _symmetric(x, weights, 8)
    return torch.cat([half_bytes(scale), pack_fields(codes, 16, 4)], dim=1)


def q4_1(x: Tensor, weights: Tensor | None) -> Tensor:
    scale, low, codes = _affine(x, weights, 15)
    return torch.cat([half_bytes(scale), half_bytes(low), pack_fields(codes, 16, 4)], dim=1)


def q5_0(x: Tensor, weights: Tensor | None) -> Tensor:
    scale, codes = _symmetric(x, weights, 16)
    return torch.cat([half_bytes(scale), pack_single_bits(codes >> 4), pack_fields(codes & 15, 16, 4)], dim=1)


def q5_1(x: Tensor, weights: Tensor | None) -> Tensor:
    scale, low, codes = _affine(x, weights, 31)
    parts = [half_bytes(scale), half_bytes(low), pack_single_bits(codes >> 4), pack_fields(codes & 15, 16, 4)]
    return torch.cat(parts, dim=1)


def q8_0(x: Tensor, _weights: Tensor | None) -> Tensor:
    scale = x.abs().amax(0) / 127.0
    scaled = x * torch.where(scale > 0, scale.reciprocal(), 0.0)
    floor = scaled.abs().floor()
    codes = (floor + (scaled.abs() - floor >= 0.5)) * scaled.sign()  # halves away from zero
    return torch.cat([half_bytes(scale), codes.t().to(torch.int8).view(torch.uint8)], dim=1)


def iq4_nl(x: Tensor, weights: Tensor | None) -> Tensor:
    scale = fit_levels(x, x * x if weights is None else weights, IQ4_LEVELS, LEVEL_TRIES)
    stored = round_to_half(scale)
    inverse = torch.where(stored != 0, stored.reciprocal(), 0.0)
    codes = nearest_level(inverse * x, IQ4_LEVELS).to(torch.uint8).t()
    return torch.cat([half_bytes(scale), pack_fields(codes, 16, 4)], dim=1)


def _symmetric(x: Tensor, weights: Tensor | None, levels: int) -> tuple[Tensor, Tensor]:
    """(scale [B], codes [B, 32] with offset `levels`)."""
    if weights is None:
        scale = signed_extreme(x) / -float(levels)
        inverse = torch.where(scale != 0, scale.reciprocal(), 0.0)
        codes = (x * inverse + (levels + 0.5)).trunc().clamp(0, 2 * levels - 1)
    else:
        scale = fit_symmetric(x, weights, levels)
        stored = round_to_half(scale)
        codes = (x * torch.where(stored != 0, stored.reciprocal(), 0.0)).round().clamp(-levels, levels - 1) + levels
    return scale, codes.t().to(torch.uint8)


def _affine(x: Tensor, weights: Tensor | None, levels: int) -> tuple[Tensor, Tensor, Tensor]:
    """(scale [B], offset [B], codes [B, 32])."""
    if weights is None:
        low = x.amin(0)
        scale = (x.amax(0) - low) / float(levels)
        inverse = torch.where(scale != 0, scale.reciprocal(), 0.0)
        codes = ((x - low) * inverse + 0.5).trunc().clamp(0, levels)
    else:
        scale, minimum = fit_affine(x, weights, levels, WEIGHTED_GRID)
        low = -minimum
        stored = round_to_half(scale)
        inverse = torch.where(stored != 0, stored.reciprocal(), 0.0)
        codes = ((x - round_to_half(low)) * inverse).round().clamp(0, levels)
    return scale, low, codes.t().to(torch.uint8)
