"""What linears should be once the blocks before them are rounded: their inputs have drifted, their outputs should not.

In the float model a linear reads x, here y. Rounding its own weights W keeps W y, with all that earlier rounding did
to y; what is wanted is W x. So the weights to round are those W' for which |W x - W' y|^2 + ridge |W' - W|^2 is least:
W' = W + W S with S = (E[x y^T] - H) (H + ridge)^-1, H = E[y y^T]. The idea is GPTAQ's (Li et al. 2025), which puts it
into each column's update; here it is done once, before any column is rounded. What S learns from few tokens is chance
in part: S of half the sequences, tried on the others, says what share of it is kept. Used by gptq.py, compensation.py
and the GGUF job; knows no blocks.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from tokenmill.quantize.base import Drift

_RIDGE = 0.05  # share of the mean square of an input
JUDGED = 512  # outputs, evenly spaced, by which the share is told


def undrifted(weights: Mapping[str, Tensor], drift: Drift) -> dict[str, Tensor]:
    """W' of linears [out, in] that read one input. Weights of zero stay, as do inputs that were always zero."""
    stacked = torch.cat(list(weights.values()))
    judged = stacked[:: -(-len(stacked) // JUDGED)]
    first = _shift(judged, drift.half_square, drift.half_cross)
    rest_square, rest_cross = (
        (whole - drift.half * part) / (1 - drift.half)
        for whole, part in ((drift.square, drift.half_square), (drift.cross, drift.half_cross))
    )
    wanted = float((first * (judged @ (rest_cross - rest_square))).sum())
    made = float((first * (first @ rest_square)).sum())
    share = min(1.0, max(0.0, wanted / made)) if made > 0 else 0.0
    del first, rest_square, rest_cross
    share = 2 * share / (1 + share)  # twice the tokens: half the chance
    if not share:
        return dict(weights)
    moved = stacked + share * _shift(stacked, drift.square, drift.cross)
    moved = torch.where(stacked == 0, stacked, moved)
    return dict(zip(weights, moved.split([len(each) for each in weights.values()]), strict=True))


def _shift(weight: Tensor, square: Tensor, cross: Tensor) -> Tensor:
    """W S; zero where S cannot be solved for."""
    damped = square.clone()
    damped.diagonal().add_(_RIDGE * square.diagonal().mean().clamp(min=1e-30))
    lower, failed = torch.linalg.cholesky_ex(damped)
    if int(failed):
        return torch.zeros_like(weight)
    shift = cross - square
    if len(weight) > len(square):  # then S itself is less work
        return weight @ torch.cholesky_solve(shift.T, lower).T
    return torch.cholesky_solve((weight @ shift).T, lower).T
