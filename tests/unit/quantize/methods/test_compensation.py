"""Learned rounding that starts at GPTQ's result: before the first step it is that, and the block is unchanged."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.unit.quantize.methods.tiny_blocks import TinyModel
from tokenmill.model.formats.quantized import Scheme
from tokenmill.quantize.methods.autoround import LearnedRounding
from tokenmill.quantize.methods.compensation import gptq_starts, stacked_starts
from tokenmill.quantize.methods.gptq import Gptq


@pytest.mark.parametrize("group_size", [0, 32])
@pytest.mark.parametrize(("symmetric", "full_range"), [(True, True), (True, False), (False, False)])
def test_before_the_first_step_it_is_gptq(group_size: int, symmetric: bool, full_range: bool, tmp_path: Path) -> None:
    model = TinyModel("llama", tmp_path)
    block, solved = model.block(), model.block()
    before = dict(block.tensors)
    scheme = Scheme("int", 3, group_size, symmetric=symmetric)
    scheme_of = {name: scheme for group in block.groups for name in group.names}
    expected = Gptq({"full_range": full_range}).solve(solved, scheme_of)
    starts = gptq_starts(block, scheme_of, full_range)
    assert all(torch.equal(block.tensors[name], value) for name, value in before.items())
    assert set(starts) == set(expected)
    for name in block.groups[0].names:  # the others see these, whose scales gptq fits to its codes
        start = starts[name]
        assert torch.equal(start.matrix.codes, expected[name].codes)
        rounding = LearnedRounding(start.weight, scheme, learns_range=True, full_range=full_range, grid=start.matrix)
        finished = rounding.finish()
        assert torch.equal(finished.codes, expected[name].codes)
        assert torch.equal(finished.scales, start.matrix.scales)  # which gptq fits to its codes, and descent learns
        assert torch.equal(rounding.dequantize(), start.matrix.dequantize())


def test_inputs_that_are_independent_or_never_seen_change_nothing() -> None:
    weights = {"a": torch.randn(8, 96), "b": torch.randn(4, 96)}
    for hessian in (torch.diag(torch.rand(96) + 0.1), torch.zeros(96, 96)):
        starts = stacked_starts(weights, hessian, Scheme("int", 4, 32), True)
        for name, weight in weights.items():
            assert torch.allclose(starts[name].weight, weight, atol=1e-5)
