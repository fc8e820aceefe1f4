"""What this machine has: CPU model and instruction flags, cores and memory this process may use, accelerators.

Reads the operating system only; no torch, no benchmark. Called by `doctor`, the engine's defaults and the planner.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

# NVIDIA's, on boards and in WSL too; AMD's.
_GPU_FILES = ("nvidiactl", "nvidia0", "nvhost-gpu", "nvgpu", "dxg", "kfd")


@dataclass(frozen=True, slots=True)
class Machine:
    system: str
    architecture: str
    cpu: str
    flags: tuple[str, ...]
    cores: int  # that this process may run on
    memory_bytes: int
    available_bytes: int
    gpus: tuple[str, ...]


def detect_machine() -> Machine:
    return Machine(
        system=platform.system(),
        architecture=platform.machine(),
        cpu=_cpu_name(),
        flags=_cpu_flags(),
        cores=usable_cores(),
        memory_bytes=total_memory(),
        available_bytes=available_memory(),
        gpus=_gpus(),
    )


def has_gpu_driver() -> bool:
    """Whether torch may find a GPU, without importing it: drivers show themselves as files on Linux."""
    if platform.system() != "Linux":
        return platform.system() != "Darwin"
    return any(Path("/dev", name).exists() for name in _GPU_FILES)


def usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def total_memory() -> int:
    """Bytes of the machine."""
    return _meminfo("MemTotal")


def available_memory() -> int:
    """Bytes this process could still take: what the kernel calls available, within the control group's limit."""
    available = _meminfo("MemAvailable")
    try:
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        return min(available, max(0, limit - used)) if available else max(0, limit - used)
    except (OSError, ValueError):  # no control group, or "max"
        return available or 4 << 30


def _meminfo(key: str) -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith(f"{key}:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    if key == "MemTotal" and hasattr(os, "sysconf"):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return 0


def _cpuinfo() -> dict[str, str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return {}
    pairs = (line.split(":", 1) for line in lines if ":" in line)
    return {key.strip(): value.strip() for key, value in pairs}


# Arm cores name themselves by number; these are the ones in servers and laptops today.
_ARM_PARTS = {"0xd0c": "Neoverse-N1", "0xd40": "Neoverse-V1", "0xd49": "Neoverse-N2", "0xd4f": "Neoverse-V2"}


def _cpu_name() -> str:
    info = _cpuinfo()
    name = info.get("model name") or _ARM_PARTS.get(info.get("CPU part", ""))
    return name or platform.processor() or platform.machine()


def _cpu_flags() -> tuple[str, ...]:
    info = _cpuinfo()
    return tuple((info.get("flags") or info.get("Features") or "").split())


def gpu_memory() -> int:
    """Bytes of the first GPU; 0 if there is none, or it does not say."""
    lines = _ask_driver("memory.total", "nounits")
    return int(lines[0]) << 20 if lines and lines[0].isdigit() else 0


def _gpus() -> tuple[str, ...]:
    return _ask_driver("name,memory.total")


def _ask_driver(what: str, *how: str) -> tuple[str, ...]:
    command = shutil.which("nvidia-smi")
    if not command:
        return ()
    query = [command, f"--query-gpu={what}", "--format=" + ",".join(("csv", "noheader", *how))]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return ()
    return tuple(line.strip() for line in done.stdout.splitlines() if line.strip())
