"""Quantization-aware training by distillation, block by block: weights and steps are trained through the rounding, so
that the rounded block puts out what the unquantized one does. For 2 and 3 bits, where choosing between two neighbours
(gptq, autoround) is not enough: here a weight may move several steps.

Roundings pass gradients straight through; a step's gradient is that of the values it makes (LSQ). As a solver it is
resumable after any block, and needs the memory of one block's training only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tokenmill.errors import unknown_name
from tokenmill.model.formats.quantized import QuantizedMatrix, Scheme
from tokenmill.quantize.base import BlockView, Solver
from tokenmill.quantize.methods.compensation import gptq_starts
from tokenmill.quantize.methods.distillation import TrainingOptions, check_training, train_block
from tokenmill.quantize.methods.rtn import as_stored, check_integer_scheme, choose_grid, round_on_grid

STARTS = ("gptq", "rtn")


class TrainedMatrix:
    """`codes`: weights in units of their group's first step, float; `growth`: log of the present over the first."""

    def __init__(self, weight: Tensor, scheme: Scheme, grid: QuantizedMatrix | None = None) -> None:
        """`grid`: whose scales and zeros to begin with, not those of least error."""
        self.shape, self.scheme = weight.shape, scheme
        scales, self.zeros = choose_grid(weight, scheme, norm=2.4) if grid is None else (grid.scales, grid.zeros)
        self.first = scales.unsqueeze(-1)
        groups = weight.reshape(weight.shape[0], -1, scheme.group_size or weight.shape[1])
        self.codes = (groups / self.first).detach().requires_grad_()
        self.growth = torch.zeros_like(self.first, requires_grad=True)

    def dequantize(self) -> Tensor:
        """The rounded weights [out, in]; has gradients in both parameters."""
        growth = self.growth.exp()
        middle: float | Tensor = 2.0 ** (self.scheme.bits - 1) if self.zeros is None else self.zeros.unsqueeze(-1)
        exact = self.codes / growth
        rounded = (exact + (exact.round() - exact).detach()) + middle
        inside = rounded.clamp(0, 2**self.scheme.bits - 1) - middle
        return (inside * (growth * self.first)).view(self.shape)

    @torch.no_grad()
    def finish(self) -> QuantizedMatrix:
        scales = as_stored((self.growth.exp() * self.first).squeeze(-1))
        weight = (self.codes * self.first).view(self.shape)
        return QuantizedMatrix(self.scheme, round_on_grid(weight, scales, self.zeros, self.scheme), scales, self.zeros)


class Qat(Solver):
    name = "qat"
    needs_calibration = True
    needs_targets = True

    @dataclass(frozen=True, slots=True)
    class Options(TrainingOptions):
        growth: float = 0.2  # share of the rate that the logs of steps get
        start: str = "gptq"  # what training begins with; or "rtn": the weights as they are

    def check(self, name: str, shape: tuple[int, int], scheme: Scheme) -> None:
        check_integer_scheme(self.name, name, shape, scheme)
        check_training(self.name, self.options)
        if self.options.start not in STARTS:
            raise unknown_name("start of qat", self.options.start, STARTS)

    def memory_bytes(self, shape: tuple[int, int]) -> int:
        """Weights, gradients, both moments and the best of the whole block, and what autograd keeps."""
        return 4 * 12 * 3 * shape[0] * shape[1]

    def solve(self, block: BlockView, scheme_of: Mapping[str, Scheme]) -> dict[str, QuantizedMatrix]:
        if self.options.start == "gptq":
            trained = {
                name: TrainedMatrix(each.weight, scheme_of[name], each.matrix)
                for name, each in gptq_starts(block, scheme_of, full_range=True).items()
            }
        else:
            trained = {name: TrainedMatrix(block.weight(name), scheme) for name, scheme in scheme_of.items()}
        parameters = [
            ([each.codes for each in trained.values()], 1.0),
            ([each.growth for each in trained.values()], self.options.growth),
        ]
        train_block(
            block, parameters, lambda: {name: each.dequantize() for name, each in trained.items()}, self.options
        )
        matrices = {name: each.finish() for name, each in trained.items()}
        for name, matrix in matrices.items():
            block.replace(name, matrix.dequantize())
        return matrices
