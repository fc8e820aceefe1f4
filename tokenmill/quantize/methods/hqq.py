"""HQQ: half-quadratic quantization. Fits each group's zero point so that the errors are sparse: a few large ones rather
than many small, measured by the sum of |e|^p with p below 1. Data-free.

Two alternating steps: which part of the error counts as outlier (a shrinkage), then the zero point that fits the rest.
That zero point is a real number, which integer formats do not store: it is rounded, and then the scale is fitted by the
same alternation, so that the gain survives the file. Of all iterates, each group keeps its best.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tokenmill.errors import UserError
from tokenmill.model.formats.quantized import QuantizedMatrix, Scheme
from tokenmill.quantize.methods.blocks import MatrixSolver
from tokenmill.quantize.methods.rtn import SMALLEST_SCALE, check_integer_scheme

_ROWS = 1024  # quantized at a time: bounds memory
_TINY = 1e-12  # stands for a zero error in logarithms and divisions


class Hqq(MatrixSolver):
    name = "hqq"

    @dataclass(frozen=True, slots=True)
    class Options:
        norm: float = 0.7  # p of the error that is minimized
        beta: float = 10.0  # initial threshold of what counts as outlier: larger means less
        growth: float = 1.01  # of beta, each iteration
        iterations: int = 20

    def check(self, name: str, shape: tuple[int, int], scheme: Scheme) -> None:
        check_integer_scheme(self.name, name, shape, scheme)
        if scheme.symmetric:
            raise UserError("hqq fits zero points: its scheme is asymmetric", "leave --symmetric out, or use rtn")
        if not 0 < self.options.norm <= 1:
            raise UserError(f"norm is {self.options.norm:g}", "hqq needs a norm above 0 and up to 1 (0.7)")

    def quantize(self, weight: Tensor, scheme: Scheme) -> QuantizedMatrix:
        parts = [half_quadratic(rows, scheme, self.options) for rows in weight.split(_ROWS)]
        zeros = torch.cat([part.zeros for part in parts if part.zeros is not None])
        return QuantizedMatrix(
            scheme, torch.cat([part.codes for part in parts]), torch.cat([part.scales for part in parts]), zeros
        )


def half_quadratic(weight: Tensor, scheme: Scheme, options: Hqq.Options, whole_zeros: bool = True) -> QuantizedMatrix:
    """`whole_zeros`: zero points are integer codes, as all our file formats require."""
    groups = weight.reshape(weight.shape[0], -1, scheme.group_size or weight.shape[1])
    levels = 2.0**scheme.bits - 1
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    if whole_zeros:  # zero itself must lie on the grid
        low, high = low.clamp(max=0.0), high.clamp(min=0.0)
    scales = _storable((high - low) / levels)
    zeros = -low / scales
    zeros = _fit_zeros(groups / scales, zeros.round() if whole_zeros else zeros, levels, options)
    if whole_zeros:
        zeros = _best_whole_zeros(groups / scales, zeros, levels, options.norm)
        scales = _fit_scales(groups, scales, zeros, levels, options)
    codes = (groups / scales + zeros).round_().clamp_(0, levels).to(torch.uint8).view(weight.shape)
    return QuantizedMatrix(scheme, codes, scales.squeeze(-1), zeros.squeeze(-1))


def _fit_zeros(steps: Tensor, zeros: Tensor, levels: float, options: Hqq.Options) -> Tensor:
    """`steps`: the weights in units of their scale."""
    best, least_error, before = zeros, torch.full_like(zeros, torch.inf), torch.inf
    for iteration in range(options.iterations + 1):
        errors = steps - _grid(steps, zeros, levels)
        powers, total = _powers(errors, options.norm)
        best, least_error = torch.where(total < least_error, zeros, best), torch.minimum(total, least_error)
        after = float(total.sum())
        if after >= before:
            break
        before = after
        inliers = errors - shrink(errors, powers, options.beta * options.growth**iteration)
        zeros = zeros - inliers.mean(-1, keepdim=True)
    return best


def _best_whole_zeros(steps: Tensor, zeros: Tensor, levels: float, norm: float) -> Tensor:
    """The better of the two whole numbers around each fitted zero point."""
    down, up = zeros.floor().clamp(0, levels), zeros.ceil().clamp(0, levels)
    _, above = _powers(steps - _grid(steps, up, levels), norm)
    _, below = _powers(steps - _grid(steps, down, levels), norm)
    return torch.where(above < below, up, down)


def _fit_scales(groups: Tensor, scales: Tensor, zeros: Tensor, levels: float, options: Hqq.Options) -> Tensor:
    best, least_error, before = scales, torch.full_like(scales, torch.inf), torch.inf
    for iteration in range(options.iterations + 1):
        steps = groups / scales
        values = _grid(steps, zeros, levels)
        errors = steps - values
        powers, total = _powers(errors, options.norm)
        total = total * scales**options.norm  # back in units of the weights, which all scales share
        best, least_error = torch.where(total < least_error, scales, best), torch.minimum(total, least_error)
        after = float(total.sum())
        if after >= before:
            break
        before = after
        inliers = errors - shrink(errors, powers, options.beta * options.growth**iteration)
        square = values.square().sum(-1, keepdim=True)
        change = (inliers * values).sum(-1, keepdim=True) / square.clamp(min=1.0)
        scales = _storable(scales * (1.0 + change))
    return best


def shrink(errors: Tensor, powers: Tensor, beta: float) -> Tensor:
    """The part of each error that counts as outlier: the generalized soft threshold of the l_p norm.

    `powers` is |errors|^p. Errors are in steps of the grid, not in units of the weights as published, where the errors
    of small weights would never count.
    """
    size = errors.abs()
    return errors.sign() * (size - powers / size.clamp(min=_TINY) / beta).clamp_(min=0.0)


def _grid(steps: Tensor, zeros: Tensor, levels: float) -> Tensor:
    """The nearest values of the grid, in steps."""
    return (steps + zeros).round_().clamp_(0, levels).sub_(zeros)


def _powers(errors: Tensor, norm: float) -> tuple[Tensor, Tensor]:
    """|e|^p, and its sum over each group."""
    powers = errors.abs().clamp_(min=_TINY).log_().mul_(norm).exp_()  # half the time of pow
    return powers, powers.sum(-1, keepdim=True)


def _storable(scales: Tensor) -> Tensor:
    """As float16 holds them, never zero."""
    return scales.clamp(SMALLEST_SCALE, 65504.0).half().float()
