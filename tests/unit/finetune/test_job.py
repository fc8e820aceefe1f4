"""A run: the held-out loss falls as PEFT's does, a killed run continues with the same curve, repair is measured."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import DATA
from tokenmill.checkpoint.adapters.fit import check_base
from tokenmill.checkpoint.adapters.peft import read_adapter
from tokenmill.checkpoint.adapters.write import write_adapter
from tokenmill.checkpoint.open import open_checkpoint
from tokenmill.cli.main import main
from tokenmill.errors import UserError
from tokenmill.finetune.data import hold_out, read_rows
from tokenmill.finetune.job import FinetuneJob, FinetuneReport, _Run, finetune, learning_rate
from tokenmill.finetune.model import AdapterPlan, TrainableModel
from tokenmill.quantize.finish import GateRequest
from tokenmill.quantize.job import QuantizeJob, prepare, run_job
from tokenmill.quantize.recipe import RecipeRequest

TEXT = DATA / "text" / "wikitext2-raw.test.txt"
STORIES = DATA / "text" / "stories15m-samples.calibration.txt"
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def stories(model_path: Callable[[str], Path]) -> Path:
    return model_path("stories15m")


@pytest.fixture
def job(stories: Path, tmp_path: Path) -> FinetuneJob:
    """A few seconds: short rows of a text that the model has never seen."""
    text = tmp_path / "text.txt"
    text.write_text(TEXT.read_text(encoding="utf-8")[:9000], encoding="utf-8")
    return FinetuneJob(
        str(stories),
        text,
        tmp_path / "out",
        adapter=AdapterPlan(8),
        steps=6,
        batch=2,
        length=64,
        learning_rate=2e-3,
        save_every=2,
        eval_every=3,
        device="cpu",
        threads=1,
    )


def peft_losses(job: FinetuneJob, folder: Path) -> tuple[list[float], float]:
    """The same run by PEFT and transformers: same first factors, rows, rates and optimizer. (losses, held-out loss)"""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    from tokenmill.checkpoint.tokenizer_files import load_tokenizer

    path = Path(job.model)
    training, held = hold_out(read_rows(job.data, load_tokenizer(path), None, job.length))
    ours = TrainableModel(open_checkpoint(path), CPU, job.length, job.adapter)
    write_adapter(ours.adapter("start", "", ""), folder)
    base = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    peft = PeftModel.from_pretrained(base, folder, is_trainable=True)
    trained = [parameter for parameter in peft.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=job.learning_rate, weight_decay=0.0)
    batches = _Run(job, ours, None, training, held)
    losses = []
    for step in range(job.steps):
        optimizer.param_groups[0]["lr"] = learning_rate(step, job.steps, job.learning_rate)
        ids = batches.batch(step).ids
        loss = peft(ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        losses.append(float(loss.detach()))
    with torch.no_grad():
        held_out = [float(peft(row[None], labels=row[None]).loss) for row in held.ids]
    return losses, sum(held_out) / len(held_out)


def test_the_curve_is_pefts(job: FinetuneJob, tmp_path: Path) -> None:
    report = finetune(job)
    losses, held_out = peft_losses(job, tmp_path / "start")
    assert report.losses == pytest.approx(losses, rel=2e-3)
    assert report.loss_after == pytest.approx(held_out, rel=2e-3)
    assert report.loss_after < report.loss_before


@pytest.mark.slow
def test_fifty_steps_end_within_two_percent_of_peft(job: FinetuneJob, tmp_path: Path) -> None:
    job = replace(job, data=TEXT, steps=50, batch=4, length=128, eval_every=25)
    report = finetune(job)
    _, held_out = peft_losses(job, tmp_path / "start")
    assert report.loss_after == pytest.approx(held_out, rel=0.02)
    assert report.loss_after < 0.9 * report.loss_before


_CHILD = """
import os, signal, sys
from pathlib import Path
from tokenmill.finetune.job import FinetuneJob, finetune
from tokenmill.finetune.model import AdapterPlan
model, text, out = sys.argv[1:]
job = FinetuneJob(model, Path(text), Path(out), adapter=AdapterPlan(8), steps=6, batch=2, length=64,
                  learning_rate=2e-3, save_every=2, eval_every=3, device="cpu", threads=1)
def kill(step, *_):
    if step == 5:
        os.kill(os.getpid(), signal.SIGKILL)
finetune(job, kill)
"""


def test_a_killed_run_continues_with_the_same_curve(job: FinetuneJob, tmp_path: Path) -> None:
    whole = finetune(replace(job, out=tmp_path / "whole"))
    child = subprocess.run([sys.executable, "-c", _CHILD, job.model, str(job.data), str(job.out)], check=False)
    assert child.returncode == -signal.SIGKILL
    assert not job.out.exists()
    seen: list[int] = []
    report = finetune(job, lambda step, *_: seen.append(step))
    assert (report.resumed_from, seen) == (4, [5, 6])
    assert report.losses == whole.losses
    assert report.held_out == whole.held_out
    ours, theirs = (read_adapter(folder).matrices for folder in (job.out, tmp_path / "whole"))
    assert all(torch.equal(ours[name].b, theirs[name].b) for name in theirs)
    assert not (tmp_path / "out.partial").exists()


def test_the_state_of_another_run_is_not_continued(job: FinetuneJob) -> None:
    class StopError(Exception):
        pass

    def stop(step: int, *_: Any) -> None:
        if step == 2:
            raise StopError

    with pytest.raises(StopError):
        finetune(job, stop)
    with pytest.raises(UserError, match="the unfinished work of another run"):
        finetune(replace(job, learning_rate=1e-3))
    assert finetune(replace(job, learning_rate=1e-3, restart=True)).resumed_from == 0


def quantized(stories: Path, out: Path) -> Path:
    recipe = RecipeRequest("rtn", bits=3, group_size=32)
    run_job(prepare(QuantizeJob(str(stories), out, recipe, device="cpu", threads=1, gate=GateRequest(enabled=False))))
    return out


def distilled(stories: Path, folder: Path, **changes: Any) -> FinetuneReport:
    job = FinetuneJob(
        str(quantized(stories, folder / "rtn3")),
        STORIES,
        folder / "out",
        method="qlora",
        adapter=AdapterPlan(16),
        distill_from=str(stories),
        device="cpu",
        threads=1,
    )
    return finetune(replace(job, **changes))


def test_repair_is_measured(stories: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(STORIES.read_text(encoding="utf-8")[:10_000], encoding="utf-8")
    report = distilled(stories, tmp_path, data=text, steps=8, batch=2, length=64, learning_rate=2e-3, eval_every=8)
    repair = report.repair
    assert repair is not None
    assert repair.teacher_loss < repair.tuned_loss < repair.base_loss
    assert repair.tuned_divergence < repair.base_divergence
    assert repair.base_divergence == pytest.approx(report.loss_before)
    assert repair.tuned_divergence == pytest.approx(report.loss_after)
    assert 0 < repair.loss_won_back < 1
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert "What came back" in page
    assert "<svg" in page


@pytest.mark.slow
def test_a_third_of_what_three_bits_lost_comes_back(stories: Path, tmp_path: Path) -> None:
    report = distilled(stories, tmp_path, steps=60, batch=4, length=128, learning_rate=2e-3, eval_every=30)
    assert report.repair is not None
    won = report.repair
    print(
        f"won back: {won.loss_won_back:.1%} of the lost log-likelihood, {won.divergence_won_back:.1%} of the divergence"
    )
    assert report.repair.loss_won_back > 1 / 3
    assert report.repair.divergence_won_back > 1 / 3


def test_the_adapter_fits_the_base_and_states_it(job: FinetuneJob) -> None:
    from tokenmill.checkpoint.identity import model_hash

    finetune(replace(job, steps=1))
    adapter = read_adapter(job.out)
    description = open_checkpoint(Path(job.model)).description
    assert len(check_base(adapter, description, model_hash(Path(job.model))).matrices) == 7 * description.num_layers
    with pytest.raises(UserError, match="does not fit base"):
        check_base(adapter, description, "0" * 64)


def test_on_the_command_line(job: FinetuneJob, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["finetune", job.model, "--data", str(job.data), "--out", str(job.out), "--steps", "2", "--batch", "1"]
    words += ["--length", "32", "--rank", "2", "--target", "q_proj", "--device", "cpu", "--threads", "1"]
    assert main(words) == 0
    output = capsys.readouterr()
    assert "held-out loss" in output.out.splitlines()[0]
    assert "(. training, o held out)" in output.out
    assert "step 2 of 2: loss" in output.err
    stored = json.loads((job.out / "finetune.json").read_text())
    assert (stored["method"], stored["modules"], len(stored["losses"])) == ("lora", 6, 2)
    for wrong, message in (
        (["--method", "qlora"], "is not quantized"),
        (["--method", "full"], "unknown method 'full'"),
        (["--length", "999999"], "more than the model's context"),
        (["--rank", "0"], "--rank is 0"),
        (["--rank", "500"], "is more than"),
        (["--learning-rate", "3"], "--learning-rate is 3"),
        (["--data", str(tmp_path / "nothing")], "cannot read"),
    ):
        changed = [*words, "--out", str(tmp_path / "other"), *wrong]
        assert main(changed) == 2
        assert message in capsys.readouterr().err
    assert main(words) == 2  # it exists
    assert "exists" in capsys.readouterr().err
