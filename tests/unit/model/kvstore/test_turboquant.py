"""TurboQuant against its theory: codebooks, squared error, and products that are right on average."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tokenmill.model.kvstore.codebook import normal_codebook, normal_distortion
from tokenmill.model.kvstore.packing import pack_codes, unpack_codes
from tokenmill.model.kvstore.rows import RowFormat
from tokenmill.model.kvstore.turboquant import CodebookRows, ProductRows

# Positive halves, for variance one.
LEVELS = {
    1: [0.7979],
    2: [0.4528, 1.5104],
    3: [0.2451, 0.7560, 1.3439, 2.1519],
    4: [0.1284, 0.3880, 0.6568, 0.9423, 1.2562, 1.6180, 2.0690, 2.7326],
}
BOUNDS = {
    2: [0.9816],
    3: [0.5005, 1.0500, 1.7479],
    4: [0.2582, 0.5224, 0.7995, 1.0993, 1.4371, 1.8435, 2.4008],
}
DISTORTION = {1: 0.3634, 2: 0.1175, 3: 0.03455, 4: 0.00950}


@pytest.mark.parametrize("bits", LEVELS)
def test_codebooks(bits: int) -> None:
    levels, bounds = normal_codebook(bits)
    half = 1 << (bits - 1)
    assert levels[half:].tolist() == pytest.approx(LEVELS[bits], abs=1e-4)
    assert levels[:half].flip(0).tolist() == pytest.approx([-each for each in LEVELS[bits]], abs=1e-4)
    assert bounds[half:].tolist() == pytest.approx(BOUNDS.get(bits, []), abs=1e-4)
    assert float(bounds[half - 1]) == pytest.approx(0, abs=1e-6)
    assert normal_distortion(bits) == pytest.approx(DISTORTION[bits], rel=2e-3)


def unit_vectors(count: int, width: int, seed: int) -> Tensor:
    x = torch.randn(count, 1, width, generator=torch.Generator().manual_seed(seed))
    return x / x.norm(dim=-1, keepdim=True)


def read_back(rows: RowFormat, x: Tensor) -> Tensor:
    return rows.decode(rows.encode(x)[:, :, None])[:, :, 0]


def distortion_of_unit_vectors(width: int, bits: int) -> float:
    """E |x - rounded x|^2 of random unit vectors, whose coordinates have the density (1 - t^2)^((width - 3) / 2)."""
    levels, bounds = normal_codebook(bits)
    t = torch.linspace(-1, 1, 400_001, dtype=torch.float64)
    density = (1 - t * t).clamp(min=0) ** ((width - 3) / 2)
    scaled = t * math.sqrt(width)
    error = (scaled - levels.double()[torch.bucketize(scaled, bounds.double())]).square()
    return float((error * density).sum() / density.sum())


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("width", [64, 128, 256])
def test_squared_error_is_that_of_theory(bits: int, width: int) -> None:
    x = unit_vectors(4000, width, bits)
    x[:, :, 3] *= 4  # an outlier channel, which the rotation spreads
    x = x / x.norm(dim=-1, keepdim=True)
    error = (read_back(CodebookRows(width, bits), x) - x).square().sum(-1).mean()
    assert float(error) == pytest.approx(distortion_of_unit_vectors(width, bits), rel=0.03)
    if width > 64:  # from here on coordinates are normal enough
        assert float(error) == pytest.approx(DISTORTION[bits], rel=0.03)


@pytest.mark.parametrize(("bits", "share"), [(3, 0.97), (4, 0.9)])
def test_refined_lengths_lose_less_and_are_unbiased(bits: int, share: float) -> None:
    x = unit_vectors(2000, 64, 9)
    plain, refined = (read_back(CodebookRows(64, bits, refined=refined), x) for refined in (False, True))
    assert float((refined - x).square().sum(-1).mean()) < share * float((plain - x).square().sum(-1).mean())
    assert float((plain * x).sum(-1).mean()) < 1 - 0.5 * DISTORTION[bits]  # too short
    torch.testing.assert_close((refined * x).sum(-1), torch.ones(2000, 1), rtol=0, atol=1e-3)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_products_are_unbiased_and_vary_as_theory_says(bits: int) -> None:
    """Along the query itself, rounding shrinks products; the residual's signs give back what is missing."""
    width = 128
    x = unit_vectors(20000, width, 5)
    plain = (read_back(CodebookRows(width, bits), x) * x).sum(-1)
    exact = (read_back(ProductRows(width, bits), x) * x).sum(-1)
    assert float(plain.mean()) == pytest.approx(1 - DISTORTION[bits], abs=0.003)
    assert float(exact.mean()) == pytest.approx(1.0, abs=0.005)
    query = unit_vectors(20000, width, 6)
    error = ((read_back(ProductRows(width, bits), x) - x) * query).sum(-1)
    assert abs(float(error.mean())) < 0.003
    assert float(error.var() * width) == pytest.approx(math.pi / 2 * DISTORTION[bits - 1], rel=0.05)


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
def test_packing(bits: int) -> None:
    codes = torch.randint(0, 1 << bits, (3, 5, 48), generator=torch.Generator().manual_seed(bits))
    packed = pack_codes(codes, bits)
    assert packed.shape == (3, 5, 48 * bits // 8)
    assert torch.equal(unpack_codes(packed, bits), codes.int())


def test_packing_order() -> None:
    assert pack_codes(torch.tensor([1, 2]), 4).tolist() == [0x21]  # the even element in the low nibble
    codes = torch.tensor([1, 2, 3, 4, 5, 6, 7, 0])
    word = sum(code << (3 * place) for place, code in enumerate(codes.tolist()))
    assert pack_codes(codes, 3).tolist() == [word & 255, word >> 8 & 255, word >> 16]
