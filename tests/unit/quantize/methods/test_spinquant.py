"""Learned rotations: the model computes the same function, the objective falls, a resumed job does not learn anew."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.unit.quantize.methods.tiny_blocks import TinyModel
from tokenmill.errors import UserError
from tokenmill.model.formats.quantized import Scheme
from tokenmill.quantize.calibrate import CalibratedBlock
from tokenmill.quantize.edges import Edges, JobData
from tokenmill.quantize.methods.spinquant import SpinQuant, _collect
from tokenmill.quantize.recipe import RecipeRequest, build_recipe
from tokenmill.quantize.workspace import Workspace

_CPU = torch.device("cpu")


def _edges(model: TinyModel, workspace: Workspace | None = None) -> Edges:
    names = list(model.source.layer_linears())
    return Edges(model.source, JobData(model.ids, 6, _CPU, dict.fromkeys(names, Scheme("int", 4, 16)), workspace))


@pytest.mark.parametrize("name", ["llama", "llama-biases", "llama-tied", "qwen3"])
def test_logits_stay_as_they_were(name: str, tmp_path: Path) -> None:
    model = TinyModel(name, tmp_path)
    with torch.no_grad():
        expected = model.oracle(model.ids).logits
    model.edges = _edges(model)
    spin = SpinQuant({"steps": 3, "rate": 0.05})
    spin.begin(model.edges)
    blocks = [CalibratedBlock(model.source, index, None) for index in range(model.source.num_blocks)]
    for block in blocks:
        spin.apply(block, {})
    assert torch.allclose(model.logits(blocks), expected, atol=1e-3)


def test_the_objective_falls(tmp_path: Path) -> None:
    model = TinyModel("llama", tmp_path)
    edges = _edges(model)
    blocks = [_collect(block, found, edges.scheme_of()) for block, found in edges.survey(("hessian",))]

    def loss(learned: dict[str, torch.Tensor]) -> float:
        turns = [learned[f"heads.{index}"].float() for index in range(len(blocks))]
        pairs = zip(blocks, turns, strict=True)
        return sum(float(each.loss(learned["residual"].float(), turn)) for block, turn in pairs for each in block)

    start, learned = (SpinQuant({"steps": steps, "rate": 0.02})._learn(edges) for steps in (1, 25))
    assert loss(learned) < 0.97 * loss(start)
    for matrix in learned.values():
        assert torch.allclose(matrix @ matrix.T, torch.eye(len(matrix), dtype=matrix.dtype), atol=1e-9)


def test_a_resumed_job_keeps_what_was_learned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = TinyModel("llama", tmp_path / "model")
    edges = _edges(model, Workspace(tmp_path / "out", "key"))
    first = SpinQuant({"steps": 2})
    first.begin(edges)
    monkeypatch.setattr(SpinQuant, "_learn", lambda *_: pytest.fail("learned twice"))
    again = SpinQuant({"steps": 2})
    again.begin(_edges(model, Workspace(tmp_path / "out", "key")))
    assert torch.equal(first._learned["residual"], again._learned["residual"])


def test_post_norms_are_refused_before_learning(tmp_path: Path) -> None:
    model = TinyModel("gemma3", tmp_path)
    with pytest.raises(UserError, match="cannot be rotated"):
        SpinQuant().begin(_edges(model))
    assert build_recipe(RecipeRequest("spinquant", group_size=32), {"a": (32, 64)}).solver.name == "gptq"
