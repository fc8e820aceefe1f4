"""Sequences that the model draws itself: begun by the text, the model's own from there on, the same ones every time."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tokenmill.errors import UserError
from tokenmill.quantize import drawn_text
from tokenmill.quantize.drawn_text import draw_sequences
from tokenmill.quantize.finish import GateRequest
from tokenmill.quantize.job import QuantizeJob, prepare, run_job
from tokenmill.quantize.recipe import RecipeRequest


@pytest.fixture
def job(tiny_llama: Path, tmp_path: Path) -> QuantizeJob:
    text = tmp_path / "text.txt"
    text.write_text("Once upon a time there was a small boat that wanted to see the sea. " * 60)
    return QuantizeJob(
        str(tiny_llama),
        tmp_path / "out",
        RecipeRequest("gptq", group_size=32),
        calibration=text,
        calibration_samples=6,
        calibration_length=32,
        threads=1,
        device="cpu",
        drawn=5,
        gate=GateRequest(enabled=False),
    )


@pytest.fixture(scope="module")
def tiny_llama(model_path: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny llama with the tokenizer of stories15m."""
    from transformers import LlamaConfig

    from tests.parity import tiny_models

    folder = tmp_path_factory.mktemp("tiny")
    tiny_models.CONFIGS["llama-tokens"] = lambda: LlamaConfig(**{**tiny_models._COMMON, "vocab_size": 32000})
    try:
        tiny_models.make("llama-tokens", folder)
    finally:
        del tiny_models.CONFIGS["llama-tokens"]
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model_path("stories15m") / name, folder / name)
    return folder


def test_each_begins_in_the_text_and_goes_on_by_itself(tiny_llama: Path) -> None:
    text = torch.randint(3, 32000, (4, 24), generator=torch.Generator().manual_seed(1))
    text[:, 0] = 1
    drawn = draw_sequences(tiny_llama, text, 6, 1, "cpu")
    assert drawn.shape == (6, 24)
    assert drawn.dtype == text.dtype
    windows = {tuple(row[at : at + 7].tolist()) for row in text for at in range(1, 18)}
    assert all(int(row[0]) == 1 and tuple(row[1:8].tolist()) in windows for row in drawn)
    assert len({tuple(row.tolist()) for row in drawn}) == 6
    assert not any(tuple(row[8:15].tolist()) in windows for row in drawn)
    assert torch.equal(drawn, draw_sequences(tiny_llama, text, 6, 1, "cpu"))


def test_sequences_without_a_common_first_token_begin_anywhere(tiny_llama: Path) -> None:
    text = torch.arange(3, 3 + 60).view(3, 20)
    drawn = draw_sequences(tiny_llama, text, 4, 1, "cpu")
    assert all(torch.equal(row[:8], torch.arange(int(row[0]), int(row[0]) + 8)) for row in drawn)


def test_a_job_calibrates_on_both_and_a_resumed_one_draws_no_more(
    job: QuantizeJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = run_job(prepare(replace(job, drawn=0, out=tmp_path / "plain")))

    def stop(done: int, _total: int, _left: float) -> None:
        if done == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_job(prepare(job), stop)
    monkeypatch.setattr(drawn_text, "draw_sequences", lambda *_: pytest.fail("drew again"))
    report = run_job(prepare(job))
    assert report.resumed_blocks == 1
    card = (job.out / "README.md").read_text()
    assert "11 sequences of 32 tokens" in card
    assert "5 of them drawn by the model itself" in card
    assert report.fidelity["weight_error_mean"] != plain.fidelity["weight_error_mean"]
    assert report.forecast["seconds"] > plain.forecast["seconds"]


def test_a_method_that_uses_no_text_refuses(job: QuantizeJob) -> None:
    with pytest.raises(UserError, match="uses no calibration text"):
        prepare(replace(job, recipe=RecipeRequest("rtn", group_size=32)))
