"""What the engine process takes of the machine: its memory, and the memory, load and power of its GPUs.

Read every few seconds in a thread of its own, so that a driver that answers slowly delays neither a step nor a
heartbeat. GPUs are asked through NVML if `nvidia-ml-py` is installed; without it torch knows their memory only. The
engine process starts one; heartbeats carry what it read.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

from tokenmill.engine.stats import DeviceStats

_SECONDS = 2.0  # between two looks


class UsageWatch:
    def __init__(self, seconds: float = _SECONDS) -> None:
        self._seconds = seconds
        self._nvml = _load_nvml()
        self._devices: list[DeviceStats] = []
        torch = sys.modules.get("torch")  # a process that has not imported it uses no GPU
        if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
            threading.Thread(target=self._watch, name="usage", daemon=True).start()

    def read(self) -> tuple[int, list[DeviceStats]]:
        """(bytes of memory that this process has, its GPUs as they were last seen)."""
        return resident_bytes(), self._devices

    def _watch(self) -> None:
        while True:
            self._devices = read_devices(self._nvml)
            time.sleep(self._seconds)


def read_devices(nvml: Any | None) -> list[DeviceStats]:
    """The GPUs that this process has tensors on."""
    import torch

    used = [number for number in range(torch.cuda.device_count()) if torch.cuda.memory_reserved(number)]
    return [_read_device(number, nvml) for number in used]


def _read_device(number: int, nvml: Any | None) -> DeviceStats:
    import torch

    stats = DeviceStats(str(number), memory_reserved=torch.cuda.memory_reserved(number))
    if nvml is not None:
        try:
            return _ask_nvml(stats, nvml, f"GPU-{torch.cuda.get_device_properties(number).uuid}")
        except nvml.NVMLError:  # such as a slice of a GPU, which has no load of its own
            pass
    free, stats.memory_total = torch.cuda.mem_get_info(number)
    stats.memory_used = stats.memory_total - free
    return stats


def _ask_nvml(stats: DeviceStats, nvml: Any, uuid: str) -> DeviceStats:
    handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    stats.memory_used, stats.memory_total = memory.used, memory.total
    stats.utilization = nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100
    stats.power = nvml.nvmlDeviceGetPowerUsage(handle) / 1000
    stats.temperature = float(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU))
    return stats


def _load_nvml() -> Any | None:
    """The module, ready to be asked; None without the package or the driver's library."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml


def resident_bytes() -> int:
    """Memory of this process; 0 where the system does not tell."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return 0
