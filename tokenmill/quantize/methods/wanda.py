"""Wanda: pruning by |weight| times the norm of its input, compared within each row. What is kept does not change."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from tokenmill.quantize.base import Statistics
from tokenmill.quantize.methods.pruning import Pattern, Pruner, least_of_neighbours


def wanda_mask(weight: Tensor, mean_square: Tensor, pattern: Pattern) -> Tensor:
    """What to prune of [out, in]; unstructured: the same number in every row."""
    scores = weight.abs() * mean_square.sqrt()
    if pattern.of:
        return least_of_neighbours(scores, pattern)
    lowest = scores.topk(round(pattern.share * scores.shape[1]), dim=1, largest=False).indices
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(1, lowest, True)


class Wanda(Pruner):
    name = "wanda"
    needs_calibration = True
    kinds = ("mean_square",)

    def prune(
        self, weights: Mapping[str, Tensor], statistics: Statistics | None, pattern: Pattern
    ) -> dict[str, Tensor]:
        assert statistics is not None
        square = statistics.mean_square
        assert square is not None
        return {name: each.masked_fill(wanda_mask(each, square, pattern), 0.0) for name, each in weights.items()}
