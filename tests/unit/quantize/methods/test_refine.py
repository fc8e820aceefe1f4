"""Codes mended after GPTQ: the cost falls, codes stay in range, zeros stay, and the model's answers diverge less."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.unit.quantize.methods.tiny_blocks import LENGTH, TinyModel
from tokenmill.errors import UserError
from tokenmill.model.formats.quantized import QuantizedMatrix, Scheme
from tokenmill.quantize.calibrate import CalibratedBlock, HiddenStates
from tokenmill.quantize.divergence import head_logits, run_block
from tokenmill.quantize.edges import Edges, JobData
from tokenmill.quantize.methods.gptq import Gptq, factor_hessian, gptq
from tokenmill.quantize.methods.refine import refine
from tokenmill.quantize.recipe import RecipeRequest, build_recipe
from tokenmill.quantize.source import HEAD

_OUT, _IN = 48, 96


def moments(size: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(400, size, generator=generator) @ torch.randn(size, size, generator=generator)
    return rows.T @ rows / 400


def cost(matrix: QuantizedMatrix, weight: Tensor, inputs: Tensor, outputs: Tensor) -> float:
    error = matrix.dequantize() - weight
    return float((outputs @ error @ inputs * error).sum())


def solved(weight: Tensor, inputs: Tensor, scheme: Scheme) -> QuantizedMatrix:
    return gptq(weight, factor_hessian(inputs, 0.01)[0], scheme)


@pytest.mark.parametrize("symmetric", [True, False])
def test_every_sweep_costs_less_and_codes_stay_in_range(symmetric: bool) -> None:
    weight = torch.randn(_OUT, _IN, generator=torch.Generator().manual_seed(0))
    inputs, outputs = moments(_IN, 1), moments(_OUT, 2)
    matrix = solved(weight, inputs, Scheme("int", 3, 32, symmetric=symmetric))
    costs = [cost(matrix, weight, inputs, outputs)]
    for _ in range(3):
        matrix = refine(matrix, weight, inputs, outputs, 1)
        costs.append(cost(matrix, weight, inputs, outputs))
        assert int(matrix.codes.max()) <= 7
    assert costs[1] < 0.8 * costs[0]
    assert costs == sorted(costs, reverse=True)


def test_tiles_of_rows_are_mended_each_for_itself() -> None:
    weight = torch.randn(_OUT, _IN, generator=torch.Generator().manual_seed(0))
    inputs, outputs = moments(_IN, 1), moments(_OUT, 2)
    matrix = solved(weight, inputs, Scheme("int", 4, 32))
    tiles = torch.cat([outputs[:32, :32], torch.cat([outputs[32:, 32:], torch.zeros(16, 16)], 1)])
    found = refine(matrix, weight, inputs, tiles, 2)
    last = QuantizedMatrix(matrix.scheme, matrix.codes[32:], matrix.scales[32:])
    assert torch.equal(found.codes[32:], refine(last, weight[32:], inputs, outputs[32:, 32:], 2).codes)


def test_zeros_stay() -> None:
    weight = torch.randn(_OUT, _IN, generator=torch.Generator().manual_seed(0))
    weight[:, 1::2] = 0.0
    inputs = moments(_IN, 1)
    matrix = refine(solved(weight, inputs, Scheme("int", 4, 32)), weight, inputs, moments(_OUT, 2), 2)
    assert not matrix.dequantize()[:, 1::2].any()


def answers(model: TinyModel, ids: Tensor, metric: str) -> float:
    """How far they move when all linears have 3 bits, block after block as in a job."""
    source, host = model.source, torch.device("cpu")
    solver = Gptq({"metric": metric})
    solver.begin(Edges(source, JobData(ids, 8, host, {})))
    states, expected = HiddenStates(source.embed(ids), 8), source.embed(ids).flatten(0, 1)
    for index in range(source.num_blocks):
        expected = run_block(source, index, expected, source.read_block(index), ids.shape[1])
        block = CalibratedBlock(source, index, states, host)
        names = [name for group in block.groups for name in group.names]
        solver.solve(block, dict.fromkeys(names, Scheme("int", 3, 32)))
        block.advance()
    head, norm = source.read_edge(HEAD), source.decoder.norm
    rows = (expected, states.values.flatten(0, 1))
    one, other = (head_logits(source, norm.of_tensor(each), head).log_softmax(-1) for each in rows)
    return float((one.exp() * (one - other)).sum(-1).mean())


def test_the_answers_diverge_less(tmp_path: Path) -> None:
    model = TinyModel("llama", tmp_path)
    ids = torch.randint(3, 131, (64, LENGTH), generator=torch.Generator().manual_seed(7))
    assert answers(model, ids, "fisher") < 0.97 * answers(model, ids, "plain")


def test_bad_options_and_transforms_are_refused() -> None:
    shapes = {"model.layers.0.mlp.up_proj": (64, 64)}
    for options, words in (((("metric", "fischer"),), "fisher"), ((("metric", "fisher"), ("sweeps", "0")), "sweeps")):
        with pytest.raises(UserError, match=words):
            build_recipe(RecipeRequest("gptq", 4, 32, True, options), shapes)
    for method in ("awq+gptq", "rotation+awq+gptq"):
        with pytest.raises(UserError, match="does not go with awq"):
            build_recipe(RecipeRequest(method, 4, 32, True, (("metric", "fisher"),)), shapes)
    for method in ("wanda+gptq", "rotation+gptq", "spinquant+gptq"):
        assert build_recipe(RecipeRequest(method, 4, 32, True, (("metric", "fisher"),)), shapes).solver.needs_outputs
