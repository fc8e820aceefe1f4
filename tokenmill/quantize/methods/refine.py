"""Codes mended once all of a matrix are chosen: coordinate descent on what its error costs the model's answers.

To second order that is tr(G D A D^T), with D the error of the matrix, A the second moments of its inputs and G those of
the gradients by its outputs (fisher.py): the Kronecker factors of the Fisher information, as in YAQA (Tseng et al.
2025). GPTQ knows A alone, and rounds every weight once; here a row also makes good for other rows, and columns are
visited again. Column after column, the rows whose code gains by one step move together if the step gains together.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from tokenmill.model.formats.quantized import QuantizedMatrix, element_values, spread

_INPUT_DAMPING, _OUTPUT_DAMPING = 0.01, 0.02  # shares of the mean diagonals
_COLUMNS = 32  # whose gradients are kept up to date while they are visited; the others follow by one product
_TOGETHER = 0.6  # share of the single gains that must remain of a common step, else half of it is dropped


def refine(matrix: QuantizedMatrix, weight: Tensor, moments: Tensor, gram: Tensor, sweeps: int) -> QuantizedMatrix:
    """`weight` [out, in] is what `matrix` rounds, `moments` A [in, in], `gram` [out, tile]: tiles along the diagonal of
    G, one below the other. Weights of zero stay."""
    wide = spread(matrix.scales, matrix) * matrix.global_scale
    error = element_values(matrix) * wide - weight
    inputs, top = _damped(moments, _INPUT_DAMPING), 2**matrix.scheme.bits - 1
    tile, codes = gram.shape[1], matrix.codes.clone()
    for begin in range(0, codes.shape[0], tile):
        rows = slice(begin, begin + tile)
        free = weight[rows] != 0
        outputs = _damped(gram[rows, : codes[rows].shape[0]], _OUTPUT_DAMPING)
        part = _Tile(codes[rows], wide[rows], error[rows], free, inputs, outputs, top)
        for _ in range(sweeps):
            part.sweep()
        codes[rows] = part.codes.T.to(torch.uint8)
    return replace(matrix, codes=codes)


def _damped(moments: Tensor, share: float) -> Tensor:
    damped = moments.clone()
    damped.diagonal().add_(share * float(moments.diagonal().mean()) + 1e-30)
    return damped


class _Tile:
    """Rows that share one block of G; everything is transposed, so that a column is contiguous."""

    def __init__(
        self, codes: Tensor, scales: Tensor, error: Tensor, free: Tensor, inputs: Tensor, outputs: Tensor, top: int
    ) -> None:
        self.codes = codes.T.float().contiguous()
        self._scales, self._free = scales.T.contiguous(), free.T.contiguous()
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
        scales, codes = self._scales[column], self.codes[column]
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
