"""Memory of the engine process, and its GPUs through NVML or torch: with a driver's library in place of the driver."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tokenmill.engine.stats import DeviceStats
from tokenmill.engine.usage_watch import UsageWatch, read_devices, resident_bytes
from tokenmill.serve.metrics import Metrics


class Nvml:
    """Answers as nvidia-ml-py does."""

    NVML_TEMPERATURE_GPU = 0

    class NVMLError(Exception):
        pass

    def __init__(self, knows: bool = True) -> None:
        self._knows = knows

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if not self._knows:
            raise self.NVMLError
        assert uuid == "GPU-abc"
        return uuid

    def nvmlDeviceGetMemoryInfo(self, _handle: str) -> Any:
        return SimpleNamespace(used=30, total=100)

    def nvmlDeviceGetUtilizationRates(self, _handle: str) -> Any:
        return SimpleNamespace(gpu=75)

    def nvmlDeviceGetPowerUsage(self, _handle: str) -> int:
        return 412_500

    def nvmlDeviceGetTemperature(self, _handle: str, _sensor: int) -> int:
        return 61


@pytest.fixture(autouse=True)
def _two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process has tensors on the first of them."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda number: 20 if number == 0 else 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _number: (60, 100))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _number: SimpleNamespace(uuid="abc"))


def test_nvml_tells_load_and_power() -> None:
    assert read_devices(Nvml()) == [DeviceStats("0", 0.75, 30, 100, 20, 412.5, 61.0)]


@pytest.mark.parametrize("nvml", [None, Nvml(knows=False)])
def test_without_it_torch_tells_the_memory(nvml: Any) -> None:
    assert read_devices(nvml) == [DeviceStats("0", None, 40, 100, 20)]


def test_a_cpu_has_a_process_and_no_device() -> None:
    resident, devices = UsageWatch().read()
    assert resident == pytest.approx(resident_bytes(), rel=0.5)
    assert devices == []


def test_what_is_not_known_is_not_shown() -> None:
    metrics = Metrics("m")
    metrics.on_devices([DeviceStats("0", None, 40, 100, 20)])
    text = metrics.render().decode()
    assert 'tokenmill_gpu_memory_used_bytes{device="0",model_name="m"} 40.0' in text
    assert "tokenmill_gpu_utilization_ratio{" not in text
    metrics.on_devices([])
    assert "tokenmill_gpu_memory_used_bytes{" not in metrics.render().decode()
