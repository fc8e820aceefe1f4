"""Blocks of 256 below 4 bits: points of a grid (IQ2, IQ3) and three levels (TQ1_0, TQ2_0). Plain torch; the spec.

`x` and `importance` are [B, 256]; bytes come out. The search is in grid_search.py; here are the three levels and the
bits. Called by blocks.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tokenmill.quantize.ggml.grid_search import BLOCK, GridCodes, GridType, fit_grid, halved_sum, weigh
from tokenmill.quantize.ggml.packing import half_bytes, pack_fields, pack_single_bits
from tokenmill.quantize.ggml.search import SMALLEST, ordered_sum

_IQ2_XXS = GridType("IQ2_XXS", 32, 0.125, is_even=True)
_IQ2_XS = GridType("IQ2_XS", 16, 0.125, is_even=True)
_IQ2_S = GridType("IQ2_S", 16, 0.125, is_even=False)
_IQ3_XXS = GridType("IQ3_XXS", 32, 0.25, is_even=True)
_IQ3_S = GridType("IQ3_S", 32, 1.0, is_even=False)
_THRESHOLD, _THRESHOLD_STEP, _THRESHOLDS = 0.5, 0.02, 21  # of the largest weight


def iq2_xxs(x: Tensor, importance: Tensor | None) -> Tensor:
    found = _fit(_IQ2_XXS, x, importance)
    words = torch.stack([_joined(found.points.view(-1, 8, 4), 8), _signs_and_scale(found)], 2)
    return torch.cat([half_bytes(found.d), _bytes(words.flatten(1), 4)], 1)


def iq2_xs(x: Tensor, importance: Tensor | None) -> Tensor:
    found = _fit(_IQ2_XS, x, importance)
    words = found.points | _seven_signs(found) << 9
    return torch.cat([half_bytes(found.d), _bytes(words, 2), _nibbles(found.scales)], 1)


def iq2_s(x: Tensor, importance: Tensor | None) -> Tensor:
    found = _fit(_IQ2_S, x, importance)
    parts = [_bytes(found.points & 255, 1), _sign_bytes(found), _bytes(_joined(_by(found.points >> 8, 4), 2), 1)]
    return torch.cat([half_bytes(found.d), *parts, _nibbles(found.scales)], 1)


def iq3_xxs(x: Tensor, importance: Tensor | None) -> Tensor:
    found = _fit(_IQ3_XXS, x, importance)
    return torch.cat([half_bytes(found.d), _bytes(found.points, 1), _bytes(_signs_and_scale(found), 4)], 1)


def iq3_s(x: Tensor, importance: Tensor | None) -> Tensor:
    found = _fit(_IQ3_S, x, importance)
    parts = [_bytes(found.points & 255, 1), _bytes(_joined(_by(found.points >> 8, 8), 1), 1), _sign_bytes(found)]
    return torch.cat([half_bytes(found.d), *parts, _nibbles(found.scales)], 1)


def tq1_0(x: Tensor, importance: Tensor | None) -> Tensor:
    d, codes = _three_levels(x, importance)
    parts, codes = [], codes.long()
    for begin, run, count in ((0, 32, 5), (160, 16, 5), (240, 4, 4)):
        powers = 3 ** torch.arange(4, 4 - count, -1).view(-1, 1)
        number = (codes[:, begin : begin + run * count].view(-1, count, run) * powers).sum(1)
        parts.append(((number * 256 + 242) // 243).to(torch.uint8))  # so that times 3 brings a digit to the top
    return torch.cat([*parts, half_bytes(d)], 1)


def tq2_0(x: Tensor, importance: Tensor | None) -> Tensor:
    d, codes = _three_levels(x, importance)
    return torch.cat([pack_fields(codes, 32, 2), half_bytes(d)], 1)


def _three_levels(x: Tensor, importance: Tensor | None) -> tuple[Tensor, Tensor]:
    """(d [B], codes 0, 1, 2 [B, 256]): the threshold of least error. Weights of three levels already are kept."""
    weights, sizes = weigh(x, importance), x.abs()
    largest = sizes.amax(1)
    best, d, threshold = torch.zeros_like(largest), torch.zeros_like(largest), torch.zeros_like(largest)
    for number in range(_THRESHOLDS):
        limit = largest * float(_THRESHOLD - _THRESHOLD_STEP * number)
        kept = torch.where(sizes > limit.unsqueeze(1), weights, 0.0)
        along, square = (_block_sum(each) for each in (kept * sizes, kept))
        gain = torch.where(square > 0, along * along / square, 0.0)
        better = gain > best
        best, threshold = torch.where(better, gain, best), torch.where(better, limit, threshold)
        d = torch.where(better, along / square, d)
    d = torch.where(largest < SMALLEST, 0.0, d)
    kept = (sizes > threshold.unsqueeze(1)) & (d > 0).unsqueeze(1)
    return d, torch.where(kept, torch.where(x < 0, 0, 2), 1).to(torch.uint8)


def _block_sum(values: Tensor) -> Tensor:
    return ordered_sum(halved_sum(values.view(-1, BLOCK // 8, 8)).t())


def _fit(kind: GridType, x: Tensor, importance: Tensor | None) -> GridCodes:
    return fit_grid(kind, x, weigh(x, importance))


def _sign_bytes(found: GridCodes) -> Tensor:
    return pack_single_bits(found.negative.to(torch.uint8))


def _seven_signs(found: GridCodes) -> Tensor:
    return _sign_bytes(found).long() & 127


def _signs_and_scale(found: GridCodes) -> Tensor:
    """Words of 32: four times seven signs, and the scale. [B, 8]"""
    return _joined(_seven_signs(found).view(-1, 8, 4), 7) | found.scales << 28


def _by(values: Tensor, count: int) -> Tensor:
    return values.view(values.shape[0], -1, count)


def _joined(fields: Tensor, bits: int) -> Tensor:
    """[..., n] fields -> [...] words, the first field lowest."""
    return (fields << bits * torch.arange(fields.shape[-1])).sum(-1)


def _bytes(words: Tensor, size: int) -> Tensor:
    """int64 [B, n] -> uint8 [B, n * size], little-endian."""
    return ((words.unsqueeze(-1) >> 8 * torch.arange(size)) & 255).flatten(1).to(torch.uint8)


def _nibbles(codes: Tensor) -> Tensor:
    return _bytes(_joined(_by(codes, 2), 4), 1)
