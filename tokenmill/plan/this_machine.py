"""What `plan --calibrate` found out about this machine, on disk and in the planner's terms.

One JSON file per machine in the cache folder: roofs, and per model a fitted step cost with the engine's shape. Owns the
file; measures nothing and imports no torch. Read by `simulate --gpu this-machine`.
"""

from __future__ import annotations

import hashlib
import json
import platform
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tokenmill.checkpoint.sources.cache import cache_root
from tokenmill.errors import UserError
from tokenmill.hardware.catalog import Device
from tokenmill.hardware.kv_layout import KVGroup, KVLayout
from tokenmill.hardware.machine import Machine, detect_machine
from tokenmill.plan.measured_cost import MeasuredCost
from tokenmill.plan.simulate.engine_shape import EngineShape
from tokenmill.plan.simulate.job import SimulatedEngine

NAME = "this-machine"
_VERSION = 1


@dataclass(frozen=True, slots=True)
class ModelCalibration:
    """One model under our engine here, with the settings that it was measured with."""

    coefficients: tuple[float, ...]
    token_ms: float  # what serving adds for each token
    request_ms: float
    fit_error: float  # median over timed steps
    groups: tuple[tuple[str, int, tuple[int, ...]], ...]  # kind, window, layers
    page_size: int
    num_pages: int
    batch_tokens: int
    max_running: int
    context: int

    def engine(self) -> SimulatedEngine:
        groups = tuple(KVGroup(kind, window, tuple(layers)) for kind, window, layers in self.groups)
        layout = KVLayout(self.page_size, max(len(group.layers) for group in groups), 1, 1, groups)
        shape = EngineShape(layout, self.num_pages, self.batch_tokens, self.max_running, self.context)
        return SimulatedEngine(shape, MeasuredCost(tuple(self.coefficients), self.token_ms), self.request_ms)


@dataclass(frozen=True, slots=True)
class MachineCalibration:
    cpu: str
    cores: int
    threads: int
    memory_bytes: int
    date: str
    bandwidth_gb_s: float
    gflops: dict[str, float]  # by weight type, at many tokens
    models: dict[str, ModelCalibration] = field(default_factory=dict)

    def device(self) -> Device:
        """This machine as a row of the catalog, for models that were not measured themselves."""
        gib = 1 << 30
        return Device(
            name=NAME,
            vendor="measured",
            kind="cpu",
            family="cpu",
            memory_gb=self.memory_bytes / 1e9,
            usable_gib=self.memory_bytes / gib,
            bandwidth_gb_s=self.bandwidth_gb_s,
            tflops={"fp32": self.gflops["float32"] / 1e3, "int8": max(self.gflops.values()) / 1e3},
            source="tokenmill plan --calibrate",
            source_date=self.date,
            confidence="verified",
        )


def calibration_path(machine: Machine | None = None) -> Path:
    """A file of this machine's own: the cache folder may be shared between several."""
    found = machine or detect_machine()
    text = f"{platform.node()}|{found.cpu}|{found.cores}|{found.memory_bytes >> 28}"
    return cache_root() / "calibration" / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"


def save_calibration(calibration: MachineCalibration, path: Path | None = None) -> Path:
    path = path or calibration_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps({"version": _VERSION, **asdict(calibration)}, indent=1), encoding="utf-8")
    partial.replace(path)
    return path


def load_calibration(path: Path | None = None) -> MachineCalibration | None:
    """None: never calibrated, or by a version whose file means something else."""
    try:
        data: dict[str, Any] = json.loads((path or calibration_path()).read_text(encoding="utf-8"))
        if data.pop("version") != _VERSION:
            return None
        models = {name: ModelCalibration(**row) for name, row in data.pop("models").items()}
        return MachineCalibration(**data, models=models)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def measured_engine(model: str) -> SimulatedEngine:
    """The engine as it was measured here with this model."""
    calibration = load_calibration()
    if calibration is None or model not in calibration.models:
        known = f" ({', '.join(calibration.models)} is)" if calibration and calibration.models else ""
        raise UserError(f"{model} is not measured on this machine{known}", f"run: tokenmill plan {model} --calibrate")
    return calibration.models[model].engine()


def calibrated_device() -> Device:
    """This machine as a device of the catalog, with the roofs that were measured."""
    calibration = load_calibration()
    if calibration is None:
        raise UserError("this machine is not measured", "run: tokenmill plan --calibrate")
    return calibration.device()
