"""OmniQuant's scales leave the block's function, and gptq (or plain rounding) errs less after them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.unit.quantize.methods.tiny_blocks import TinyModel, output_loss, outputs
from tokenmill.errors import UserError
from tokenmill.model.formats.quantized import Scheme
from tokenmill.quantize.base import Solver
from tokenmill.quantize.methods.gptq import Gptq, factor_hessian, gptq
from tokenmill.quantize.methods.omniquant import OmniQuant, expected_error, pivots
from tokenmill.quantize.recipe import RecipeRequest, build_recipe

_SHAPES = {"model.layers.0.self_attn.o_proj": (64, 64)}


@pytest.mark.parametrize("name", ["llama-biases", "gemma3", "deepseek_v3"])
def test_scales_change_the_weights_and_not_the_function(name: str, tmp_path: Path) -> None:
    block = TinyModel(name, tmp_path).block()
    expected, before = outputs(block), dict(block.tensors)
    scheme = Scheme("int", 3, 8)  # divides the ranks of latent attention too
    OmniQuant({"steps": 20, "rate": 0.1}).apply(block, {n: scheme for group in block.groups for n in group.names})
    assert torch.allclose(outputs(block), expected, atol=2e-4 * float(expected.abs().max()))
    moved = [n for n, value in block.tensors.items() if not torch.equal(value, before[n])]
    assert {group.source for group in block.groups if group.source} <= set(moved)


@pytest.mark.parametrize("symmetric", [True, False])
def test_gptq_errs_less_after_it(symmetric: bool, tmp_path: Path) -> None:
    model = TinyModel("llama", tmp_path)
    losses = []
    for learned in (False, True):
        block = model.block()
        expected = outputs(block)
        scheme_of = {n: Scheme("int", 3, 16, symmetric=symmetric) for group in block.groups for n in group.names}
        if learned:
            OmniQuant().apply(block, scheme_of)
        solver: Solver = Gptq()
        solver.solve(block, scheme_of)
        losses.append(output_loss(block, expected))
    assert losses[1] < (0.97 if symmetric else 1.0) * losses[0]


@pytest.mark.parametrize("symmetric", [True, False])
def test_the_expected_error_is_that_of_gptq(symmetric: bool) -> None:
    """Up to one factor for all scales: of uniform rounding it is a twelfth of the squared step."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(500, 64, generator=generator) @ torch.randn(64, 64, generator=generator)
    inputs *= torch.linspace(0.2, 3.0, 64)
    hessian, weight = inputs.T @ inputs / 500, torch.randn(256, 64, generator=generator)
    scheme = Scheme("int", 5, 16, symmetric=symmetric)
    left, ratios = pivots(hessian, scheme.group_size), []
    for spread in (0.0, 0.5, 1.0):
        scale = (torch.randn(64, generator=generator) * spread).exp()
        scaled = hessian / torch.outer(scale, scale)
        error = gptq(weight * scale, factor_hessian(scaled, 0.01)[0], scheme).dequantize() / scale - weight
        found = float((error @ hessian * error).sum())
        ratios.append(found / float(expected_error(weight, left, scheme, scale)))
    assert max(ratios) < 1.5 * min(ratios)  # columns that a scale makes small err less than uniformly
    assert 0.2 < min(ratios) * 3 / 4 < 2.0  # (2 span / 2^bits)^2 / 12 = span^2 / (3 * 4^bits), less what clips


def test_inputs_that_are_always_zero_cost_nothing() -> None:
    hessian = torch.diag(torch.tensor([0.0, 1e-3, 1e-3, 1e-3]))
    left = pivots(hessian, 4)
    assert left[0] == 0.0
    assert bool((left[1:] > 0).all())


def test_only_groups_that_are_rounded_and_can_be_scaled_are_touched(tmp_path: Path) -> None:
    block = TinyModel("llama", tmp_path).block()
    before = dict(block.tensors)
    query = block.groups[0].names[0]
    OmniQuant().apply(block, {query: Scheme("int", 3, 32)})
    for group in block.groups[1:]:
        for name in group.names:
            assert torch.equal(block.weight(name), before[name])
    key = block.groups[0].names[1]
    scale = block.weight(key) / before[key]
    assert torch.allclose(scale, scale[:1].expand_as(scale), rtol=1e-4)


@pytest.mark.parametrize(
    ("method", "options", "reason"),
    [
        ("omniquant", (("steps", 0),), "below its minimum"),
        ("omniquant", (("rate", 0.0),), "below its minimum"),
        ("omniquant+smoothquant", (), "float inputs"),
        ("omniquant+nf4", (), "integer weights"),
        ("omniquant+gptq", (("metric", "fisher"),), "metric=plain"),
    ],
)
def test_what_does_not_go_with_it_is_refused_first(
    method: str, options: tuple[tuple[str, object], ...], reason: str
) -> None:
    with pytest.raises(UserError, match=reason):
        build_recipe(RecipeRequest(method, options=options), _SHAPES)


def test_by_default_gptq_follows() -> None:
    recipe = build_recipe(RecipeRequest("omniquant", bits=3, group_size=32), _SHAPES)
    assert [step.name for step in recipe.steps] == ["omniquant", "gptq"]
    assert recipe.scheme == Scheme("int", 3, 32)
