"""How a group of weights gets its scale: small searches that minimise a weighted error. Plain torch; this is the spec.

The searches are those of llama.cpp's quantizers: try a range of scales around the obvious one, solve each for the best
real scale (and minimum) given its codes, keep the best. Tensors are [elements, groups]; sums run over the elements in
order, in float32, so that the C++ twin (csrc/cpu/quantize_search.h) gives the same bits. Called by the type files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

SMALLEST = 1e-15  # a group whose largest value is below this is all zero
_REFINEMENTS = 5


@dataclass(frozen=True, slots=True)
class AffineGrid:
    """Candidates of `fit_affine`: the range is cut into `levels + first + step * k` parts, k = 0 .. steps."""

    first: float
    step: float
    steps: int


def ordered_sum(values: Tensor) -> Tensor:
    """[n, ...] -> [...]: one addition after another, the order that every implementation can keep."""
    total = values[0]
    for value in values[1:]:
        total = total + value
    return total


def signed_extreme(x: Tensor) -> Tensor:
    """[n, G] -> [G]: the first value of the largest magnitude, with its sign."""
    extreme = torch.zeros_like(x[0])
    for value in x:
        extreme = torch.where(value.abs() > extreme.abs(), value, extreme)
    return extreme


def fit_affine(x: Tensor, weights: Tensor, levels: int, grid: AffineGrid) -> tuple[Tensor, Tensor]:
    """(scale, minimum) [G], both >= 0, for x ~ scale * code - minimum with codes 0 .. levels."""
    low, high = x.amin(0).clamp(max=0), x.amax(0)
    is_flat = high <= low
    sum_w, sum_x = ordered_sum(weights), ordered_sum(weights * x)

    def error(scale: Tensor, offset: Tensor, codes: Tensor) -> Tensor:
        difference = scale * codes + offset - x
        return ordered_sum(weights * (difference * difference))

    inverse = _divide(float(levels), high - low)
    best_scale, best_low = inverse.reciprocal(), low
    best_error = error(best_scale, low, _codes_from_zero(inverse * (x - low), levels))
    for k in range(grid.steps + 1):
        # The offset found so far also moves the next candidates: the grid follows the fit.
        inverse = _divide(grid.first + grid.step * k + levels, high - best_low)
        codes = _codes_from_zero(inverse * (x - best_low), levels)
        weighted = weights * codes
        sum_l, sum_l2, sum_xl = ordered_sum(weighted), ordered_sum(weighted * codes), ordered_sum(weighted * x)
        determinant = sum_w * sum_l2 - sum_l * sum_l
        scale = (sum_w * sum_xl - sum_x * sum_l) / determinant
        offset = (sum_l2 * sum_x - sum_l * sum_xl) / determinant
        scale = torch.where(offset > 0, sum_xl / sum_l2, scale)
        offset = torch.where(offset > 0, 0.0, offset)
        candidate_error = error(scale, offset, codes)
        better = (determinant > 0) & (candidate_error < best_error)
        best_error = torch.where(better, candidate_error, best_error)
        best_scale = torch.where(better, scale, best_scale)
        best_low = torch.where(better, offset, best_low)
    return torch.where(is_flat, 0.0, best_scale), torch.where(is_flat, 0.0 - low, 0.0 - best_low)


def fit_symmetric(x: Tensor, weights: Tensor, levels: int) -> Tensor:
    """Scale [G], of either sign, for x ~ scale * code with codes -levels .. levels - 1."""
    extreme = signed_extreme(x)
    weighted = weights * x

    def sums(width: float) -> tuple[Tensor, Tensor]:
        codes = (_divide(-width, extreme) * x).round().clamp(-levels, levels - 1)
        return ordered_sum(weighted * codes), ordered_sum(weights * codes * codes)

    sum_lx, sum_l2 = sums(levels)
    scale = torch.where(sum_l2 > 0, sum_lx / sum_l2, 0.0)
    best = scale * sum_lx
    for k in (*range(-9, 0), *range(1, 10)):
        sum_lx, sum_l2 = sums(levels + 0.1 * k)
        better = (sum_l2 > 0) & (sum_lx * sum_lx > best * sum_l2)
        scale = torch.where(better, sum_lx / sum_l2, scale)
        best = torch.where(better, scale * sum_lx, best)
    return torch.where(extreme.abs() < SMALLEST, 0.0, scale)


def fit_refined(x: Tensor, levels: int) -> Tensor:
    """As `fit_symmetric` with weights x * x, but improving one code at a time instead of trying scales."""
    extreme = signed_extreme(x)
    weights = x * x
    weighted = weights * x
    codes = list((_divide(-float(levels), extreme) * x).round().clamp(-levels, levels - 1))
    sum_lx = ordered_sum(torch.stack([w * code for w, code in zip(weighted, codes, strict=True)]))
    sum_l2 = ordered_sum(torch.stack([w * code * code for w, code in zip(weights, codes, strict=True)]))
    sum_lx, sum_l2 = _refine(x, weights, weighted, codes, sum_lx, sum_l2, (-levels, levels - 1))
    scale = torch.where(sum_l2 > 0, sum_lx / sum_l2, 0.0)
    return torch.where(extreme.abs() < SMALLEST, 0.0, scale)


def fit_positive(x: Tensor, weights: Tensor, levels: int) -> tuple[Tensor, Tensor]:
    """(scale [G], codes [n, G]) for x ~ scale * code, x >= 0, codes 0 .. levels: how scales themselves are stored."""
    highest = x.amax(0).clamp(min=0)
    best_inverse = _divide(float(levels), highest)

    def error(inverse: Tensor) -> Tensor:
        difference = x - inverse.reciprocal() * _codes_from_zero(inverse * x, levels)
        return ordered_sum(weights * difference * difference)

    best_error = error(best_inverse)
    for k in (*range(-4, 0), *range(1, 5)):
        inverse = _divide(levels + 0.1 * k, highest)
        candidate_error = error(inverse)
        better = candidate_error < best_error
        best_error = torch.where(better, candidate_error, best_error)
        best_inverse = torch.where(better, inverse, best_inverse)
    codes = list(_codes_from_zero(best_inverse * x, levels))
    weighted = weights * x
    sum_lx = ordered_sum(torch.stack([w * code for w, code in zip(weighted, codes, strict=True)]))
    sum_l2 = ordered_sum(torch.stack([w * code * code for w, code in zip(weights, codes, strict=True)]))
    sum_lx, sum_l2 = _refine(x, weights, weighted, codes, sum_lx, sum_l2, (0, levels))
    is_zero = highest < SMALLEST
    scale = torch.where(is_zero | (sum_l2 <= 0), 0.0, sum_lx / sum_l2)
    return scale, torch.where(is_zero, 0.0, torch.stack(codes))


def fit_levels(x: Tensor, weights: Tensor, levels: Sequence[int], tries: int) -> Tensor:
    """Scale [G], of either sign, for x ~ scale * levels[code]; `levels` ascend and the first is the largest."""
    extreme = signed_extreme(x)
    table = torch.tensor(levels, dtype=torch.float32)

    def sums(inverse: Tensor) -> tuple[Tensor, Tensor]:
        values = table[nearest_level(inverse * x, levels)]
        weighted = weights * values
        return ordered_sum(weighted * x), ordered_sum(weighted * values)

    sum_qx, sum_q2 = sums((extreme / -float(levels[0])).reciprocal())
    scale = torch.where(sum_q2 > 0, sum_qx / sum_q2, 0.0)
    best = scale * sum_qx
    for shift in range(-tries, tries + 1):
        sum_qx, sum_q2 = sums(_divide(float(shift + levels[0]), extreme))
        better = (sum_q2 > 0) & (sum_qx * sum_qx > best * sum_q2)
        scale = torch.where(better, sum_qx / sum_q2, scale)
        best = torch.where(better, scale * sum_qx, best)
    return torch.where(extreme.abs() < SMALLEST, 0.0, scale)


def nearest_level(x: Tensor, levels: Sequence[int]) -> Tensor:
    """Index of the level nearest to x; halfway goes up. NaN (a zero group) goes to the last and is not used."""
    doubled_middles = torch.tensor([a + b for a, b in pairwise(levels)], dtype=torch.float32)
    return torch.bucketize(x + x, doubled_middles, right=True)


def _refine(
    x: Tensor,
    weights: Tensor,
    weighted: Tensor,
    codes: list[Tensor],
    sum_lx: Tensor,
    sum_l2: Tensor,
    bounds: tuple[int, int],
) -> tuple[Tensor, Tensor]:
    """Move single codes (in place) while that raises (sum of x l)^2 / (sum of l^2); returns the two sums."""
    for _ in range(_REFINEMENTS):
        for i, code in enumerate(codes):
            rest_lx, rest_l2 = sum_lx - weighted[i] * code, sum_l2 - weights[i] * code * code
            moved = (x[i] * rest_l2 / rest_lx).round().clamp(*bounds)
            new_lx, new_l2 = rest_lx + weighted[i] * moved, rest_l2 + weights[i] * moved * moved
            better = (rest_lx > 0) & (rest_l2 > 0) & (moved != code) & (new_l2 > 0)
            better &= new_lx * new_lx * sum_l2 > sum_lx * sum_lx * new_l2
            codes[i] = torch.where(better, moved, code)
            sum_lx, sum_l2 = torch.where(better, new_lx, sum_lx), torch.where(better, new_l2, sum_l2)
    return sum_lx, sum_l2


def _divide(number: float, by: Tensor) -> Tensor:
    """number / by, rounded once (`number / tensor` would be a product with the reciprocal)."""
    return torch.full_like(by, number) / by


def _codes_from_zero(x: Tensor, levels: int) -> Tensor:
    """Rounded and cut to 0 .. levels; NaN (a constant group) becomes 0."""
    return torch.where(x > 0, x.clamp(max=levels).round(), 0.0)
