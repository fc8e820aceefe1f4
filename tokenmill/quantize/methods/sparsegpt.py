"""SparseGPT: columns are pruned one after the other, and what a pruned weight contributed is pushed onto the columns
not yet seen, as far as the inputs' correlations allow. GPTQ's recursion and factor, with pruning instead of rounding.

A weight's score is w^2 over its squared diagonal entry of the factor: the error that is left after compensation. It is
taken from the weights as they are by then: of every few neighbours, or (unstructured) of a block of columns over all
rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tokenmill.model.formats.quantized import Scheme
from tokenmill.quantize.base import Statistics
from tokenmill.quantize.methods.gptq import Columns, factor_hessian
from tokenmill.quantize.methods.pruning import Pattern, Pruner, least_of_all, least_of_neighbours

_BLOCK = 128  # columns whose weights compete, unstructured


class _PrunedColumns(Columns):
    """GPTQ's columns whose rounding is pruning; a group of columns is chosen when everything before it is done."""

    def __init__(self, weight: Tensor, factor: Tensor, pattern: Pattern, group: int) -> None:
        super().__init__(weight, factor, Scheme("float", 16, group), 0.0)
        self.pruned = None  # chosen here, group by group
        self.values = torch.empty_like(weight)
        self.zero = torch.zeros_like(weight, dtype=torch.bool)
        self.pattern = pattern

    def _choose(self, group: int) -> None:
        cut = slice(group * self.group, (group + 1) * self.group)
        scores = (self.weight[cut] / self.factor.diagonal()[cut].unsqueeze(1)).square()
        if self.pattern.of:
            self.zero[cut] = least_of_neighbours(scores.T, self.pattern).T
        else:
            self.zero[cut] = least_of_all(scores, self.pattern.share)

    def round(self, column: int, value: Tensor, group: int) -> Tensor:
        del group
        self.values[column] = value.masked_fill(self.zero[column], 0.0)
        return self.values[column]


def sparsegpt(weight: Tensor, factor: Tensor, pattern: Pattern) -> Tensor:
    """`weight` [out, in] pruned; `factor` is of the Hessian in natural order."""
    columns = weight.shape[1]
    group = pattern.of or max(size for size in range(1, _BLOCK + 1) if columns % size == 0)
    state = _PrunedColumns(weight.T.contiguous(), factor, pattern, group)
    state.solve(0, columns)
    return state.values.T.contiguous()


class SparseGpt(Pruner):
    name = "sparsegpt"
    needs_calibration = True
    kinds = ("hessian",)

    @dataclass(frozen=True, slots=True)
    class Options(Pruner.Options):
        damping: float = 0.01  # share of the mean diagonal; grows by itself where the factorization fails

    def memory_bytes(self, shape: tuple[int, int]) -> int:
        out_features, in_features = shape
        return 4 * in_features * max(3 * in_features, 2 * in_features + 5 * out_features)

    def prune(
        self, weights: Mapping[str, Tensor], statistics: Statistics | None, pattern: Pattern
    ) -> dict[str, Tensor]:
        assert statistics is not None
        hessian = statistics.hessian
        assert hessian is not None
        factor, _ = factor_hessian(hessian, self.options.damping)
        return {name: sparsegpt(weight, factor, pattern) for name, weight in weights.items()}
