"""AutoRound starts at round-to-nearest, lowers the error of the output, and stays on the grid of its scheme."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.unit.quantize.methods.tiny_blocks import TinyModel, output_loss, outputs
from tokenmill.errors import UserError
from tokenmill.model.formats.quantized import Scheme
from tokenmill.quantize.edges import Edges
from tokenmill.quantize.methods.autoround import AutoRound, LearnedRounding
from tokenmill.quantize.methods.rtn import RoundToNearest, round_to_nearest


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group_size", [0, 32])
def test_before_the_first_step_it_is_round_to_nearest(symmetric: bool, group_size: int) -> None:
    weight = torch.randn(24, 64)
    weight[3] = 0.0
    scheme = Scheme("int", 4, group_size, symmetric=symmetric)
    rounding = LearnedRounding(weight, scheme, learns_range=True)
    expected = round_to_nearest(weight, scheme)
    assert torch.allclose(rounding.dequantize(), expected.dequantize(), atol=1e-6)
    finished = rounding.finish()
    assert torch.equal(finished.codes, expected.codes)
    assert torch.equal(finished.scales, expected.scales)
    assert (finished.zeros is None) == symmetric


@pytest.mark.parametrize(("objective", "start"), [("block", "rtn"), ("block", "gptq"), ("layer", "rtn")])
@pytest.mark.parametrize("symmetric", [True, False])
def test_the_output_errs_less_than_with_plain_rounding(
    objective: str, start: str, symmetric: bool, tmp_path: Path
) -> None:
    model = TinyModel("llama", tmp_path)
    plain, learned = model.block(), model.block()
    scheme = Scheme("int", 3, 32, symmetric=symmetric)
    scheme_of = {n: scheme for group in plain.groups for n in group.names}
    expected = outputs(plain)
    RoundToNearest().solve(plain, scheme_of)
    options = {"objective": objective, "start": start, "iterations": 40, "sequences": 4}
    matrices = AutoRound(options).solve(learned, scheme_of)
    share = 0.75 if objective == "block" else 0.95  # the inputs hardly correlate: a layer alone can gain little
    assert output_loss(learned, expected) < share * output_loss(plain, expected)
    assert set(matrices) == set(scheme_of)
    for name, matrix in matrices.items():
        assert torch.equal(learned.weight(name), matrix.dequantize())
        assert int(matrix.codes.max()) <= 7
        assert torch.equal(matrix.scales, matrix.scales.half().float())
        if matrix.zeros is not None:
            assert torch.equal(matrix.zeros, matrix.zeros.round().clamp(0, 7))


def test_only_the_named_linears_are_rounded_and_the_result_repeats(tmp_path: Path) -> None:
    model = TinyModel("llama", tmp_path)
    name = "model.layers.0.mlp.down_proj"
    results = []
    for _ in range(2):
        block = model.block()
        before = dict(block.tensors)
        matrices = AutoRound({"iterations": 5}).solve(block, {name: Scheme("int", 4, 32)})
        assert set(matrices) == {name}
        assert [n for n, value in block.tensors.items() if not torch.equal(value, before[n])] == [name]
        results.append(matrices[name].codes)
    assert torch.equal(*results)


def test_a_metric_moves_the_error_to_where_it_costs_less(tmp_path: Path) -> None:
    """Of two halves of the output's directions one counts for nearly nothing: the other then errs less."""
    model = TinyModel("llama", tmp_path)
    errors = []
    for dear in (0, 1):
        block = model.block()
        expected = outputs(block)
        half = expected.shape[-1] // 2
        scheme_of = {n: Scheme("int", 3, 32) for group in block.groups for n in group.names}
        solver = AutoRound({"iterations": 40, "sequences": 4, "metric": "fisher"})
        weights = torch.full((2 * half,), 0.01)
        weights[dear * half : (dear + 1) * half] = 1.0
        solver.begin(FixedRoots([torch.diag(weights)]))
        solver.solve(block, scheme_of)
        change = (outputs(block) - expected).square()
        errors.append([float(change[..., :half].mean()), float(change[..., half:].mean())])
    first, second = errors
    assert first[0] < second[0]
    assert second[1] < first[1]


class FixedRoots(Edges):
    """A ModelView that has been given the metric."""

    def __init__(self, roots: list[torch.Tensor]) -> None:
        self._given, self._data = roots, None

    def output_roots(self) -> list[torch.Tensor]:
        return self._given


@pytest.mark.parametrize("symmetric", [True, False])
def test_steps_follow_the_gradients_that_autograd_finds(symmetric: bool) -> None:
    """The straight-through estimator traced by torch, beside the one written out."""
    torch.manual_seed(3)
    scheme = Scheme("int", 2, 16, symmetric=symmetric)
    rounding = LearnedRounding(torch.randn(12, 32), scheme, learns_range=True)
    rounding.low_share.uniform_(0.5, 0.9)
    rounding.high_share.uniform_(0.5, 0.9)
    rounding.offset.uniform_(-0.3, 0.3)
    offset, low_share, high_share = (
        value.clone().requires_grad_() for value in (rounding.offset, rounding.low_share, rounding.high_share)
    )

    def through(value: torch.Tensor, smooth: torch.Tensor) -> torch.Tensor:
        return smooth + (value - smooth).detach()

    low, high = rounding.low * low_share, rounding.high * high_share
    span = torch.maximum(-low, high) * 2 if symmetric else high - low
    scales = through((span / 3).half().float(), span / 3)
    zeros = torch.full_like(scales, 2.0) if symmetric else through((-low / scales).round(), -low / scales)
    position = rounding.weight / scales + zeros + offset
    traced = (through(position.round(), position).clamp(0, 3) - zeros) * scales
    assert torch.allclose(rounding.dequantize(), traced.view(12, 32))
    slopes = torch.randn(12, 32)
    traced.backward(slopes.view_as(traced))
    before = [value.clone() for value in (rounding.offset, rounding.low_share, rounding.high_share)]
    rounding.step(slopes, 0.01)
    after = (rounding.offset, rounding.low_share, rounding.high_share)
    for old, new, leaf in zip(before, after, (offset, low_share, high_share), strict=True):
        least, most = (-0.5, 0.5) if leaf is offset else (0.5, 1.0)
        assert leaf.grad is not None
        assert torch.allclose(new, (old - 0.01 * leaf.grad.sign()).clamp(least, most))


def test_ranges_stay_unless_asked() -> None:
    rounding = LearnedRounding(torch.randn(4, 32), Scheme("int", 3, 32), learns_range=False)
    rounding.step(torch.randn(4, 32), 0.1)
    assert torch.equal(rounding.high_share, torch.ones_like(rounding.high_share))
    assert float(rounding.offset.abs().max()) == pytest.approx(0.1)


@pytest.mark.parametrize(
    "options",
    [
        {"objective": "blok"},
        {"start": "gptk"},
        {"start": "gptq", "objective": "layer"},
        {"metric": "fischer"},
        {"metric": "fisher", "objective": "layer"},
        {"iterations": 0},
        {"rate": -1.0},
    ],
)
def test_senseless_options_are_refused_before_any_work(options: dict[str, object]) -> None:
    with pytest.raises(UserError):
        AutoRound(options).check("w", (8, 64), Scheme("int", 4, 32))
    with pytest.raises(UserError, match="group size"):
        AutoRound().check("w", (8, 60), Scheme("int", 4, 32))
