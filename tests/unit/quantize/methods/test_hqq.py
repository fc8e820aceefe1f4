"""HQQ: less of its own error than rounding, zero points that files hold, and the shrinkage it is named after."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.unit.quantize.methods.fake_block import FakeBlock, random_weight
from tokenmill.errors import UserError
from tokenmill.model.formats.packed_int import PackedIntFormat, PackedIntWeight
from tokenmill.model.formats.quantized import QuantizedMatrix, Scheme
from tokenmill.quantize.methods.hqq import Hqq, half_quadratic, shrink
from tokenmill.quantize.methods.rtn import round_to_nearest

OPTIONS = Hqq.Options()


def scheme(bits: int, group_size: int = 64) -> Scheme:
    return Scheme("int", bits, group_size, symmetric=False)


def lp_error(matrix: QuantizedMatrix, weight: Tensor, norm: float) -> float:
    return float((matrix.dequantize() - weight).abs().pow(norm).sum())


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_lowers_the_norm_it_minimizes(bits: int) -> None:
    weight = random_weight(64, 256)
    rounded = round_to_nearest(weight, scheme(bits))
    fitted = half_quadratic(weight, scheme(bits), OPTIONS)
    assert lp_error(fitted, weight, 0.7) < {2: 0.9, 3: 0.95, 4: 0.98}[bits] * lp_error(rounded, weight, 0.7)
    assert lp_error(fitted, weight, 1.0) < lp_error(rounded, weight, 1.0)


def test_real_zero_points_as_published() -> None:
    weight = random_weight(64, 256)
    real = half_quadratic(weight, scheme(3), OPTIONS, whole_zeros=False)
    assert real.zeros is not None
    assert not torch.equal(real.zeros, real.zeros.round())
    assert lp_error(real, weight, 0.7) < lp_error(round_to_nearest(weight, scheme(3)), weight, 0.7)


def test_a_file_holds_the_result() -> None:
    weight = random_weight(32, 128)
    matrix = Hqq().quantize(weight, scheme(4))
    tensors = PackedIntFormat.encode(matrix)
    again = PackedIntWeight(tensors, "w", {"num_bits": 4, "group_size": 64}).decode()
    assert torch.equal(again.dequantize(), matrix.dequantize())


def test_rows_are_independent_of_how_they_are_cut() -> None:
    weight = random_weight(1500, 64)
    whole = Hqq().quantize(weight, scheme(3))
    assert torch.equal(whole.codes[1200:], half_quadratic(weight[1200:], scheme(3), OPTIONS).codes)


def test_block_sees_the_result() -> None:
    view = FakeBlock({"q": random_weight(16, 64)}, [("q",)])
    matrices = Hqq({"norm": 0.5, "iterations": 3}).solve(view, {"q": scheme(4)})
    assert torch.equal(view.weights["q"], matrices["q"].dequantize())


def test_shrinkage_keeps_only_large_errors() -> None:
    errors = torch.tensor([-2.0, -0.01, 0.0, 0.01, 2.0])
    kept = shrink(errors, errors.abs() ** 0.7, beta=10.0)
    assert kept[1:4].tolist() == [0.0, 0.0, 0.0]
    assert kept[4] == -kept[0] == pytest.approx(2.0 - 2.0**-0.3 / 10)


def test_what_it_cannot_do_is_refused() -> None:
    with pytest.raises(UserError, match="asymmetric"):
        Hqq().check("q", (8, 64), Scheme("int", 4, 64))
    with pytest.raises(UserError, match="norm"):
        Hqq({"norm": 1.5}).check("q", (8, 64), scheme(4))
    with pytest.raises(UserError, match="--group-size 96"):
        Hqq().check("q", (8, 96), Scheme("int", 4, 64, symmetric=False))
