"""The stored result of `plan --calibrate` for this machine, on disk and as a device of the catalog.

One JSON file per machine in the cache folder: roofs, and per model a fitted step cost with the engine's shape. Owns the
file; measures nothing and imports no torch. Read by `plan` and `simulate` with `--gpu this-machine`.
"""

from __future__ import annotations

import hashlib
import json
import platform
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from tokenmill.checkpoint.sources.cache import cache_root
from tokenmill.errors import UserError
from tokenmill.hardware.catalog import Device
from tokenmill.hardware.machine import Machine, detect_machine
from tokenmill.hardware.weight_formats import find_format
from tokenmill.plan.cost.ceilings import bytes_read_per_token, prefill_flops
from tokenmill.plan.cost.measured_cost import MeasuredCost
from tokenmill.plan.question.model_names import describe_for_planning

NAME = "this-machine"
ENGINE = "tokenmill"  # the only one that is measured here
_VERSION = 2
_PROBE_TOKENS, _PROBE_CONTEXT = 256, 128


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
    served_coefficients: tuple[float, ...] = ()  # fitted to steps of the server, other processes included
    date: str = ""

    @property
    def cost(self) -> MeasuredCost:
        """Of a step while the engine serves."""
        if self.served_coefficients:
            return MeasuredCost(tuple(self.served_coefficients))
        return MeasuredCost(tuple(self.coefficients), self.token_ms)


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
    gpu: str = ""  # where it was measured: bandwidth, rates and models are then this GPU's
    gpu_memory_bytes: int = 0
    gpu_products: tuple[dict[str, Any], ...] = ()  # calibrate/gpu_probe.py: rate by weights and rows
    launch_us: float = 0.0
    shares: tuple[float, float] | None = None  # stored where the models are not: a record kept beside measured runs

    def device(self) -> Device:
        """This machine as a row of the catalog, for models that were not measured themselves."""
        bare = self._bare_device()
        return replace(bare, measured_shares=self.shares or self._shares(bare))

    def _shares(self, bare: Device) -> tuple[float, float] | None:
        """What our engine reached of the roofs, over the models that were measured: one sequence decoding reads the
        weights once, a prompt of a few hundred tokens is arithmetic. None: none of them can be described any more."""
        found = []
        for name, model in self.models.items():
            try:
                planned = describe_for_planning(name)
            except UserError:
                continue
            stored, cost = find_format(planned.stored_format), MeasuredCost(tuple(model.coefficients))
            reading = bytes_read_per_token(planned, stored) / (bare.bandwidth_gb_s * 1e6)
            flops = prefill_flops(planned.active_parameters, _PROBE_TOKENS)
            rate = bare.rate(stored.math if self.gpu else "int8" if stored.bits < 16 else "fp32")
            memory = reading / cost.step_ms((), (1, float(_PROBE_CONTEXT)))
            compute = flops / (rate * 1e9) / cost.step_ms(((_PROBE_TOKENS, 0),), (0, 0.0))
            found.append((memory, compute))
        return (median(m for m, _ in found), median(c for _, c in found)) if found else None

    def _bare_device(self) -> Device:
        gib = 1 << 30
        source = f"tokenmill plan --calibrate with {', '.join(self.models)}"
        if self.gpu:
            # Four-bit groups are multiplied as bf16: their rate is no roof of its own.
            rates = {name: rate / 1e3 for name, rate in self.gflops.items() if name != "int4"}
            return Device(
                name=NAME,
                vendor="nvidia",
                kind="gpu",
                family="measured",
                memory_gb=self.gpu_memory_bytes / 1e9,
                usable_gib=self.gpu_memory_bytes / gib,
                bandwidth_gb_s=self.bandwidth_gb_s,
                tflops=rates,
                source=f"{source} on {self.gpu}",
                source_date=self.date,
                confidence="verified",
            )
        return Device(
            name=NAME,
            vendor="measured",
            kind="cpu",
            family="cpu",
            memory_gb=self.memory_bytes / 1e9,
            usable_gib=self.memory_bytes / gib,
            bandwidth_gb_s=self.bandwidth_gb_s,
            tflops={"fp32": self.gflops["float32"] / 1e3, "int8": max(self.gflops.values()) / 1e3},
            source=source,
            source_date=self.date,
            confidence="verified",
        )


def calibration_path(machine: Machine | None = None) -> Path:
    """A file of this machine's own: the cache folder may be shared between several."""
    found = machine or detect_machine()
    text = f"{platform.node()}|{found.cpu}|{found.cores}|{found.memory_bytes >> 28}{''.join(found.gpus[:1])}"
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
        shares = tuple(data.pop("shares", None) or ()) or None
        return MachineCalibration(**data, models=models, shares=shares)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def is_this_machine(name: str) -> bool:
    return name.strip().lower() == NAME


def check_engine(engine: str) -> None:
    if engine not in ("", ENGINE):
        raise UserError(f"{engine} is not measured on this machine", f"drop --engine, or give --engine {ENGINE}")


def is_measured(model: str) -> bool:
    """Whether this very model was measured here, not only the machine."""
    return model in _calibration(model).models


def measured_on(model: str) -> str:
    """The date of what was measured with this model, else of the machine's roofs."""
    calibration = _calibration(model)
    measured = calibration.models.get(model)
    return (measured.date if measured else "") or calibration.date


def model_calibration(model: str) -> ModelCalibration:
    """What was measured here with this model."""
    models = _calibration(model).models
    if model not in models:
        known = f" ({', '.join(models)} is)" if models else ""
        raise UserError(f"{model} is not measured on this machine{known}", f"run: tokenmill plan {model} --calibrate")
    return models[model]


def calibrated_device(model: str = "") -> Device:
    """This machine as a device of the catalog, with the roofs that were measured."""
    return _calibration(model).device()


def _calibration(model: str) -> MachineCalibration:
    calibration = load_calibration()
    if calibration is None:
        raise UserError("this machine is not measured", f"run: tokenmill plan {model or 'smollm2'} --calibrate")
    return calibration
