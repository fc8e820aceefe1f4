"""What looks at the whole model, gradients at its end and the last pass, computes on the device of the job."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.unit.quantize.emulated_device import GPU, emulated_gpu
from tests.unit.quantize.methods.tiny_blocks import TinyModel
from tests.unit.quantize.test_tune import students
from tokenmill.quantize import tune_job
from tokenmill.quantize.fisher import linear_grams, output_roots
from tokenmill.quantize.forecast import Forecast
from tokenmill.quantize.source import EMBEDDING, FINAL_NORM, HEAD
from tokenmill.quantize.tune import EndToEnd, Student, TuneOptions
from tokenmill.quantize.tune_job import LastPass, ScaledMatrix, with_tuning


def _moved(student: Student) -> Student:
    matrices = {
        name: ScaledMatrix(each.matrix.to(GPU))
        for name, each in student.matrices.items()
        if isinstance(each, ScaledMatrix)
    }
    floats = {name: value.to(GPU) for name, value in student.floats.items()}
    return Student(matrices, floats, {name: torch.ones_like(floats[name]) for name in student.norms})


def test_the_emulation_refuses_to_mix(monkeypatch: pytest.MonkeyPatch) -> None:
    with emulated_gpu(monkeypatch):
        there = torch.ones(3, device=GPU)
        assert (there * 2).device == GPU
        assert there.to("cpu").device.type == "cpu"
        with pytest.raises(AssertionError, match="mixes devices"):
            there + torch.ones(3)
        with pytest.raises(AssertionError, match="mixes devices"):
            torch.ones(3)[torch.tensor([1], device=GPU)]


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_gradients_by_outputs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = TinyModel(name, tmp_path)
    roots, grams = output_roots(model.source, model.ids), linear_grams(model.source, model.ids)
    with emulated_gpu(monkeypatch) as gpu:
        same_roots = output_roots(model.source, model.ids, GPU)
        same_grams = linear_grams(model.source, model.ids, GPU)
        assert {each.device.type for each in (*same_roots, *same_grams.values())} == {"cpu"}, "kept on the host"
    assert gpu.num_ops > 100
    assert all(torch.equal(one, other) for one, other in zip(roots, same_roots, strict=True))
    assert all(torch.equal(gram, same_grams[name]) for name, gram in grams.items())


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_the_last_pass(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = TinyModel(name, tmp_path)
    edges = [model.source.read_edge(each) for each in (EMBEDDING, HEAD, FINAL_NORM)]
    options = TuneOptions(steps=3, rate=5e-3, sequences=4)
    alone = name == "llama"
    report = EndToEnd(model.source, students(model, 3), model.ids, *edges, head_alone=alone).run(options)
    with emulated_gpu(monkeypatch) as gpu:
        made = [_moved(each) for each in students(model, 3)]
        whole = EndToEnd(model.source, made, model.ids, *(each.to(GPU) for each in edges), head_alone=alone)
        assert whole.run(options) == report
        assert whole.mixing.any() == alone
        assert whole.norm_factors.device == GPU
    assert gpu.num_ops > 1000


def test_its_memory_there_is_forecast(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune_job, "operations_per_second", lambda _: 1e12)  # a GPU is asked for its name
    source = TinyModel("llama", tmp_path).source
    nothing = Forecast(0, 0, 0.0, 0, 1, False)
    assert with_tuning(nothing, source, LastPass(4), 8, 24, True).device_bytes == 0
    assert with_tuning(nothing, source, LastPass(4), 8, 24, True, GPU).device_bytes > sum(
        2 * out * width for out, width in map(source.shape, source.layer_linears())
    )
