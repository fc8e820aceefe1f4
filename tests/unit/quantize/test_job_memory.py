"""A job's memory: what is forecast, what a cap changes, and what happens where either is wrong."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.quantize import test_job
from tokenmill.errors import UserError
from tokenmill.quantize import forecast
from tokenmill.quantize.job import QuantizeJob, prepare, run_job
from tokenmill.quantize.recipe import RecipeRequest

model, job = test_job.model, test_job.job  # a tiny model, and a job of it


def _count_blocks_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the process holds already, and the tables of a tiny model, would hide them."""
    monkeypatch.setattr(forecast, "resident_bytes", lambda _key="VmRSS": 0)
    monkeypatch.setattr(forecast, "_edge_bytes", lambda *_: 0)


def test_float16_states_and_small_batches_fit_a_smaller_cap(job: QuantizeJob, monkeypatch: pytest.MonkeyPatch) -> None:
    _count_blocks_only(monkeypatch)
    with_tapes = prepare(job).forecast
    free = prepare(replace(job, memory=with_tapes.memory_bytes - 1)).forecast
    assert (with_tapes.tapes, free.tapes, free.batch, free.half_states) == (True, False, 6, False)
    one = forecast._sequence_bytes(prepare(job).source, 32)
    smaller = prepare(replace(job, memory=free.memory_bytes - 3 * one)).forecast
    assert (smaller.batch, smaller.half_states) == (2, False)
    least = prepare(replace(job, memory=free.memory_bytes - 5 * one - 10_000)).forecast
    assert (least.batch, least.half_states) == (1, True)
    with pytest.raises(UserError, match=r"give --memory \d+MiB, or fewer --calibration-samples"):
        prepare(replace(job, memory=1 << 17))


def test_a_job_that_outgrows_its_cap_stops_and_can_go_on(job: QuantizeJob, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared = prepare(replace(job, memory=8 << 30))
    monkeypatch.setattr(forecast, "peak_bytes", lambda: 9 << 30)
    with pytest.raises(UserError, match="finished blocks are kept"):
        run_job(prepared)
    monkeypatch.undo()
    assert run_job(prepared).resumed_blocks == 1


def test_more_memory_does_not_lock_out_what_is_finished(
    job: QuantizeJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """States are moved as they were at first, or sums would be added up in another order."""
    _count_blocks_only(monkeypatch)
    free = prepare(job)
    plain = prepare(replace(job, memory=free.forecast.memory_bytes - 1))  # no tapes
    one = forecast._sequence_bytes(free.source, 32)
    least = prepare(replace(job, memory=plain.forecast.memory_bytes - 5 * one - 10_000))
    assert (least.forecast.batch, least.forecast.half_states) == (1, True)
    monkeypatch.setattr(forecast, "peak_bytes", lambda: 9 << 30)
    with pytest.raises(UserError, match="run it again with --memory"):
        run_job(least)
    monkeypatch.setattr(forecast, "peak_bytes", lambda: 0)
    assert run_job(free).resumed_blocks == 1
    run_job(replace(least, job=replace(least.job, out=tmp_path / "whole")))
    assert test_job._hashes(job.out) == test_job._hashes(tmp_path / "whole")


def test_the_forecast_has_what_is_done_before_the_first_block(job: QuantizeJob) -> None:
    """Gradients of the whole model, and tables while they are turned."""
    plain, mended, turned = (
        prepare(replace(job, recipe=RecipeRequest(method, group_size=32, options=options))).forecast
        for method, options in (("gptq", ()), ("gptq", (("metric", "fisher"),)), ("rotation+gptq", ()))
    )
    table = 32000 * 64
    assert mended.memory_bytes - plain.memory_bytes > 4 * table
    assert turned.memory_bytes - plain.memory_bytes > 8 * table
