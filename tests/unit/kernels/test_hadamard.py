"""Hadamard transforms: orthonormal at every width, flat where a Hadamard matrix exists, undone by their inverse."""

from __future__ import annotations

import pytest
import torch

from tokenmill.kernels.hadamard import (
    hadamard,
    hadamard_matrix,
    has_hadamard,
    inverse_hadamard,
    inverse_signed_hadamard,
    random_signs,
    signed_hadamard,
)

_FLAT = [1, 2, 64, 128, 4096, 12, 20, 28, 36, 48, 60, 288, 576, 640, 896, 1152, 1536]  # widths of models among them
_UNFLAT = [3, 7, 9, 18, 30, 50]  # no Hadamard matrix has these orders


@pytest.mark.parametrize("n", [*_FLAT[:-1], *_UNFLAT])
def test_orthonormal_and_as_flat_as_can_be(n: int) -> None:
    matrix = hadamard_matrix(n, torch.float64)
    if n <= 1200:
        assert torch.allclose(matrix @ matrix.T, torch.eye(n, dtype=torch.float64), atol=1e-12)
    assert has_hadamard(n) == (n in _FLAT)
    if n in _FLAT:
        assert torch.allclose(matrix.abs(), torch.full((n, n), n**-0.5, dtype=torch.float64))
    else:
        assert matrix.abs().max() <= (2 / (n // (n & -n))) ** 0.5 * (n & -n) ** -0.5 + 1e-12


@pytest.mark.parametrize("n", [1, 9, 48, 256, 1536])
def test_transform_is_the_product_with_the_matrix(n: int) -> None:
    x = torch.randn(3, 2, n, dtype=torch.float64)
    assert torch.allclose(hadamard(x), x @ hadamard_matrix(n, torch.float64).T)
    assert torch.allclose(inverse_hadamard(hadamard(x)), x)


def test_signed_transform_is_undone_and_spreads_an_outlier() -> None:
    x = torch.zeros(2, 576)
    x[0, 17] = 24.0
    x[1] = torch.randn(576)
    rotated = signed_hadamard(x, seed=5)
    assert torch.allclose(rotated[0].abs(), torch.ones(576), atol=1e-5)
    assert torch.allclose(inverse_signed_hadamard(rotated, seed=5), x, atol=1e-5)
    assert not torch.allclose(rotated, signed_hadamard(x, seed=6))


def test_signs_are_fixed_by_the_seed_for_ever() -> None:
    """Files store only the seed: these values may never change."""
    assert random_signs(16, seed=1).tolist() == [
        -1.0, -1.0, -1.0, 1.0, 1.0, -1.0, -1.0, -1.0, 1.0, -1.0, 1.0, -1.0, 1.0, -1.0, 1.0, 1.0
    ]  # fmt: skip
    assert abs(random_signs(10000, seed=2).mean()) < 0.05
