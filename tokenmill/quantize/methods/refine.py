"""Codes and scales mended once all of a matrix are chosen: coordinate descent on what its error costs the model's
answers.

To second order that is tr(G D A D^T), with D the error of the matrix, A the second moments of its inputs and G those of
the gradients by its outputs (fisher.py): the Kronecker factors of the Fisher information, as in YAQA (Tseng et al.
2025). GPTQ knows A alone, and rounds every weight once; here a row also makes good for other rows, and columns are
visited again. Column after column, the rows whose code gains by one step move together if the step gains together. In
the scales of a group of columns the cost is a quadratic form, so that those of all rows are solved for at once.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from tokenmill.model.formats.quantized import QuantizedMatrix, element_values, spread
from tokenmill.quantize.methods.rtn import as_stored

_INPUT_DAMPING, _OUTPUT_DAMPING = 0.01, 0.02  # shares of the mean diagonals
_SCALE_DAMPING = 0.01  # of a scale's own curvature
_FITTED = 512  # columns whose slopes are kept up to date while scales are fitted; those behind follow by one product
_COLUMNS = 32  # whose gradients are kept up to date while they are visited; the others follow by one product
_TOGETHER = 0.6  # share of the single gains that must remain of a common step, else half of it is dropped


def refine(matrix: QuantizedMatrix, weight: Tensor, moments: Tensor, gram: Tensor, sweeps: int) -> QuantizedMatrix:
    """`weight` [out, in] is what `matrix` rounds, `moments` A [in, in], `gram` [out, tile]: tiles along the diagonal of
    G, one below the other. Weights of zero stay."""
    error = element_values(matrix) * spread(matrix.scales, matrix) - weight
    inputs, top = _damped(moments, _INPUT_DAMPING), 2**matrix.scheme.bits - 1
    tile, codes, scales = gram.shape[1], matrix.codes.clone(), matrix.scales.clone()
    for begin in range(0, codes.shape[0], tile):
        rows = slice(begin, begin + tile)
        part = replace(
            matrix, codes=codes[rows], scales=scales[rows], zeros=None if matrix.zeros is None else matrix.zeros[rows]
        )
        outputs = _damped(gram[rows, : codes[rows].shape[0]], _OUTPUT_DAMPING)
        work = _Tile(part, error[rows], weight[rows] != 0, inputs, outputs, top)
        for sweep in range(sweeps):
            work.sweep()
            if sweep % 2 == 1 and sweep + 1 < sweeps:
                work.solve_scales()
        codes[rows], scales[rows] = work.codes.T.to(torch.uint8), work.scales.T
    return replace(matrix, codes=codes, scales=scales)


def fit_scales(matrix: QuantizedMatrix, weight: Tensor, moments: Tensor) -> QuantizedMatrix:
    """The same codes under the scales for which tr(D A D^T) is least, group after group. `weight` [out, in] is what
    `matrix` rounds, `moments` A [in, in]."""
    values, scales, inputs = element_values(matrix), matrix.scales.clone(), _damped(moments, _INPUT_DAMPING)
    slopes = (values * spread(scales, matrix) - weight) @ inputs  # of half the cost
    size, width = _group_size(matrix), weight.shape[1]
    block = max(1, _FITTED // size) * size
    for begin in range(0, width, block):
        end = min(width, begin + block)
        moved = torch.empty_like(slopes[:, begin:end])
        for first in range(begin, end, size):
            group, columns = first // size, slice(first, first + size)
            part = values[:, columns]
            curvature = (part @ inputs[columns, columns] * part).sum(1)
            wanted = (slopes[:, columns] * part).sum(1) / curvature.clamp(min=1e-30)
            after = _near(scales[:, group], scales[:, group] - wanted)
            step = torch.mul(
                part, (after - scales[:, group])[:, None], out=moved[:, first - begin : first - begin + size]
            )
            slopes[:, first + size : end].addmm_(step, inputs[columns, first + size : end])
            scales[:, group] = after
        slopes[:, end:].addmm_(moved, inputs[begin:end, end:])
    return replace(matrix, scales=scales)


def _near(before: Tensor, wanted: Tensor) -> Tensor:
    """Scales as they are stored, of the same sign and size: a group of tiny weights must not mend what others lose."""
    return as_stored(before * (wanted / before).clamp(0.5, 2.0))


def _group_size(matrix: QuantizedMatrix) -> int:
    return matrix.codes.shape[1] // matrix.scales.shape[1]


def _damped(moments: Tensor, share: float) -> Tensor:
    damped = moments.clone()
    damped.diagonal().add_(share * float(moments.diagonal().mean()) + 1e-30)
    return damped


class _Tile:
    """Rows that share one block of G; everything is transposed, so that a column is contiguous."""

    def __init__(
        self, matrix: QuantizedMatrix, error: Tensor, free: Tensor, inputs: Tensor, outputs: Tensor, top: int
    ) -> None:
        self.codes, self.scales = matrix.codes.T.float().contiguous(), matrix.scales.T.contiguous()
        middle = (matrix.codes.float() - element_values(matrix)).T
        self._middle = middle.contiguous()
        self._group = _group_size(matrix)
        self._free = free.T.contiguous()
        self._inputs, self._outputs, self._top = inputs, outputs, top
        self._slopes = inputs @ (error.T @ outputs)  # of half the cost, [in, rows]
        self._curvature = outputs.diagonal()
        self._order = torch.argsort(inputs.diagonal(), descending=True, stable=True)

    def sweep(self) -> None:
        """Visit every column once, those with the largest inputs first."""
        for columns in self._order.split(_COLUMNS):
            inputs = self._inputs[columns]
            near, slopes = inputs[:, columns], self._slopes[columns]
            pushed = torch.zeros_like(slopes)  # G d of each column
            for place, column in enumerate(columns.tolist()):
                step = self._step(column, slopes[place], float(near[place, place]))
                if step is not None:
                    pushed[place] = step
                    slopes.addr_(near[place], step)
            self._slopes.addmm_(inputs.T, pushed)

    def _step(self, column: int, slopes: Tensor, input_square: float) -> Tensor | None:
        """Move the codes of a column; what that does to the slopes by its outputs, None where nothing moved."""
        scales, codes = self.scales[column // self._group], self.codes[column]
        curvature = self._curvature * input_square
        wanted = (slopes / (curvature * scales)).neg_().round_().clamp_(-1, 1).mul_(self._free[column])
        moved = ((codes + wanted).clamp_(0, self._top) - codes).mul_(scales)
        gains = moved * (slopes + 0.5 * curvature * moved)
        rows = (gains < 0).nonzero().flatten()
        gains, rows_moved = gains[rows], moved[rows]
        while len(rows):
            pushed = rows_moved @ self._outputs[rows]
            cost = float(rows_moved @ slopes[rows]) + 0.5 * input_square * float(rows_moved @ pushed[rows])
            if cost <= _TOGETHER * float(gains.sum()) or len(rows) == 1:
                self.codes[column, rows] += (rows_moved / scales[rows]).round_()
                return pushed
            best = gains.topk(len(rows) // 2, largest=False, sorted=False).indices
            rows, gains, rows_moved = rows[best], gains[best], rows_moved[best]
        return None

    def solve_scales(self) -> None:
        """Of each group of columns in turn, the scales of all rows that cost least with the codes as they are."""
        for group in range(self.scales.shape[0]):
            columns = slice(group * self._group, (group + 1) * self._group)
            values = self.codes[columns] - self._middle[columns]
            inputs = self._inputs[:, columns]
            form = (values.T @ (inputs[columns] @ values)) * self._outputs
            form.diagonal().mul_(1 + _SCALE_DAMPING).add_(1e-30)
            slopes = (self._slopes[columns] * values).sum(0)
            lower, failed = torch.linalg.cholesky_ex(form)
            if int(failed):
                continue
            before = self.scales[group].clone()
            after = _near(before, before - torch.cholesky_solve(slopes[:, None], lower)[:, 0])
            self.scales[group] = after
            self._slopes += inputs @ ((values * (after - before)) @ self._outputs)
