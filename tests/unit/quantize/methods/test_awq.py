"""AWQ keeps the block's function, lowers the error of rounding, and clips only where that helps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.unit.quantize.methods.tiny_blocks import TinyModel, output_loss, outputs
from tokenmill.errors import UserError
from tokenmill.model.formats.quantized import Scheme
from tokenmill.quantize.methods.awq import Awq, candidate_scales, clip, narrow, output_error, widen
from tokenmill.quantize.methods.rtn import RoundToNearest, round_to_nearest

SCHEME = Scheme("int", 3, 32, symmetric=False)


@pytest.mark.parametrize("name", ["llama", "llama-biases", "qwen2", "qwen3", "gemma3", "deepseek_v3"])
def test_scales_change_the_weights_and_not_the_function(name: str, tmp_path: Path) -> None:
    block = TinyModel(name, tmp_path).block()
    expected, before = outputs(block), dict(block.tensors)
    scheme = replace(SCHEME, group_size=8)  # divides the ranks of latent attention too
    Awq({"clip": False}).apply(block, {n: scheme for group in block.groups for n in group.names})
    assert torch.allclose(outputs(block), expected, atol=2e-4 * float(expected.abs().max()))
    moved = [n for n, value in block.tensors.items() if not torch.equal(value, before[n])]
    assert {group.source for group in block.groups} & set(moved)


def test_rounding_errs_less_after_it(tmp_path: Path) -> None:
    model = TinyModel("llama", tmp_path)
    plain, scaled, clipped = model.block(), model.block(), model.block()
    scheme_of = {n: SCHEME for group in plain.groups for n in group.names}
    expected = outputs(plain)
    Awq({"clip": False}).apply(scaled, scheme_of)
    Awq().apply(clipped, scheme_of)
    losses = []
    for block in (plain, scaled, clipped):
        RoundToNearest().solve(block, scheme_of)
        losses.append(output_loss(block, expected))
    assert losses[1] < 0.95 * losses[0]
    assert losses[2] < losses[0]


def test_only_named_linears_are_clipped_and_queries_and_keys_never(tmp_path: Path) -> None:
    block = TinyModel("llama", tmp_path).block()
    value, output = block.groups[0].names[2], block.groups[1].names[0]
    limits = {n: block.weight(n).abs().max() for group in block.groups for n in group.names}
    before = {n: block.weight(n) for n in limits}
    step = Awq({"max_shrink": 0.9})
    step.apply(block, {n: Scheme("int", 2, 32) for n in (*block.groups[0].names, output)})
    for n in before:
        if n.endswith(("gate_proj", "up_proj", "down_proj")):
            assert torch.equal(block.weight(n), before[n])
    query = block.groups[0].names[0]
    scale = (block.weight(query) / before[query]).median(0).values
    assert torch.allclose(block.weight(query), before[query] * scale, rtol=1e-4)
    assert not torch.allclose(block.weight(value), before[value] * scale, rtol=1e-3)


def test_clip_never_raises_the_error_of_a_group() -> None:
    torch.manual_seed(0)
    inputs = torch.randn(400, 64) @ torch.randn(64, 64)
    hessian = inputs.T @ inputs / 400
    weight = torch.randn(48, 64) * torch.rand(48, 64).pow(3)
    scheme = Scheme("int", 2, 32)
    clipped = clip(weight, hessian, scheme, steps=10, max_shrink=0.5)
    for begin in (0, 32):
        cut = slice(begin, begin + 32)
        block, rows = hessian[cut, cut], weight[:, cut]
        plain = round_to_nearest(rows, scheme).dequantize() - rows
        better = round_to_nearest(clipped[:, cut], scheme).dequantize() - rows
        assert output_error(better, block) < 0.9 * output_error(plain, block)


def test_widths_of_grouped_heads_match() -> None:
    scale = torch.arange(1.0, 9.0)  # 2 heads of 4
    wide = widen(scale, 3, 4)
    assert wide.view(2, 3, 4)[0].tolist() == [[1, 2, 3, 4]] * 3
    assert torch.equal(narrow(wide, 3, 4), scale)
    assert torch.equal(widen(scale, 1, 4), scale)


def test_candidates_are_balanced_and_finite_for_dead_channels() -> None:
    inputs, sizes = torch.tensor([0.0, 1.0, 9.0]), torch.tensor([0.0, 0.5, 0.1])
    for given in (None, sizes):
        for scale in candidate_scales(inputs, given, 20):
            assert torch.isfinite(scale).all()
            assert (scale > 0).all()
            assert float(scale.max() * scale.min()) == pytest.approx(1.0, rel=1e-4)


def test_unknown_option_is_refused() -> None:
    with pytest.raises(UserError, match="grid"):
        Awq({"gird": 10})
