"""Rounding to nearest: compressed-tensors' grids, and a search that never does worse than min and max."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenmill.model.formats.quantized import Scheme
from tokenmill.quantize.methods.rtn import choose_grid, round_to_nearest


@pytest.mark.parametrize("bits", [3, 4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
def test_grids_are_those_of_compressed_tensors(bits: int, symmetric: bool) -> None:
    utils = pytest.importorskip("compressed_tensors.quantization.utils")
    args = pytest.importorskip("compressed_tensors.quantization").QuantizationArgs(
        num_bits=bits, type="int", symmetric=symmetric, strategy="group", group_size=32
    )
    weight = torch.randn(16, 96, generator=torch.Generator().manual_seed(bits))
    groups = weight.view(16, 3, 32)
    scales, zeros = utils.calculate_qparams(groups.amin(-1), groups.amax(-1), args)
    found_scales, found_zeros = choose_grid(weight, Scheme("int", bits, 32, symmetric=symmetric))
    torch.testing.assert_close(found_scales, scales.float(), rtol=1e-3, atol=0)  # ours are float16 values
    if not symmetric:
        assert found_zeros is not None
        # Theirs are signed; the scale's rounding to float16 may move one that lies halfway.
        assert int((found_zeros - 2 ** (bits - 1) - zeros.float()).abs().max()) <= 1


@given(bits=st.integers(2, 8), symmetric=st.booleans(), group=st.sampled_from([0, 8, 32]), seed=st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_no_weight_moves_by_more_than_half_a_step(bits: int, symmetric: bool, group: int, seed: int) -> None:
    weight = torch.randn(6, 64, generator=torch.Generator().manual_seed(seed))
    matrix = round_to_nearest(weight, Scheme("int", bits, group, symmetric=symmetric))
    step = matrix.scales.repeat_interleave(64 // matrix.scales.shape[1], 1)
    moved = (matrix.dequantize() - weight).abs()
    assert float((moved / step).max()) <= 1.02  # the end of the range may lie half a step outside the grid
    assert float((moved > 0.51 * step).float().mean()) <= 2 / (group or 64)  # and nothing else


def test_a_full_range_stores_the_extreme_weight_of_either_sign_and_has_finer_steps() -> None:
    weight = torch.randn(32, 64, generator=torch.Generator().manual_seed(5))
    scheme = Scheme("int", 3, 32)
    scales, zeros = choose_grid(weight, scheme, full_range=True)
    assert zeros is None
    groups = weight.view(32, 2, 32)
    extreme = groups.gather(-1, groups.abs().argmax(-1, keepdim=True)).squeeze(-1)
    torch.testing.assert_close(-4 * scales, extreme, rtol=1e-3, atol=0)  # the scales are float16 values
    assert bool((scales.abs() < choose_grid(weight, scheme)[0]).all())


def test_search_finds_a_better_range() -> None:
    weight = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))
    weight[:, 0] *= 6  # one outlier in each row
    for symmetric in (True, False):
        scheme = Scheme("int", 3, 64, symmetric=symmetric)
        plain, searched = round_to_nearest(weight, scheme), round_to_nearest(weight, scheme, norm=2.0)
        error = [(m.dequantize() - weight).square().sum(1) for m in (plain, searched)]
        assert bool((error[1] <= error[0] + 1e-6).all())
        assert float(error[1].sum()) < 0.95 * float(error[0].sum())


def test_importance_moves_the_range() -> None:
    weight = torch.randn(8, 32, generator=torch.Generator().manual_seed(1))
    importance = torch.ones(32)
    importance[3] = 1e4
    scheme = Scheme("int", 3, 0)
    weighted = round_to_nearest(weight, scheme, 2.0, importance).dequantize()
    plain = round_to_nearest(weight, scheme, 2.0).dequantize()
    assert float((weighted - weight)[:, 3].abs().sum()) < float((plain - weight)[:, 3].abs().sum())


def test_zeros_stay_zero() -> None:
    weight = torch.zeros(4, 32)
    weight[1, 5] = 1.0
    for symmetric in (True, False):
        matrix = round_to_nearest(weight, Scheme("int", 4, 8, symmetric=symmetric))
        assert float(matrix.dequantize()[weight == 0].abs().max()) == 0.0
        assert bool((matrix.scales > 0).all())
