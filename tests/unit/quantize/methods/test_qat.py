"""Training through the rounding: gradients are those of LSQ, blocks come nearer to the float ones than by gptq."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.unit.quantize.methods.tiny_blocks import TinyModel, output_loss, outputs
from tokenmill.errors import UserError
from tokenmill.model.formats.quantized import Scheme
from tokenmill.quantize.methods.compensation import gptq_starts
from tokenmill.quantize.methods.gptq import Gptq
from tokenmill.quantize.methods.qat import Qat, TrainedMatrix
from tokenmill.quantize.methods.rtn import round_to_nearest


@pytest.mark.parametrize("symmetric", [True, False])
def test_starts_at_the_grid_of_least_error(symmetric: bool) -> None:
    weight = torch.randn(12, 64, generator=torch.Generator().manual_seed(0))
    scheme = Scheme("int", 2, 16, symmetric=symmetric)
    plain = round_to_nearest(weight, scheme, norm=2.4)
    trained = TrainedMatrix(weight, scheme)
    assert torch.allclose(trained.dequantize(), plain.dequantize(), atol=1e-6)
    finished = trained.finish()
    assert torch.equal(finished.codes, plain.codes)
    assert torch.equal(finished.scales, plain.scales)


def test_the_gradient_of_a_step_is_that_of_its_values() -> None:
    weight = torch.tensor([[0.30, -1.10, 0.74, 9.0]])
    trained = TrainedMatrix(weight, Scheme("int", 3, 4))
    step = trained.first.item()
    exact = weight / step
    codes = exact.round().clamp(-4, 3)
    (gradient,) = torch.autograd.grad(trained.dequantize().sum(), trained.growth)
    inside = (exact.round() >= -4) & (exact.round() <= 3)
    expected = (torch.where(inside, codes - exact, codes) * step).sum()
    assert float(gradient) == pytest.approx(float(expected), rel=1e-4)


@pytest.mark.parametrize(("bits", "share"), [(2, 0.8), (3, 1.0)])
def test_comes_nearer_than_gptq(bits: int, share: float, tmp_path: Path) -> None:
    model = TinyModel("llama", tmp_path)
    losses = []
    for solver in (Gptq(), Qat({"start": "rtn", "steps": 120, "sequences": 6, "rate": 0.03})):
        block = model.block()
        expected = outputs(block)
        names = [name for group in block.groups for name in group.names]
        matrices = solver.solve(block, dict.fromkeys(names, Scheme("int", bits, 16)))
        assert set(matrices) == set(names)
        losses.append(output_loss(block, expected))
    assert losses[1] < share * losses[0]


def test_begins_with_the_codes_of_gptq(tmp_path: Path) -> None:
    model = TinyModel("llama", tmp_path)
    block, scheme = model.block(), Scheme("int", 2, 16)
    scheme_of = {name: scheme for group in block.groups for name in group.names}
    starts = gptq_starts(block, scheme_of, full_range=True)
    found = Qat({"steps": 1, "rate": 1e-9}).solve(block, scheme_of)
    for name, start in starts.items():
        assert float((found[name].codes != start.matrix.codes).float().mean()) < 0.01  # but for ties
        torch.testing.assert_close(found[name].scales, start.matrix.scales)


def test_options_are_checked_first() -> None:
    with pytest.raises(UserError, match="start of qat"):
        Qat({"start": "gtpq"}).check("a", (8, 32), Scheme("int", 2, 32))
    with pytest.raises(UserError, match="below its minimum"):
        Qat({"steps": 0}).check("a", (8, 32), Scheme("int", 2, 32))
