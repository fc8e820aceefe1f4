"""GPTQ: the recursion is the textbook loop; it beats plain rounding where inputs are correlated and is it where not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tokenmill.errors import UserError
from tokenmill.model.formats.quantized import QuantizedMatrix, Scheme
from tokenmill.quantize.methods.gptq import ORDERS, Gptq, column_order, factor_hessian, gptq, invert_upper_
from tokenmill.quantize.methods.rtn import choose_grid, round_to_nearest

_OUT, _IN = 24, 160


def _hessian(seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(_IN, _IN, generator=generator) / _IN**0.5
    inputs = torch.randn(600, _IN, generator=generator) @ (mixing + 0.3 * torch.eye(_IN))
    inputs *= torch.rand(_IN, generator=generator).mul(3).exp()
    return inputs.T @ inputs / 600


def _weight(seed: int = 1) -> Tensor:
    return torch.randn(_OUT, _IN, generator=torch.Generator().manual_seed(seed))


def _output_error(matrix: QuantizedMatrix, weight: Tensor, hessian: Tensor) -> float:
    delta = matrix.dequantize() - weight
    return float(torch.einsum("oi,ij,oj->", delta, hessian, delta))


def _textbook(weight: Tensor, hessian: Tensor, scheme: Scheme) -> Tensor:
    """The loop of the paper, column by column, with the factor made the long way."""
    weight, hessian = weight.clone(), hessian.clone()
    hessian.diagonal().add_(0.01 * hessian.diagonal().mean())
    factor = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(hessian)), upper=True)
    result = torch.zeros_like(weight)
    for column in range(weight.shape[1]):
        if column % scheme.group_size == 0:
            group = Scheme("int", scheme.bits, 0, symmetric=scheme.symmetric)
            scales, zeros = choose_grid(weight[:, column : column + scheme.group_size], group)
        middle = 2.0 ** (scheme.bits - 1) if zeros is None else zeros[:, 0]
        code = (weight[:, column] / scales[:, 0] + middle).round().clamp(0, 2**scheme.bits - 1)
        result[:, column] = (code - middle) * scales[:, 0]
        error = (weight[:, column] - result[:, column]) / factor[column, column]
        weight[:, column:] -= error.unsqueeze(1) * factor[column, column:]
    return result


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group_size", [4, 8, 10, 16, 32, 80, 160])
def test_recursion_is_the_textbook_loop(symmetric: bool, group_size: int) -> None:
    scheme = Scheme("int", 4, group_size, symmetric=symmetric)
    weight, hessian = _weight(), _hessian()
    factor, _ = factor_hessian(hessian, 0.01)
    found = gptq(weight, factor, scheme).dequantize()
    expected = _textbook(weight, hessian, scheme)
    # float32 rounding may tip a single code; then its row follows another path.
    differing = ((found - expected).abs() > 1e-3).any(1).float().mean()
    assert float(differing) < 0.1


@pytest.mark.parametrize("bits", [3, 4])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("group_size", [0, 32])
def test_beats_rounding_on_correlated_inputs(bits: int, order: str, group_size: int) -> None:
    scheme = Scheme("int", bits, group_size)
    weight, hessian = _weight(), _hessian()
    columns = column_order(hessian.diagonal(), group_size, order)
    factor, _ = factor_hessian(hessian, 0.01, columns)
    solved = gptq(weight, factor, scheme, columns, static=order == "static")
    plain = round_to_nearest(weight, scheme)
    assert _output_error(solved, weight, hessian) < 0.7 * _output_error(plain, weight, hessian)


@pytest.mark.parametrize("order", ORDERS)
def test_is_rounding_when_inputs_are_independent(order: str) -> None:
    scheme = Scheme("int", 4, 32, symmetric=False)
    weight, hessian = _weight(), torch.eye(_IN)
    columns = column_order(hessian.diagonal(), 32, order)
    factor, _ = factor_hessian(hessian, 0.01, columns)
    solved = gptq(weight, factor, scheme, columns, static=order == "static")
    plain = round_to_nearest(weight, scheme)
    assert torch.equal(solved.codes, plain.codes)
    assert torch.equal(solved.scales, plain.scales)


def test_factor_is_that_of_the_damped_inverse() -> None:
    hessian = _hessian()
    order = torch.randperm(_IN, generator=torch.Generator().manual_seed(2))
    factor, damping = factor_hessian(hessian, 0.01, order)
    assert damping == 0.01
    damped = hessian[order][:, order].double()
    damped.diagonal().add_(0.01 * damped.diagonal().mean())
    torch.testing.assert_close((factor.T @ factor).double(), torch.linalg.inv(damped), rtol=1e-2, atol=1e-4)
    assert torch.equal(factor, factor.triu())


def test_inverts_triangles_of_any_size() -> None:
    for size in (1, 63, 64, 65, 200):
        matrix = torch.randn(size, size, dtype=torch.float64).triu() + 5 * torch.eye(size, dtype=torch.float64)
        inverse = matrix.clone()
        invert_upper_(inverse)
        torch.testing.assert_close(inverse @ matrix, torch.eye(size, dtype=torch.float64))


def test_damping_grows_until_the_factorization_succeeds() -> None:
    row = torch.randn(_IN, generator=torch.Generator().manual_seed(3))
    hessian = torch.outer(row, row)
    hessian -= 0.015 * hessian.diagonal().mean() * torch.eye(_IN)  # not even semidefinite
    _, damping = factor_hessian(hessian, 0.01)
    assert damping > 0.01
    with pytest.raises(UserError, match="calibration text"):
        factor_hessian(torch.full((4, 4), float("nan")), 0.01)


def test_dead_inputs_become_zero() -> None:
    scheme = Scheme("int", 4, 32)
    hessian = _hessian()
    hessian[7], hessian[:, 7] = 0.0, 0.0
    solved = Gptq()._solve_group({"a": _weight()}, hessian, {"a": scheme})["a"]
    assert float(solved.dequantize()[:, 7].abs().max()) == 0.0


def test_the_full_range_serves_small_integers() -> None:
    hessian, weights = _hessian(), {"a": _weight()}
    plain, full = Gptq({"full_range": False}), Gptq({"full_range": True})
    for scheme, changes in (
        (Scheme("int", 3, 32), True),
        (Scheme("int", 8, 32), False),
        (Scheme("int", 4, 32, activations="int8_token"), True),
    ):
        found = [each._solve_group(dict(weights), hessian, {"a": scheme})["a"] for each in (plain, full)]
        assert bool((found[1].scales < 0).any()) == changes
        errors = [_output_error(each, weights["a"], hessian) for each in found]
        assert errors[1] < errors[0] if changes else errors[1] == errors[0]


def test_stacked_matrices_are_solved_as_if_alone() -> None:
    hessian, scheme = _hessian(), Scheme("int", 4, 32)
    other = Scheme("int", 8, 32)
    weights = {"a": _weight(4), "b": _weight(5), "c": _weight(6)}
    schemes = {"a": scheme, "b": scheme, "c": other}
    together = Gptq()._solve_group(dict(weights), hessian, schemes)
    for name, weight in weights.items():
        alone = Gptq()._solve_group({name: weight}, hessian, schemes)[name]
        assert torch.equal(together[name].codes, alone.codes)
        assert together[name].scheme == schemes[name]


def test_check_refuses_what_cannot_be_filled() -> None:
    with pytest.raises(UserError, match="use --group-size 96"):
        Gptq().check("x", (8, 288), Scheme("int", 4, 128))
    with pytest.raises(UserError, match="fp8"):
        Gptq().check("x", (8, 288), Scheme("e4m3", 8, 0))
    with pytest.raises(UserError, match="valid: gar, none, static"):
        Gptq({"order": "random"}).check("x", (8, 288), Scheme("int", 4, 32))
