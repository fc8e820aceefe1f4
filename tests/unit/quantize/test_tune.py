"""The end-to-end pass: the model diverges less, codes stay, what does not help is not kept, the files load."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.unit.quantize.methods.tiny_blocks import LENGTH, TinyModel
from tokenmill.kernels import ref
from tokenmill.model.formats.quantized import Scheme
from tokenmill.quantize import tune
from tokenmill.quantize.divergence import run_block
from tokenmill.quantize.methods.rtn import round_to_nearest
from tokenmill.quantize.source import EMBEDDING, FINAL_NORM, HEAD
from tokenmill.quantize.tune import EndToEnd, Student, TuneOptions
from tokenmill.quantize.tune_job import ScaledMatrix


def students(model: TinyModel, bits: int) -> list[Student]:
    made = []
    for index in range(model.source.num_blocks):
        tensors = model.source.read_block(index)
        linears = model.source.linear_names(index)
        matrices = {name: ScaledMatrix(round_to_nearest(tensors[name], Scheme("int", bits, 32))) for name in linears}
        floats = {name: value for name, value in tensors.items() if name not in matrices}
        norms = {name: torch.ones_like(value) for name, value in floats.items() if name.endswith("norm")}
        made.append(Student(matrices, floats, norms))
    return made


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_scales_and_norms_win_back_some_of_what_rounding_lost(name: str, tmp_path: Path) -> None:
    model = TinyModel(name, tmp_path)
    edges = (model.source.read_edge(each) for each in (EMBEDDING, HEAD, FINAL_NORM))
    made = students(model, 3)
    whole = EndToEnd(model.source, made, model.ids, *edges)
    report = whole.run(TuneOptions(steps=30, rate=5e-3, sequences=4))
    assert report.kept
    assert report.after < 0.97 * report.before
    matrix = next(iter(made[0].matrices.values()))
    assert isinstance(matrix, ScaledMatrix)
    finished = matrix.finish()
    assert torch.equal(finished.codes, matrix.matrix.codes)
    assert torch.equal(finished.scales, finished.scales.half().float())
    assert not torch.equal(finished.scales, matrix.matrix.scales)
    assert whole.mixing.numel() == 0


def test_a_head_of_its_own_learns_to_mix_its_input_and_one_table_holds_that(tmp_path: Path) -> None:
    model = TinyModel("llama", tmp_path)
    embedding, head, norm = (model.source.read_edge(each) for each in (EMBEDDING, HEAD, FINAL_NORM))
    gains = []
    for alone in (False, True):
        made = students(model, 3)
        whole = EndToEnd(model.source, made, model.ids, embedding, head, norm, head_alone=alone)
        report = whole.run(TuneOptions(steps=30, rate=5e-3))
        assert report.kept
        gains.append(report.before - report.after)
    assert gains[1] > gains[0]
    assert whole.mixing.any()
    written = EndToEnd(model.source, made, model.ids, embedding, whole.mixed_head(), norm * whole.norm_factors)
    assert written.divergence([0, 3]) == pytest.approx(whole.divergence([0, 3]), rel=1e-4)


def test_blocks_computed_again_learn_what_kept_ones_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = TinyModel("llama", tmp_path)
    learned = []
    for kept in (1 << 30, 0):
        monkeypatch.setattr(tune, "KEPT_BYTES", kept)
        edges = (model.source.read_edge(each) for each in (EMBEDDING, HEAD, FINAL_NORM))
        made = students(model, 3)
        EndToEnd(model.source, made, model.ids, *edges).run(TuneOptions(steps=4, rate=5e-3))
        learned.append([each for student in made for each in student.parameters()])
    assert any(bool((each != 1).any()) for each in learned[0])
    for kept_one, again in zip(*learned, strict=True):
        torch.testing.assert_close(kept_one, again)


def test_steps_follow_the_gradient_of_the_divergence_among_likely_tokens(tmp_path: Path) -> None:
    model = TinyModel("llama", tmp_path)
    edges = [model.source.read_edge(each) for each in (EMBEDDING, HEAD, FINAL_NORM)]
    whole = EndToEnd(model.source, students(model, 3), model.ids, *edges, head_alone=True)
    whole.mixing.copy_(0.01 * torch.randn(whole.mixing.shape))
    found = whole.likely_tokens()
    assert 0 < len(found) <= model.source.description.vocab_size
    chosen = [0, 1]
    states = torch.randn(2 * LENGTH, model.source.description.hidden_size)
    slopes, norm_slopes, mixing_slopes = whole.slopes(states, chosen)

    def loss(rows: torch.Tensor, factors: torch.Tensor, mixing: torch.Tensor) -> torch.Tensor:
        teacher = model.source.embed(model.ids[chosen]).flatten(0, 1)
        for index in range(model.source.num_blocks):
            teacher = run_block(model.source, index, teacher, model.source.read_block(index), LENGTH)
        expected = (model.source.decoder.norm.of_tensor(teacher) @ edges[1][found].T).log_softmax(-1)
        normed = ref.rms_norm(rows, edges[2] * factors, model.source.decoder.norm.eps)
        normed = normed + normed @ mixing.T
        answered = (normed @ edges[1][found].T).log_softmax(-1)
        return (expected.exp() * (expected - answered)).sum(-1).mean()

    rows, factors = states.clone().requires_grad_(), torch.ones_like(edges[2]).requires_grad_()
    mixing = whole.mixing.clone().requires_grad_()
    loss(rows, factors, mixing).backward()
    torch.testing.assert_close(slopes, rows.grad, rtol=1e-3, atol=1e-6)
    torch.testing.assert_close(norm_slopes, factors.grad, rtol=1e-3, atol=1e-6)
    torch.testing.assert_close(mixing_slopes, mixing.grad, rtol=1e-3, atol=1e-6)


def test_what_a_held_out_batch_does_not_confirm_is_discarded(tmp_path: Path) -> None:
    model = TinyModel("llama", tmp_path)
    edges = (model.source.read_edge(each) for each in (EMBEDDING, HEAD, FINAL_NORM))
    made = students(model, 8)
    whole = EndToEnd(model.source, made, model.ids, *edges, head_alone=True)
    report = whole.run(TuneOptions(steps=3, rate=0.5))
    assert not report.kept
    assert not whole.mixing.any()
    assert all(torch.equal(each, torch.ones_like(each)) for student in made for each in student.parameters())


def test_scales_that_are_not_floats_stay() -> None:
    matrix = round_to_nearest(torch.randn(4, 32), Scheme("int", 4, 32))
    powers = replace(matrix, scheme=replace(matrix.scheme, scale_type="e8m0"))
    assert ScaledMatrix(powers).factors == []
    assert ScaledMatrix(powers).finish() is powers
