"""The JSON of `optimize`: the promised fields, both baselines, and no figure where nothing was measured."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit.optimize import outcomes
from tokenmill.optimize.outputs import plain
from tokenmill.optimize.results import Outcome
from tokenmill.optimize.summary import summary

CONTRACT = {
    "chosen", "cost_reduction", "cost_reduction_today", "baseline", "today", "source_quantized", "quality_loss",
    "tasks", "latency", "objective_met", "report",
}  # fmt: skip


@pytest.mark.parametrize("make", outcomes.ALL)
def test_every_outcome_has_the_promised_fields_and_is_json(make: Callable[[], Outcome]) -> None:
    outcome = make()
    found = summary(outcome, Path("out"))
    assert set(found) >= CONTRACT
    json.dumps(found, allow_nan=False)
    everything = json.loads(json.dumps(plain(outcome), allow_nan=False))
    assert everything["cost_reduction_today"] == found["cost_reduction_today"]
    assert everything["not_shown"] == found["not_shown"]


def test_both_baselines_with_their_intervals() -> None:
    found = summary(outcomes.cpu_without_objectives(), Path("out"))
    assert found["chosen"] == "Q4_0"
    assert found["cost_reduction"] == pytest.approx(0.6)
    assert found["cost_reduction_low"] < 0.6 < found["cost_reduction_high"]
    assert found["cost_reduction_today"] == pytest.approx(1 - 0.40 / 0.48)
    assert found["cost_reduction_today_low"] < found["cost_reduction_today"] < found["cost_reduction_today_high"]
    assert (found["baseline"], found["today"], found["source_quantized"]) == ("F16", "stored", True)
    assert found["objective_met"] is None
    assert found["latency"] is None
    assert found["unproven"] == ["Q3_K_S"]


def test_latency_tasks_and_the_winner() -> None:
    found = summary(outcomes.gpu_with_a_rival_that_wins(), Path("out"))
    assert found["objective_met"] is True
    assert found["latency"]["ttft_ms"]["p95"] == 260
    assert "ttft_curve_ms" not in found["latency"]
    assert [task["name"] for task in found["tasks"]] == ["arc_easy", "humaneval"]
    assert found["winner"] == {"name": "vllm 0.32 fp8", "engine": "vllm"}


def test_what_was_not_measured_is_null() -> None:
    assert summary(outcomes.quality_off(), Path("out"))["quality_loss"] is None
    found = summary(outcomes.interrupted(), Path("out"))
    assert (found["today"], found["cost_reduction_today"]) == (None, None)
    assert (found["chosen"], found["cost_reduction"]) == ("baseline", 0.0)
