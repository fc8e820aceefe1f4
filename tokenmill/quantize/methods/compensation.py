"""Where learned rounding starts: weights as GPTQ leaves them just before it rounds them, and the grids it chose.

Rounding those to nearest gives GPTQ's codes, so that a descent which begins there has to find only what GPTQ's
objective (each linear's own output) does not see: the rest of the block, and what earlier blocks lost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tokenmill.model.formats.quantized import QuantizedMatrix, Scheme
from tokenmill.quantize.base import BlockView
from tokenmill.quantize.methods.drift import undrifted
from tokenmill.quantize.methods.gptq import GRID_NORM, column_order, factor_hessian, solve_columns, unstacked

_DAMPING = 0.01


@dataclass(frozen=True, slots=True)
class Start:
    """One matrix: GPTQ's result before scales are fitted to it, and the weights [out, in] that round to it."""

    matrix: QuantizedMatrix
    weight: Tensor


def gptq_starts(block: BlockView, scheme_of: Mapping[str, Scheme], full_range: bool) -> dict[str, Start]:
    """Of all linears of a block, each seeing those before it rounded. The block is left as it was."""
    before = {name: block.weight(name) for name in scheme_of}
    starts: dict[str, Start] = {}
    for group in block.groups:
        names = [name for name in group.names if name in scheme_of]
        if not names:
            continue
        statistics, drift = block.statistics_beside_float(group)
        hessian = statistics.hessian
        assert hessian is not None
        for scheme in dict.fromkeys(scheme_of[name] for name in names):
            same = {name: block.weight(name) for name in names if scheme_of[name] == scheme}
            if drift is not None:
                same = undrifted(same, drift)
            starts |= stacked_starts(same, hessian, scheme, full_range)
        for name in names:
            block.replace(name, starts[name].matrix.dequantize())
    for name, weight in before.items():
        block.replace(name, weight)
    return starts


def stacked_starts(
    weights: Mapping[str, Tensor], hessian: Tensor, scheme: Scheme, full_range: bool
) -> dict[str, Start]:
    """Of matrices of one scheme that read one input."""
    rows = {name: len(weight) for name, weight in weights.items()}
    order = column_order(hessian.diagonal(), scheme.group_size, "gar")
    factor, _ = factor_hessian(hessian, _DAMPING, order)
    stacked = torch.cat(list(weights.values()))
    full_range = full_range and scheme.bits < 8  # as gptq
    matrix, moved = solve_columns(stacked, factor, scheme, order, norm=GRID_NORM, full_range=full_range)
    parts: Sequence[Tensor] = moved.split(list(rows.values()))
    matrices = unstacked(matrix, rows)
    return {name: Start(matrices[name], part) for name, part in zip(rows, parts, strict=True)}
