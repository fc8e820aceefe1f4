"""A block of plain tensors for the tests of methods: weights, groups, and inputs to take statistics from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from tokenmill.quantize.base import LinearGroup, Statistics


class FakeBlock:
    """Implements what data-free methods and static input scales need of a BlockView."""

    index = 0
    head_dim = 16

    def __init__(self, weights: Mapping[str, Tensor], groups: Sequence[Sequence[str]], inputs: Tensor | None = None):
        self.weights = dict(weights)
        self.groups: Sequence[LinearGroup] = [LinearGroup(tuple(names), None, False) for names in groups]
        self.calibration = inputs

    def weight(self, name: str) -> Tensor:
        return self.weights[name]

    def replace(self, name: str, value: Tensor) -> None:
        assert value.shape == self.weights[name].shape
        self.weights[name] = value

    def bias(self, name: str) -> Tensor | None:
        raise AssertionError(name)

    def replace_bias(self, name: str, value: Tensor) -> None:
        raise AssertionError(name, value)

    def statistics(self, group: LinearGroup, kinds: Sequence[str]) -> Statistics:
        assert self.calibration is not None, "asked for data"
        assert kinds == ("max_abs",), (group, kinds)
        return Statistics(self.calibration.shape[0], max_abs=self.calibration.abs().amax(0))

    def inputs(self) -> Sequence[Tensor]:
        raise AssertionError

    def targets(self) -> None:
        return None

    def forward(self, inputs: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
        raise AssertionError(inputs, weights)


def random_weight(rows: int, columns: int, seed: int = 0, outliers: bool = True) -> Tensor:
    """Normal rows of different sizes, one value in a hundred eight times as large, one row of zeros."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator) * torch.rand(rows, 1, generator=generator) * 0.1
    if outliers:
        weight[torch.rand(rows, columns, generator=generator) < 0.01] *= 8
    weight[rows // 2] = 0.0
    return weight
