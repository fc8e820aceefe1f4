"""Weights that make good for what rounding earlier blocks lost, and scales fitted to codes that are chosen."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.unit.quantize.methods.tiny_blocks import LENGTH, TinyModel
from tokenmill.errors import UserError
from tokenmill.model.formats.quantized import QuantizedMatrix, Scheme
from tokenmill.quantize.base import Drift
from tokenmill.quantize.calibrate import CalibratedBlock, HiddenStates
from tokenmill.quantize.methods.drift import undrifted
from tokenmill.quantize.methods.gptq import Gptq, factor_hessian, gptq
from tokenmill.quantize.methods.refine import fit_scales, refine
from tokenmill.quantize.recipe import RecipeRequest, build_recipe

_HOST = torch.device("cpu")


def drifted_rows() -> tuple[Tensor, Tensor, Tensor]:
    """(weight, inputs of the float model, inputs as they are now)."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(500, 32, generator=generator) @ torch.randn(32, 32, generator=generator)
    return torch.randn(8, 32, generator=generator), x, x + 0.3 * torch.randn(500, 32, generator=generator) * x.std()


def drift_of(x: Tensor, y: Tensor) -> Drift:
    def means(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return y.T @ y / len(y), x.T @ y / len(y)

    return Drift(*means(x, y), *means(x[::2], y[::2]), half=len(x[::2]) / len(x))


def test_outputs_come_nearer_to_the_float_model_and_zeros_stay() -> None:
    weight, x, y = drifted_rows()
    weight[3, 5] = 0.0
    found = undrifted({"a": weight[:3], "b": weight[3:]}, drift_of(x, y))
    assert found["b"][0, 5] == 0.0
    before, after = ((y @ each.T - x @ weight.T).square().mean() for each in (weight, torch.cat(list(found.values()))))
    assert after < 0.9 * before


def test_what_few_tokens_say_by_chance_is_left_out() -> None:
    """The drift is noise: what follows from it in the tokens that are known does not hold for others."""
    weight, x, _ = drifted_rows()
    few, others = x[:40], x[40:]
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(5)) * 0.05 * x.std()
    found = undrifted({"a": weight}, drift_of(few + noise[:40], few))["a"]
    lost = [float(((others @ each.T) - (others + noise[40:]) @ weight.T).square().mean()) for each in (weight, found)]
    assert lost[1] < 1.02 * lost[0]


def test_inputs_that_have_not_drifted_change_nothing() -> None:
    weight, x, _ = drifted_rows()
    torch.testing.assert_close(undrifted({"a": weight}, drift_of(x, x))["a"], weight)


def test_inputs_that_were_always_zero_change_nothing() -> None:
    weight, x, _ = drifted_rows()
    assert torch.equal(undrifted({"a": weight}, drift_of(0 * x, 0 * x))["a"], weight)


def blocks_beside_float(model: TinyModel) -> tuple[CalibratedBlock, Tensor, Tensor]:
    """A block whose inputs have drifted, and both inputs."""
    states = model.source.embed(model.ids).clone()
    drifted = states + 0.1 * torch.randn(states.shape, generator=torch.Generator().manual_seed(1))
    both = HiddenStates(drifted.clone(), 5), HiddenStates(states.clone(), 5)
    return CalibratedBlock(model.source, 0, both[0], _HOST, both[1]), drifted, states


def test_statistics_beside_the_float_model(tmp_path: Path) -> None:
    model = TinyModel("llama", tmp_path)
    block, drifted, states = blocks_beside_float(model)
    block.begin_rounding()
    first = block.groups[0]
    statistics, drift = block.statistics_beside_float(first)
    assert statistics.hessian is not None
    assert drift is not None
    norm = block.weight("model.layers.0.input_layernorm")

    def normed(rows: Tensor) -> Tensor:
        rows = rows.flatten(0, 1)
        eps = model.source.description.norm_eps
        return rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + eps) * norm

    y, x = normed(drifted), normed(states)
    assert drift.square is statistics.hessian
    torch.testing.assert_close(drift.square, y.T @ y / len(y), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(drift.cross, x.T @ y / len(y), rtol=1e-4, atol=1e-5)
    y, x = normed(drifted[::2]), normed(states[::2])  # whichever batches they were in
    assert drift.half == 0.5
    torch.testing.assert_close(drift.half_square, y.T @ y / len(y), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(drift.half_cross, x.T @ y / len(y), rtol=1e-4, atol=1e-5)


def test_the_float_states_move_on_once_and_with_float_weights(tmp_path: Path) -> None:
    model = TinyModel("llama", tmp_path)
    block, _, states = blocks_beside_float(model)
    expected = torch.stack([block.forward(each, {}) for each in states])
    block.begin_rounding()
    name = block.groups[0].names[0]
    block.replace(name, torch.zeros_like(block.weight(name)))
    targets = block.targets()
    assert targets is not None
    block.advance_float()
    torch.testing.assert_close(torch.stack(list(targets)), expected)


def lost(model: TinyModel, target: str) -> float:
    """Of the states behind the last block, all linears in 3 bits, block after block as in a job."""
    solver = Gptq({"target": target})
    rounded, exact = (HiddenStates(model.source.embed(model.ids).clone(), 6) for _ in range(2))
    for index in range(model.source.num_blocks):
        block = CalibratedBlock(model.source, index, rounded, _HOST, exact)
        block.begin_rounding()
        names = [name for group in block.groups for name in group.names]
        solver.solve(block, dict.fromkeys(names, Scheme("int", 3, 32)))
        block.advance_float()
        block.advance()
    return float((rounded.values - exact.values).square().mean())


def test_gptq_loses_less_when_blocks_mend_what_others_lost(tmp_path: Path) -> None:
    model = TinyModel("llama", tmp_path)
    model.ids = torch.randint(3, 131, (64, LENGTH), generator=torch.Generator().manual_seed(7))
    assert lost(model, "float") < lost(model, "block")


def test_an_unknown_target_is_refused() -> None:
    with pytest.raises(UserError, match="target of gptq"):
        build_recipe(
            RecipeRequest("gptq", 4, 32, True, (("target", "flout"),)), {"model.layers.0.mlp.up_proj": (64, 64)}
        )


def cost(matrix: QuantizedMatrix, weight: Tensor, inputs: Tensor) -> float:
    error = matrix.dequantize() - weight
    return float((error @ inputs * error).sum())


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group", [0, 8])
def test_fitted_scales_cost_less_with_the_same_codes(symmetric: bool, group: int) -> None:
    weight, x, _ = drifted_rows()
    inputs = x.T @ x / len(x)
    matrix = gptq(
        weight, factor_hessian(inputs, 0.01)[0], Scheme("int", 3, group, symmetric=symmetric), full_range=True
    )
    fitted = fit_scales(matrix, weight, inputs)
    assert torch.equal(fitted.codes, matrix.codes)
    assert torch.equal(fitted.scales, fitted.scales.half().float())
    assert cost(fitted, weight, inputs) < cost(matrix, weight, inputs)


def test_mended_scales_cost_less_than_mended_codes_alone() -> None:
    weight, x, y = drifted_rows()
    inputs, outputs = x.T @ x / len(x), (y[:, :8].T @ y[:, :8]) / len(y)
    matrix = gptq(weight, factor_hessian(inputs, 0.01)[0], Scheme("int", 3, 8))
    codes_alone = matrix
    for _ in range(6):
        codes_alone = refine(codes_alone, weight, inputs, outputs, 1)  # one sweep has no turn of the scales
    both = refine(matrix, weight, inputs, outputs, 6)

    def price(found: QuantizedMatrix) -> float:
        error = found.dequantize() - weight
        return float((outputs @ error @ inputs * error).sum())

    assert price(both) < price(codes_alone)
