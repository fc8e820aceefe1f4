"""An adapter's matrix on its base: scales and DoRA's norms go into the factors, and what is not finite is refused."""

from __future__ import annotations

import pytest
import torch

from tokenmill.checkpoint.adapters.adapter import AdapterMatrix
from tokenmill.checkpoint.base import StoredTensor
from tokenmill.errors import UserError
from tokenmill.kernels.ref_adapters import adapted
from tokenmill.model.adapters import adapted_part
from tokenmill.model.formats.dense import DenseWeight

_BASE = torch.tensor([[3.0, 4.0], [0.0, 0.0]])


def _weight(values: torch.Tensor) -> DenseWeight:
    return DenseWeight(StoredTensor("w", tuple(values.shape), "F32", values))


def _matrix(size: float, scale: float = 1.0, magnitude: torch.Tensor | None = None) -> AdapterMatrix:
    return AdapterMatrix("q", torch.full((1, 2), size), torch.full((2, 1), size), scale, magnitude)


def test_a_part_does_what_the_merged_matrix_does() -> None:
    x = torch.tensor([[1.0, -2.0], [0.5, 0.25]])
    for matrix in (_matrix(0.5, 2.0), _matrix(0.5, 2.0, torch.tensor([2.0, 3.0]))):
        part = adapted_part(matrix, _weight(_BASE))
        torch.testing.assert_close(adapted(part, x, x @ _BASE.T), x @ matrix.apply(_BASE).T)


@pytest.mark.parametrize(
    "matrix",
    [_matrix(2.0, 3e38), _matrix(1e30), _matrix(0.0, magnitude=torch.ones(2))],
    ids=["scale", "product", "a row of zeros"],
)
def test_what_is_not_finite_on_this_base_is_refused(matrix: AdapterMatrix) -> None:
    with pytest.raises(UserError, match="of q has no finite values"):
        adapted_part(matrix, _weight(_BASE))
