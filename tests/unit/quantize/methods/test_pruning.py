"""Pruning: patterns are exact, SparseGPT compensates, later solvers keep the zeros, and files of both kinds load."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.unit.quantize.methods.tiny_blocks import TinyModel, output_loss, outputs
from tokenmill.errors import UserError
from tokenmill.model.formats.quantized import Scheme
from tokenmill.quantize.methods import TRANSFORMS
from tokenmill.quantize.methods.gptq import Gptq, factor_hessian
from tokenmill.quantize.methods.pruning import Pattern, least_of_all, parse_pattern
from tokenmill.quantize.methods.sparsegpt import sparsegpt
from tokenmill.quantize.methods.wanda import wanda_mask
from tokenmill.quantize.recipe import RecipeRequest, build_recipe

_PRUNERS = ("magnitude", "wanda", "sparsegpt")
_FOURS = Pattern(2, 4, 0.5)


def _problem(columns: int = 160) -> tuple[Tensor, Tensor]:
    """A matrix, and the Hessian of correlated inputs of different sizes."""
    generator = torch.Generator().manual_seed(0)
    mixing = torch.randn(columns, columns, generator=generator) / columns**0.5 + 0.3 * torch.eye(columns)
    inputs = torch.randn(900, columns, generator=generator) @ mixing
    inputs *= torch.rand(columns, generator=generator).mul(2).exp()
    return torch.randn(24, columns, generator=generator), inputs.T @ inputs / 900


def _error(pruned: Tensor, weight: Tensor, hessian: Tensor) -> float:
    delta = pruned - weight
    return float(((delta @ hessian) * delta).sum())


def _zeros(weight: Tensor) -> Tensor:
    return (weight == 0).view(weight.shape[0], -1, 4).sum(2)


@pytest.mark.parametrize("columns", [160, 20, 288])
def test_two_of_four_and_the_order_of_methods(columns: int) -> None:
    weight, hessian = _problem(columns)
    factor, _ = factor_hessian(hessian, 0.01)
    by_size = weight.masked_fill(wanda_mask(weight, torch.ones(columns), _FOURS), 0.0)
    by_input = weight.masked_fill(wanda_mask(weight, hessian.diagonal(), _FOURS), 0.0)
    compensated = sparsegpt(weight, factor, _FOURS)
    for pruned in (by_size, by_input, compensated):
        assert bool((_zeros(pruned) == 2).all())
    errors = [_error(each, weight, hessian) for each in (by_size, by_input, compensated)]
    assert errors[0] > errors[1] > 1.5 * errors[2]


def test_unstructured_shares_are_exact() -> None:
    weight, hessian = _problem(288)
    factor, _ = factor_hessian(hessian, 0.01)
    pruned = sparsegpt(weight, factor, Pattern(0, 0, 0.7))
    assert float((pruned == 0).float().mean()) == pytest.approx(0.7, abs=0.003)
    assert int(least_of_all(torch.zeros(10, 10), 0.3).sum()) == 30  # ties
    assert bool((wanda_mask(weight, hessian.diagonal(), Pattern(0, 0, 0.25)).sum(1) == 72).all())


def test_sparsegpt_is_the_textbook_loop() -> None:
    weight, hessian = _problem(32)
    factor, _ = factor_hessian(hessian, 0.01)
    left, expected = weight.clone(), torch.zeros_like(weight)
    for column in range(32):
        if column % 4 == 0:
            scores = (left[:, column : column + 4] / factor.diagonal()[column : column + 4]).square()
            zero = torch.zeros_like(scores, dtype=torch.bool)
            zero.scatter_(1, scores.topk(2, dim=1, largest=False).indices, True)
        expected[:, column] = left[:, column].masked_fill(zero[:, column % 4], 0.0)
        error = (left[:, column] - expected[:, column]) / factor[column, column]
        left[:, column:] -= error.unsqueeze(1) * factor[column, column:]
    assert torch.allclose(sparsegpt(weight, factor, _FOURS), expected, atol=1e-4)


@pytest.mark.parametrize("name", _PRUNERS)
def test_blocks_are_pruned_and_gptq_keeps_the_zeros(name: str, tmp_path: Path) -> None:
    model = TinyModel("llama", tmp_path)
    block = model.block()
    names = [each for group in block.groups for each in group.names]
    TRANSFORMS.get(name)().apply(block, dict.fromkeys(names, Scheme("float", 16)))
    masks = {each: block.weight(each) == 0 for each in names}
    assert all(float(mask.float().mean()) == 0.5 for mask in masks.values())
    schemes = {each: Scheme("int", 8, 16) for each in names}
    for each, matrix in Gptq().solve(block, schemes).items():
        assert not bool(matrix.dequantize()[masks[each]].any())


def test_compensation_helps_the_block(tmp_path: Path) -> None:
    model = TinyModel("llama", tmp_path)
    losses = {}
    for name in _PRUNERS:
        block = model.block()
        expected = outputs(block)
        names = [each for group in block.groups for each in group.names]
        TRANSFORMS.get(name)().apply(block, dict.fromkeys(names, Scheme("float", 16)))
        losses[name] = output_loss(block, expected)
    assert losses["sparsegpt"] < min(losses["wanda"], losses["magnitude"])


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (RecipeRequest("wanda", options=(("pattern", "3:2"),)), "not a pattern"),
        (RecipeRequest("wanda", options=(("pattern", "unstructured"), ("sparsity", 1.5))), "between 0 and 1"),
        (RecipeRequest("sparsegpt+rotation"), "after sparsegpt"),
        (RecipeRequest("sparsegpt+hqq"), "does not keep the zeros"),
        (RecipeRequest("wanda", bits=4), "16 bits, not 4"),
    ],
)
def test_what_cannot_be_is_refused(request_: RecipeRequest, words: str) -> None:
    with pytest.raises(UserError, match=words):
        build_recipe(request_, {"model.layers.0.mlp.up_proj": (64, 128)})


def test_the_scheme_says_what_a_file_may_leave_out() -> None:
    shapes = {"model.layers.0.mlp.up_proj": (64, 128)}
    assert build_recipe(RecipeRequest("sparsegpt"), shapes).scheme.sparsity == "2:4"
    loose = RecipeRequest("sparsegpt", options=(("pattern", "unstructured"),))
    assert build_recipe(loose, shapes).scheme.sparsity == ""
    joint = build_recipe(RecipeRequest("sparsegpt+gptq", bits=4), shapes)
    assert (joint.scheme.element, joint.scheme.sparsity) == ("int", "")
    assert parse_pattern("x", "4:8", 0.5) == Pattern(4, 8, 0.5)
