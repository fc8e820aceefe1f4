"""The GPU's calibration without a GPU: injected kernels and timing, and what the planner makes of the record."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tokenmill.calibrate.gpu_probe import GpuRoofs, ProductRate, probe_gpu
from tokenmill.calibrate.job import machine_calibration
from tokenmill.kernels.base import Declined
from tokenmill.plan.cost.step_cost import StepCost
from tokenmill.plan.cost.this_machine import ModelCalibration, load_calibration, save_calibration
from tokenmill.plan.question.deployment import Deployment
from tokenmill.plan.question.model_names import built_in


class Plain:
    def __init__(self, values: Tensor, bits: int) -> None:
        self.values = values.float()
        self.nbytes = values.numel() * bits // 8

    def multiply(self, x: Tensor) -> Tensor:
        return x.float() @ self.values.T


def make(values: Tensor, weights: str) -> Plain:
    if weights == "fp8":
        raise Declined("this chip has no fp8")
    return Plain(values, {"bf16": 16, "int8": 8, "int4": 4}[weights])


def one_millisecond(works: Sequence[Callable[[], object]]) -> float:
    assert all(isinstance(work(), Tensor) for work in works)
    return 1e-3


def probe() -> GpuRoofs:
    return probe_gpu(
        torch.device("cpu"),
        one_millisecond,
        make,
        name="Testing 1000",
        memory_bytes=80 << 30,
        features=64,
        read_bytes=1 << 20,
        rows=(1, 16),
    )


def test_rates_follow_from_the_times() -> None:
    roofs = probe()
    assert roofs.bandwidth_gb_s == pytest.approx((1 << 20) / 1e-3 / 1e9)
    assert roofs.launch_us == pytest.approx(1000.0)
    rates = {(each.weights, each.rows): each for each in roofs.products}
    assert set(rates) == {(kind, rows) for kind in ("bf16", "int8", "int4") for rows in (1, 16)}
    assert rates["bf16", 16].tflops == pytest.approx(2 * 16 * 64 * 64 / 1e-3 / 1e12)
    assert rates["int4", 1].gb_s == pytest.approx(rates["bf16", 1].gb_s / 4)
    assert roofs.gflops()["int8"] == pytest.approx(1e3 * rates["int8", 16].tflops)


def test_what_the_chip_declines_is_listed() -> None:
    assert probe().skipped == ("fp8 products: this chip has no fp8",)


ROOFS = GpuRoofs(
    "NVIDIA H200",
    141 << 30,
    4100.0,
    3.0,
    (
        ProductRate("bf16", 4096, 800.0, 700.0, 170.0),
        ProductRate("fp8", 4096, 450.0, 1200.0, 150.0),
        ProductRate("int4", 4096, 900.0, 600.0, 40.0),
    ),
)


def test_the_planner_uses_the_gpu_that_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENMILL_CACHE", str(tmp_path))
    model = ModelCalibration(
        (1.0, 0.0, 0.001, 0.0025, 0.01, 0.02, 0.0005, 0.05), 0.0, 2.0, 0.03, (("full", 0, (0,)),), 16, 9000, 8192, 256,
        8192, date="2026-02-03",
    )  # fmt: skip
    save_calibration(machine_calibration(ROOFS, {"llama-3.2-1b": model}))
    stored = load_calibration()
    assert stored is not None
    device = stored.device()
    assert (device.name, device.kind, device.vendor, device.bandwidth_gb_s) == ("this-machine", "gpu", "nvidia", 4100.0)
    assert device.tflops == {"bf16": pytest.approx(700.0), "fp8": pytest.approx(1200.0)}
    assert stored.date in device.source_date
    assert "NVIDIA H200" in device.source
    assert device.measured_shares is not None
    memory, compute = device.measured_shares
    assert 0.1 < memory < 1.0
    assert 0.05 < compute < 1.5
    cost = StepCost(Deployment(built_in("llama-3.2-1b"), device, engine="tokenmill"))
    assert cost.step_ms([], (1, 128.0)) == pytest.approx(model.cost.step_ms([], (1, 128.0)), rel=1.0)
    assert stored.gpu_products[0]["rows"] == 4096
