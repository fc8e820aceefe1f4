"""Magnitude pruning: the smallest weights become zero; of a whole matrix, or of every few neighbours. Data-free."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from tokenmill.quantize.base import Statistics
from tokenmill.quantize.methods.pruning import Pattern, Pruner, least_of_all, least_of_neighbours


class Magnitude(Pruner):
    name = "magnitude"

    def prune(
        self,
        weights: Mapping[str, Tensor],
        statistics: Statistics | None,  # noqa: ARG002
        pattern: Pattern,
    ) -> dict[str, Tensor]:
        def mask(size: Tensor) -> Tensor:
            return least_of_neighbours(size, pattern) if pattern.of else least_of_all(size, pattern.share)

        return {name: weight.masked_fill(mask(weight.abs()), 0.0) for name, weight in weights.items()}
