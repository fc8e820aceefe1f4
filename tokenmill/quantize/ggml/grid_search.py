"""Weights as points of a grid: which points, and which scales, of least weighted error. Plain torch; this is the spec.

For each group a range of scales is tried. At each, every eight (or four) weights go to the best of the points near
their rounded levels, and the best real scale of those points is solved for. Then the scales of a block are rounded to
odd multiples of one float16, by how much each of them matters, and the points are chosen again under the scales as
stored. Sums of a point go by halves, all others in order, so that csrc/cpu/quantize_grids.cpp gives the same bits.
Called by grid_blocks.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import torch
from torch import Tensor

from tokenmill.kernels.ggml_grids import grid
from tokenmill.quantize.ggml.packing import round_to_half
from tokenmill.quantize.ggml.search import SMALLEST, ordered_sum

BLOCK = 256
NEIGHBOURS = 12
_FIRST, _STEP, _TRIES = 0.76, 0.04, 13  # of the scale that puts the largest weight on the largest level
_SCALE_FIRST, _SCALE_TRIES = 25, 11  # the largest scale of a block is at most 31 of its unit
_LARGEST_CODE = 15


@dataclass(frozen=True, slots=True)
class GridType:
    name: str
    group: int  # weights that share a scale
    unit: float  # of a scale: the stored float16 times an odd number times this
    is_even: bool  # seven sign bits for eight weights: the number of minus signs is even

    @property
    def levels(self) -> tuple[int, ...]:
        return tuple(sorted(set(grid(self.name).flatten().tolist())))

    @property
    def length(self) -> int:
        return grid(self.name).shape[1]


@dataclass(frozen=True, slots=True, eq=False)
class GridCodes:
    d: Tensor  # float32 [B]: what the file stores
    scales: Tensor  # int64 [B, groups], 0 .. 15
    points: Tensor  # int64 [B, 256 / length]
    negative: Tensor  # bool [B, 256]


@cache
def neighbours(name: str) -> Tensor:
    """For every vector of levels, in the order of its digits: the nearest points of the grid. int64 [levels^length, 12]

    A vector that is itself a point has no better neighbour, whatever the weights: it fills its row."""
    points = grid(name).long()
    levels = torch.tensor(sorted(set(points.flatten().tolist())))
    count, length = len(levels), points.shape[1]
    digits = torch.arange(count**length).unsqueeze(1) // count ** torch.arange(length) % count
    values = levels[digits]
    distance = values.square().sum(1, keepdim=True) - 2 * values @ points.t() + points.square().sum(1)
    # Ties go to the first point.
    order = (distance * points.shape[0] + torch.arange(points.shape[0])).topk(NEIGHBOURS, 1, largest=False)[0]
    nearest = order % points.shape[0]
    return torch.where(order[:, :1] < points.shape[0], nearest[:, :1], nearest)


def halved_sum(values: Tensor) -> Tensor:
    """[..., 8 or 4] -> [...]: the two halves of eight, then pairs of neighbours."""
    if values.shape[-1] == 8:
        values = values[..., :4] + values[..., 4:]
    return (values[..., 0] + values[..., 1]) + (values[..., 2] + values[..., 3])


def weigh(x: Tensor, importance: Tensor | None) -> Tensor:
    """importance * sqrt(2 * mean square of the block + x^2) [B, 256]: large weights count more, zero ones still do."""
    squares = x * x
    total = ordered_sum(ordered_sum(squares.view(-1, 8, 32).permute(2, 1, 0)))
    root = ((total * (2.0 / BLOCK)).unsqueeze(1) + squares).sqrt()
    return root if importance is None else importance * root


def fit_grid(kind: GridType, x: Tensor, weights: Tensor) -> GridCodes:
    """`x` and `weights`: float32 [B, 256]."""
    blocks, groups = x.shape[0], BLOCK // kind.group
    sizes, negative = _signs(kind, x, weights)
    shape = (blocks, groups, kind.group // kind.length, kind.length)
    t, w = sizes.view(shape), weights.view(shape)
    scale, curvature = _group_scales(kind, t, w)
    largest = scale.amax(1)
    d, codes = _block_scale(scale, curvature, largest, kind.unit)
    stored = (d * kind.unit).unsqueeze(1) * (2 * codes + 1)
    inverse = torch.where(stored > 0, stored.reciprocal(), 0.0)
    points = _nearest(kind, t * inverse.view(blocks, groups, 1, 1), w)
    d = _refit(kind, t, w, points, codes, d)
    is_zero = largest < SMALLEST
    d = torch.where(is_zero, 0.0, d)
    codes, points = codes.long(), points.reshape(blocks, -1)
    codes[is_zero], points[is_zero], negative[is_zero] = 0, 0, False
    return GridCodes(d, codes, points, negative)


def _signs(kind: GridType, x: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """(sizes, where negative). With an even number of minus signs, the weight that matters least gets the wrong one:
    its size is then negative."""
    negative, sizes = x < 0, x.abs()
    if not kind.is_even:
        return sizes, negative
    odd = negative.view(-1, 8).sum(1) % 2 == 1
    least = (weights * (x * x)).view(-1, 8).argmin(1)  # the first one of several
    flip = torch.zeros(odd.numel(), 8, dtype=torch.bool)
    flip[odd, least[odd]] = True
    flip = flip.view(x.shape)
    return torch.where(flip, -sizes, sizes), negative ^ flip


def _nearest(kind: GridType, u: Tensor, w: Tensor) -> Tensor:
    """The point of least weighted error for each [..., length] in units of the grid. int64 [...]"""
    levels = kind.levels
    code = torch.zeros(u.shape, dtype=torch.int64)
    for low, high in pairwise(levels):
        code += u > (low + high) / 2
    key = (code * len(levels) ** torch.arange(kind.length)).sum(-1)
    found = neighbours(kind.name)[key]
    points = grid(kind.name).float()
    best, chosen = torch.full(key.shape, torch.inf), found[..., 0]
    for number in range(NEIGHBOURS):
        difference = u - points[found[..., number]]
        cost = halved_sum(w * (difference * difference))
        better = cost < best
        best, chosen = torch.where(better, cost, best), torch.where(better, found[..., number], chosen)
    return chosen


def _projections(kind: GridType, t: Tensor, w: Tensor, points: Tensor) -> tuple[Tensor, Tensor]:
    """Of each group: the sums of weight x size x point and of weight x point^2. [B, groups]"""
    values = grid(kind.name).float()[points]
    weighted = w * values
    return (
        ordered_sum(halved_sum(weighted * t).movedim(-1, 0)),
        ordered_sum(halved_sum(weighted * values).movedim(-1, 0)),
    )


def _group_scales(kind: GridType, t: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """(the best real scale of each group, what an error of it costs), both [B, groups]."""
    largest = t.amax((-1, -2))
    usable = largest >= SMALLEST
    best, scale, curvature = (torch.zeros_like(largest) for _ in range(3))
    for number in range(_TRIES):
        wanted = float(kind.levels[-1] * (_FIRST + _STEP * number))  # the level of the largest weight
        inverse = torch.where(usable, largest.reciprocal() * wanted, 0.0)
        points = _nearest(kind, t * inverse.unsqueeze(-1).unsqueeze(-1), w)
        along, square = _projections(kind, t, w, points)
        gain = torch.where(usable & (along > 0), along * along / square, 0.0)
        better = gain > best
        best = torch.where(better, gain, best)
        scale, curvature = torch.where(better, along / square, scale), torch.where(better, square, curvature)
    return scale, curvature


def _block_scale(scale: Tensor, curvature: Tensor, largest: Tensor, unit: float) -> tuple[Tensor, Tensor]:
    """(d as stored [B], codes [B, groups]): scales become d * unit * (2 * code + 1)."""
    best, chosen = torch.full(largest.shape, torch.inf), torch.zeros_like(largest)

    def codes_of(d: Tensor) -> Tensor:
        ratio = torch.where(d.unsqueeze(1) > 0, scale / d.unsqueeze(1), 0.0)
        return ((ratio - 1) * 0.5).clamp(0, _LARGEST_CODE).round()

    for number in range(_SCALE_TRIES):
        d = largest / float(_SCALE_FIRST + number)
        difference = scale - d.unsqueeze(1) * (2 * codes_of(d) + 1)
        error = ordered_sum((curvature * (difference * difference)).t())
        better = error < best
        best, chosen = torch.where(better, error, best), torch.where(better, d, chosen)
    stored = round_to_half(chosen / unit)
    return stored, codes_of(stored * unit)


def _refit(kind: GridType, t: Tensor, w: Tensor, points: Tensor, codes: Tensor, d: Tensor) -> Tensor:
    """The block's scale of least error for the points as chosen, as float32 [B]."""
    along, square = _projections(kind, t, w, points)
    odd = 2 * codes + 1
    along, square = ordered_sum((odd * along).t()), ordered_sum((odd * odd * square).t())
    return torch.where(along > 0, along / square / kind.unit, d)
