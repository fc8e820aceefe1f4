"""Codes trained end to end: they begin as the solver left them, the model diverges less, a killed pass goes on as if it
had not been, what does not help is not kept."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.unit.quantize import test_job
from tests.unit.quantize.methods.tiny_blocks import TinyModel
from tests.unit.quantize.test_tune import students
from tokenmill.engine.llm import LLM
from tokenmill.errors import UserError
from tokenmill.model.formats.quantized import Scheme
from tokenmill.quantize.job import QuantizeJob, prepare, run_job
from tokenmill.quantize.methods.rtn import round_to_nearest
from tokenmill.quantize.recipe import RecipeRequest, build_recipe
from tokenmill.quantize.source import EMBEDDING, FINAL_NORM, HEAD
from tokenmill.quantize.train_codes import KeptTraining, TrainedCodes, TrainedResult, check_trainable
from tokenmill.quantize.tune import EndToEnd, Student, TuneOptions

model, job = test_job.model, test_job.job
_OPTIONS = TuneOptions(steps=20, rate=0.02, sequences=4, norms=0.1)


def trained_students(model: TinyModel, bits: int) -> list[Student]:
    made = []
    for index, student in enumerate(students(model, bits)):
        tensors = model.source.read_block(index)
        matrices = {}
        for name in student.matrices:
            matrix = round_to_nearest(tensors[name], Scheme("int", bits, 32))
            matrices[name] = TrainedCodes(matrix, tensors[name] - matrix.dequantize())
        made.append(replace(student, matrices=matrices))
    return made


def end_to_end(model: TinyModel, made: list[Student]) -> EndToEnd:
    edges = (model.source.read_edge(each) for each in (EMBEDDING, HEAD, FINAL_NORM))
    return EndToEnd(model.source, made, model.ids, *edges)


def results(made: list[Student]) -> list[TrainedResult]:
    matrices = (each for one in made for each in one.matrices.values())
    return [each.finish() for each in matrices if isinstance(each, TrainedCodes)]


def codes(made: list[Student]) -> list[Tensor]:
    return [
        each.finish().matrix.codes for one in made for each in one.matrices.values() if isinstance(each, TrainedCodes)
    ]


@pytest.mark.parametrize("symmetric", [True, False])
def test_training_begins_at_the_solvers_codes(symmetric: bool) -> None:
    weight = torch.randn(8, 64)
    matrix = round_to_nearest(weight, Scheme("int", 3, 32, symmetric=symmetric))
    other = replace(matrix, codes=(matrix.codes.int() + 1).clamp(max=7).to(torch.uint8))  # as a solver may choose them
    for each in (matrix, other):
        trained = TrainedCodes(each, weight - each.dequantize())
        torch.testing.assert_close(trained.weight(), each.dequantize())
        result = trained.finish()
        assert torch.equal(result.matrix.codes, each.codes)
        assert result.moved == 0
        assert result.error == pytest.approx(float((weight - each.dequantize()).norm() / weight.norm()), rel=1e-2)


def test_codes_win_back_more_than_scales(tmp_path: Path) -> None:
    model = TinyModel("llama", tmp_path)
    scales = end_to_end(model, students(model, 2)).run(TuneOptions(steps=20, rate=5e-3))
    made = trained_students(model, 2)
    before = codes(made)
    trained = end_to_end(model, made).run(_OPTIONS)
    assert trained.kept
    assert trained.before == pytest.approx(scales.before, rel=1e-3)
    assert trained.after < scales.after
    moved = sum(int((one != other).sum()) for one, other in zip(before, codes(made), strict=True))
    assert 0 < moved == sum(each.moved for each in results(made))
    assert all(torch.equal(each.matrix.scales, each.matrix.scales.half().float()) for each in results(made))


class _Killed(Exception):
    pass


class _Memory:
    """Progress that is killed once, after some saves."""

    def __init__(self, lives: int) -> None:
        self.lives, self.kept = lives, (0, list[Tensor]())

    def load(self) -> tuple[int, Sequence[Tensor]]:
        return self.kept

    def save(self, steps: int, tensors: Sequence[Tensor]) -> None:
        self.kept = (steps, [each.detach().clone() for each in tensors])
        self.lives -= 1
        if self.lives == 0:
            raise _Killed


def test_a_killed_pass_goes_on_as_if_it_had_not_been(tmp_path: Path) -> None:
    model = TinyModel("llama", tmp_path)
    whole = trained_students(model, 2)
    expected = end_to_end(model, whole).run(_OPTIONS)
    progress = _Memory(lives=7)
    with pytest.raises(_Killed):
        end_to_end(model, trained_students(model, 2)).run(_OPTIONS, progress)
    again = trained_students(model, 2)
    assert end_to_end(model, again).run(_OPTIONS, progress) == expected
    assert all(map(torch.equal, codes(whole), codes(again)))


def test_what_a_held_out_batch_does_not_confirm_is_discarded(tmp_path: Path) -> None:
    model = TinyModel("llama", tmp_path)
    made = trained_students(model, 4)
    before = codes(made)
    report = end_to_end(model, made).run(replace(_OPTIONS, steps=3, rate=3.0))
    assert not report.kept
    assert all(map(torch.equal, before, codes(made)))
    assert all(torch.equal(each, torch.ones_like(each)) for student in made for each in student.norms.values())


def test_trained_codes_are_what_the_files_hold(job: QuantizeJob, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed in the middle of the training; the resumed job does no block again, and writes what a whole one does."""
    # Random weights have nothing to win: what was learned is kept all the same.
    falling = itertools.count(0, -1)
    monkeypatch.setattr(EndToEnd, "divergence", lambda _self, _chosen: float(next(falling)))
    plain = replace(job, recipe=RecipeRequest("gptq", bits=2, group_size=32), drawn=4, out=job.out.with_name("plain"))
    job = replace(plain, train=6, kv_scales=True, out=job.out)
    whole = replace(job, out=job.out.with_name("whole"))
    run_job(prepare(plain))
    run_job(prepare(whole))
    prepared = prepare(job)
    saved = []

    def save(self: KeptTraining, steps: int, tensors: Any) -> None:
        whole_save(self, steps, tensors)
        saved.append(steps)
        if len(saved) == 3:
            raise _Killed

    whole_save = KeptTraining.save
    monkeypatch.setattr(KeptTraining, "save", save)
    with pytest.raises(_Killed):
        run_job(prepared)
    assert not job.out.exists()
    report = run_job(prepared)
    assert saved == list(range(1, 7))  # none twice
    assert report.resumed_blocks == prepared.source.num_blocks
    trained = report.fidelity["trained"]
    assert trained["steps"] == 6
    assert trained["kept"]
    assert trained["moved"] > 0
    written, expected = (load_file(folder / "model.safetensors") for folder in (job.out, whole.out))
    assert written.keys() == expected.keys()
    assert all(torch.equal(written[name], expected[name]) for name in expected)
    assert sum(name.endswith("k_scale") for name in written) == prepared.source.num_blocks
    untrained = load_file(plain.out / "model.safetensors")
    packed = [name for name in untrained if name.endswith("weight_packed")]
    assert packed
    assert not any(torch.equal(written[name], untrained[name]) for name in packed)
    assert '"trained"' in (job.out / "README.md").read_text()
    with LLM(str(job.out), context=64, concurrency=1, kernels="ref") as llm:
        assert llm.generate([[1, 5, 9]])[0].outputs[0].token_ids


@pytest.mark.parametrize("trains", [False, True])
def test_an_expert_that_no_token_reaches_stays(trains: bool, tmp_path: Path) -> None:
    model = TinyModel("qwen3_moe", tmp_path)
    model.ids = model.ids[:2, :3]
    made = trained_students(model, 2) if trains else students(model, 2)
    experts = [(name, one.matrices[name]) for one in made for name in one.matrices if ".experts." in name]
    before = [torch.cat([part.detach().flatten() for part in each.factors]) for _, each in experts]
    report = end_to_end(model, made).run(TuneOptions(steps=2, rate=5e-3, sequences=1))
    after = [torch.cat([part.detach().flatten() for part in each.factors]) for _, each in experts]
    stayed = [torch.equal(one, other) for one, other in zip(before, after, strict=True)]
    assert any(stayed)
    assert not all(stayed) or not report.kept


def test_a_job_whose_last_pass_does_not_fit_is_refused(job: QuantizeJob) -> None:
    job = replace(job, recipe=RecipeRequest("rtn", bits=2, group_size=32))
    needed = prepare(replace(job, train=20, drawn=4096)).forecast.memory_bytes
    assert needed > prepare(job).forecast.memory_bytes + (32 << 20)
    with pytest.raises(UserError, match="needs about"):
        prepare(replace(job, train=20, drawn=4096, memory=needed - (16 << 20)))


@pytest.mark.parametrize("method", ["mxfp4", "sparsegpt+gptq", "fp8"])
def test_what_cannot_be_trained_is_refused(method: str) -> None:
    recipe = build_recipe(RecipeRequest(method), {"model.layers.0.mlp.down_proj": (64, 128)})
    with pytest.raises(UserError, match="--train-codes"):
        check_trainable(5, 0, recipe, 8)
    check_trainable(0, 5, recipe, 8)
