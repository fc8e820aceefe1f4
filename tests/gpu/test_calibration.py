"""`plan --calibrate` on a GPU: its roofs through our kernels, timed steps, and what the planner makes of them."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch

from tokenmill.calibrate.gpu_probe import ROWS, WEIGHTS, probe_gpu
from tokenmill.calibrate.job import calibrate
from tokenmill.cli.main import main
from tokenmill.plan.cost.this_machine import load_calibration
from tokenmill.plan.simulate.measured import measured_engine

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)


def test_the_roofs_are_those_of_a_gpu() -> None:
    roofs = probe_gpu()
    assert roofs.name == torch.cuda.get_device_name()
    assert roofs.bandwidth_gb_s > 100
    assert 0 < roofs.launch_us < 1000
    rates = {(each.weights, each.rows): each for each in roofs.products}
    assert len(roofs.products) + len(ROWS) * len(roofs.skipped) == len(ROWS) * len(WEIGHTS)
    assert {rows for kind, rows in rates if kind == "bf16"} == set(ROWS)
    for each in roofs.products:
        assert min(each.microseconds, each.tflops, each.gb_s) > 0, each
        assert each.gb_s < 1.2 * roofs.bandwidth_gb_s, each  # weights come from memory, not from a cache


def test_a_made_up_model_is_calibrated_within_two_minutes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TOKENMILL_CACHE", str(tmp_path))
    began = time.monotonic()
    report = calibrate("", step_seconds=5.0)
    assert time.monotonic() - began < 150
    assert report["gpu"] == torch.cuda.get_device_name()
    assert report["steps_timed"] > 100
    assert report["engine"]["served_coefficients"]
    for row in report["predicted_against_measured"]:
        assert 0.5 < row["ratio"] < 2.0, row
    stored = load_calibration()
    assert stored is not None
    device = stored.device()
    assert (device.kind, device.source_date) == ("gpu", stored.date)
    engine = measured_engine(report["model"])
    assert engine.cost.step_ms([(512, 0)], (0, 0.0)) > 0
    load = ["--rate", "20", "--input-len", "200", "--output-len", "50", "--limit", "50", "--json"]
    capsys.readouterr()
    assert main(["simulate", report["model"], "--gpu", "this-machine", *load]) == 0
    assert stored.date in json.loads(capsys.readouterr().out)["basis"]
