"""Round to nearest: integer codes on a min-max grid per group, as compressed-tensors computes it, or on the grid of
least error. Data-free, and the last step of AWQ and SmoothQuant, whose transforms come before it.

Other integer methods build on `choose_grid` and `round_on_grid`. Scales are float16 values from the start, so that
writing the file changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tokenmill.errors import UserError
from tokenmill.model.formats.quantized import QuantizedMatrix, Scheme
from tokenmill.quantize.base import BlockView, Solver

SMALLEST_SCALE = 2.0**-24  # the smallest float16
_LEAST_SHRINK, _SHRINK_STEP = 0.4, 0.02


def check_integer_scheme(step: str, name: str, shape: tuple[int, int], scheme: Scheme) -> None:
    """Refuse what integer solvers cannot fill: they need int elements, one row per scale, whole groups."""
    if scheme.element != "int" or scheme.block_rows != 1:
        raise UserError(
            f"{step} rounds to integers, not to {scheme.element}", "use the method of that number type, such as fp8"
        )
    if not 2 <= scheme.bits <= 8:
        raise UserError(f"{step} cannot make {scheme.bits}-bit integers", "give --bits from 2 to 8")
    if scheme.group_size and shape[1] % scheme.group_size:
        good = [size for size in (256, 128, 96, 64, 48, 32, 16, 8) if shape[1] % size == 0]
        raise UserError(
            f"{name} has {shape[1]} inputs, not a multiple of the group size {scheme.group_size}",
            f"use --group-size {good[0]}" if good else "use --group-size 0: one scale per row",
        )


def choose_grid(
    weight: Tensor,
    scheme: Scheme,
    norm: float = 0.0,
    importance: Tensor | None = None,
    full_range: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """(scales, zeros) [out, groups] for `weight` [out, in]; zeros is None for a symmetric scheme.

    `norm` > 0 searches the shrunken range with the least sum of |error|^norm, weighted by `importance` [in];
    `full_range`: see range_grid.
    """
    groups = _grouped(weight, scheme.group_size)
    low = groups.amin(-1).clamp(max=0.0)
    high = groups.amax(-1).clamp(min=0.0)
    scales, zeros = range_grid(low, high, scheme, full_range)
    if not norm:
        return scales, zeros
    weights = None if importance is None else _grouped(importance.unsqueeze(0), scheme.group_size)
    best = _grid_error(groups, scales, zeros, scheme, norm, weights)
    steps = round((1.0 - _LEAST_SHRINK) / _SHRINK_STEP)
    for step in range(1, steps + 1):
        shrink = 1.0 - step * _SHRINK_STEP
        tried_scales, tried_zeros = range_grid(low * shrink, high * shrink, scheme, full_range)
        error = _grid_error(groups, tried_scales, tried_zeros, scheme, norm, weights)
        better = error < best
        best = torch.where(better, error, best)
        scales = torch.where(better, tried_scales, scales)
        if zeros is not None and tried_zeros is not None:
            zeros = torch.where(better, tried_zeros, zeros)
    return scales, zeros


def range_grid(low: Tensor, high: Tensor, scheme: Scheme, full_range: bool = False) -> tuple[Tensor, Tensor | None]:
    """(scales, zeros) of groups whose weights reach from `low` to `high`.

    Symmetric grids are compressed-tensors', amax / 7.5 at 4 bits: the extreme weight lies half a step from its code.
    `full_range`: it gets the lowest code, the only one whose negative is missing; a scale is then negative where that
    weight is positive, and steps are finer (amax / 8).
    """
    levels = 2.0**scheme.bits - 1
    if not scheme.symmetric:
        scales = _storable((high - low) / levels)
        return scales, (-low / scales).round_().clamp_(0, levels)
    scales = _storable(torch.maximum(-low, high) / ((levels + full_range) / 2))
    return torch.where(high > -low, -scales, scales) if full_range else scales, None


def _storable(scales: Tensor) -> Tensor:
    """As float16 holds them; never zero, which could not be divided by."""
    return scales.clamp(SMALLEST_SCALE, 65504.0).half().float()


def as_stored(scales: Tensor) -> Tensor:
    """Scales of either sign as float16 holds them."""
    return torch.where(scales < 0, -_storable(-scales), _storable(scales))


def _grid_error(
    groups: Tensor, scales: Tensor, zeros: Tensor | None, scheme: Scheme, norm: float, importance: Tensor | None
) -> Tensor:
    middle: float | Tensor = 2.0 ** (scheme.bits - 1) if zeros is None else zeros.unsqueeze(-1)
    wide = scales.unsqueeze(-1)
    codes = (groups / wide + middle).round_().clamp_(0, 2**scheme.bits - 1)
    errors = codes.sub_(middle).mul_(wide).sub_(groups).abs_().pow_(norm)
    return (errors if importance is None else errors * importance).sum(-1)


def round_on_grid(weight: Tensor, scales: Tensor, zeros: Tensor | None, scheme: Scheme) -> Tensor:
    """uint8 codes [out, in] of the nearest grid points."""
    groups = _grouped(weight, scheme.group_size)
    middle: float | Tensor = 2.0 ** (scheme.bits - 1) if zeros is None else zeros.unsqueeze(-1)
    codes = (groups / scales.unsqueeze(-1) + middle).round_().clamp_(0, 2**scheme.bits - 1)
    return codes.to(torch.uint8).view(weight.shape)


def round_to_nearest(
    weight: Tensor, scheme: Scheme, norm: float = 0.0, importance: Tensor | None = None
) -> QuantizedMatrix:
    scales, zeros = choose_grid(weight, scheme, norm, importance)
    return QuantizedMatrix(scheme, round_on_grid(weight, scales, zeros, scheme), scales, zeros)


def _grouped(weight: Tensor, group_size: int) -> Tensor:
    """[rows, in] -> [rows, groups, group]."""
    return weight.reshape(weight.shape[0], -1, group_size or weight.shape[1])


class RoundToNearest(Solver):
    name = "rtn"
    keeps_zeros = True

    @dataclass(frozen=True, slots=True)
    class Options:
        mse: bool = False  # search the range of least error instead of taking min and max
        norm: float = 2.4  # of the error that the search minimizes

    def check(self, name: str, shape: tuple[int, int], scheme: Scheme) -> None:
        check_integer_scheme(self.name, name, shape, scheme)

    def solve(self, block: BlockView, scheme_of: Mapping[str, Scheme]) -> dict[str, QuantizedMatrix]:
        norm = self.options.norm if self.options.mse else 0.0
        matrices = {}
        for name, scheme in scheme_of.items():
            matrices[name] = round_to_nearest(block.weight(name), scheme, norm)
            block.replace(name, matrices[name].dequantize())
        return matrices
