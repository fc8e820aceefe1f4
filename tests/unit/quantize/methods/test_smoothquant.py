"""SmoothQuant keeps the block's function and makes int8 activations cost less."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.unit.quantize.methods.tiny_blocks import TinyModel, outputs
from tokenmill.errors import UserError
from tokenmill.model.formats.quantized import Scheme
from tokenmill.quantize.methods.smoothquant import (
    SEARCHED_ALPHAS,
    SmoothQuant,
    refine,
    round_activations,
    rounding_errors,
    smoothing_scale,
)

SCHEME = Scheme("int", 8, 0, activations="int8_token")


@pytest.mark.parametrize("name", ["llama-biases", "gemma3"])
@pytest.mark.parametrize("search", [True, False])
def test_smoothing_changes_the_weights_and_not_the_function(name: str, search: bool, tmp_path: Path) -> None:
    block = TinyModel(name, tmp_path).block()
    expected, before = outputs(block), dict(block.tensors)
    SmoothQuant({"search": search, "alpha": 0.8}).apply(
        block, {n: SCHEME for group in block.groups for n in group.names}
    )
    assert torch.allclose(outputs(block), expected, atol=2e-4 * float(expected.abs().max()))
    assert not torch.equal(block.weight(block.groups[0].names[0]), before[block.groups[0].names[0]])


def test_paths_through_linears_are_optional(tmp_path: Path) -> None:
    block = TinyModel("llama", tmp_path).block()
    before = dict(block.tensors)
    scheme_of = {n: SCHEME for group in block.groups for n in group.names}
    SmoothQuant({"values": False, "products": False, "search": False}).apply(block, scheme_of)
    for group in block.groups:
        for name in group.names:
            assert torch.equal(block.weight(name), before[name]) != group.source_is_norm


def test_less_error_where_a_channel_stands_out() -> None:
    torch.manual_seed(1)
    sample, weight = torch.randn(64, 32), torch.randn(48, 32)
    sample[:, 3] *= 50.0
    scale = smoothing_scale(sample.abs().amax(0), weight.abs().amax(0), 0.5)
    plain, smoothed = rounding_errors(sample, [weight], [SCHEME], [torch.ones(32), scale])
    assert smoothed < 0.5 * plain


def test_the_search_is_no_worse_than_any_fixed_strength(tmp_path: Path) -> None:
    model = TinyModel("llama", tmp_path)
    errors = []
    for options in ({"search": True}, {"search": False, "alpha": 0.5}, {"search": False, "alpha": 0.9}):
        block = model.block()
        group = block.groups[0]
        SmoothQuant(options).apply(block, dict.fromkeys(group.names, SCHEME))
        sample = block.statistics(group, ("sample",)).sample
        assert sample is not None
        weights = [block.weight(n) for n in group.names]
        errors += rounding_errors(sample, weights, [SCHEME] * len(weights), [torch.ones(sample.shape[1])])
    assert errors[0] <= min(errors[1:]) * 1.001


def test_activations_are_rounded_as_the_scheme_says() -> None:
    x = torch.tensor([[127.0, 0.4, -63.6], [0.0, 0.0, 0.0]])
    assert round_activations(x, "int8_token").tolist() == [[127.0, 0.0, -64.0], [0.0, 0.0, 0.0]]
    assert torch.equal(round_activations(x, "none"), x)
    assert float((round_activations(x, "fp8_token") - x).abs().max()) < 127 / 16


def test_strength_outside_its_range_is_refused(tmp_path: Path) -> None:
    block = TinyModel("llama", tmp_path).block()
    with pytest.raises(UserError, match="alpha"):
        SmoothQuant({"alpha": 1.5}).apply(block, {})


def test_descent_lowers_the_error_of_the_best_strength() -> None:
    """Channels whose sizes follow no power law: no alpha fits them, a scale of their own for each does."""
    generator = torch.Generator().manual_seed(2)
    sample, weight = torch.randn(256, 48, generator=generator), torch.randn(64, 48, generator=generator)
    sample *= torch.rand(48, generator=generator).mul(3).exp()
    weight *= torch.rand(48, generator=generator).mul(2).exp()
    largest, sizes = sample.abs().amax(0), weight.abs().amax(0)
    scales = [smoothing_scale(largest, sizes, alpha) for alpha in SEARCHED_ALPHAS]
    found = rounding_errors(sample, [weight], [SCHEME], scales)
    best = scales[min(range(len(found)), key=found.__getitem__)]
    refined = refine(best, sample, [weight], 100, lambda scale: scale)
    others = torch.randn(256, 48, generator=generator) * sample.square().mean(0).sqrt()
    before, after = rounding_errors(others, [weight], [SCHEME], [best, refined])
    assert after < 0.97 * before  # on tokens that it has not seen
