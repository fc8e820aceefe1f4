"""--low-rank: the adapter holds what counts most of the error, the gate measures it, a resumed job writes the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.unit.quantize import test_job
from tokenmill.checkpoint.adapters.peft import WEIGHTS_FILE, read_adapter
from tokenmill.engine.llm import LLM
from tokenmill.errors import UserError
from tokenmill.quantize.extract import factorize
from tokenmill.quantize.finish import GateRequest
from tokenmill.quantize.job import QuantizeJob, prepare, run_job
from tokenmill.quantize.low_rank import FOLDER, input_root, weighted_factors
from tokenmill.quantize.recipe import RecipeRequest

model, job = test_job.model, test_job.job


def test_the_factors_err_least_on_the_inputs() -> None:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(400, 32, generator=generator) * torch.linspace(0.01, 3, 32)
    error = torch.randn(48, 32, generator=generator)
    root = input_root(inputs.T @ inputs / 400)
    b, a, kept, whole = weighted_factors(error, root, 4)
    plain = factorize(error, 4)

    def cost(change: torch.Tensor) -> float:
        return float((inputs @ change.T).square().mean(0).sum())

    assert cost(error - b @ a) < 0.8 * cost(error - plain.b @ plain.a)
    assert kept / whole == pytest.approx(1 - cost(error - b @ a) / cost(error), abs=0.02)
    b, a, _, _ = weighted_factors(error, root, 32)
    assert torch.allclose(b @ a, error, atol=1e-3)
    assert torch.isfinite(weighted_factors(error, input_root(torch.zeros(32, 32)), 4)[1]).all()


class Stopped(Exception):
    pass


def test_a_resumed_job_writes_the_same_adapter(job: QuantizeJob, tmp_path: Path) -> None:
    job = replace(job, recipe=replace(job.recipe, bits=3), low_rank=4)
    (tmp_path / "whole").mkdir()
    report = run_job(prepare(replace(job, out=tmp_path / "whole" / "out")))

    def stop(done: int, _all: int, _left: float) -> None:
        if done == 2:
            raise Stopped

    with pytest.raises(Stopped):
        run_job(prepare(job), stop)
    resumed = run_job(prepare(job))
    assert resumed.resumed_blocks == 2
    folders = [tmp_path / "whole" / "out" / FOLDER, job.out / FOLDER]
    whole, again = (load_file(folder / WEIGHTS_FILE) for folder in folders)
    assert len(whole) == 2 * 21
    assert all(torch.equal(whole[name], again[name]) for name in whole.keys() | again.keys())
    assert read_adapter(folders[0]).base_hash == read_adapter(folders[1]).base_hash != ""
    said = report.fidelity["low_rank"]
    assert said["rank"] == 4
    assert 0.1 < said["share_of_squared_error"] < 1.0
    assert '"low_rank"' in (job.out / "README.md").read_text()


def test_the_gate_measures_base_and_adapter(job: QuantizeJob, tmp_path: Path) -> None:
    limits = GateRequest(max_quality_loss=100.0, max_chunks=1, device="cpu", threads=1)
    job = replace(job, recipe=RecipeRequest("rtn", bits=2, group_size=32), gate=limits)
    plain = run_job(prepare(replace(job, out=tmp_path / "plain")))
    mended = run_job(prepare(replace(job, low_rank=24)))
    assert mended.fidelity["kld_mean"] < 0.8 * plain.fidelity["kld_mean"]
    assert (job.out / "model.safetensors").stat().st_size == (tmp_path / "plain" / "model.safetensors").stat().st_size
    with LLM(str(job.out), device="cpu", lora=(f"mended={job.out / FOLDER}",)) as llm:
        assert llm.loras == ["mended"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"tune": 5}, "--tune-scales"),
        ({"low_rank": -1}, "at least 1"),
        ({"recipe": RecipeRequest("magnitude")}, "rounds nothing"),
    ],
)
def test_what_goes_not_with_it_is_refused_first(change: dict[str, Any], reason: str, job: QuantizeJob) -> None:
    with pytest.raises(UserError, match=reason):
        prepare(replace(job, **{"low_rank": 4, **change}))
