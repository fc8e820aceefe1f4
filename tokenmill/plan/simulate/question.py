"""What a user asks of the simulator, and how that becomes a deployment, a workload and an answer.

One record per group of flags; every default is filled in here. Called by `tokenmill simulate` and by scripts; knows
nothing of printing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tokenmill.errors import UserError, unknown_name
from tokenmill.hardware.catalog import DeviceGroup, parse_gpu
from tokenmill.hardware.weight_formats import find_format
from tokenmill.plan.cost.performance import basis_of
from tokenmill.plan.cost.this_machine import (
    calibrated_device,
    check_engine,
    is_measured,
    is_this_machine,
    measured_on,
)
from tokenmill.plan.question.deployment import Deployment
from tokenmill.plan.question.engines import default_engine, default_limits
from tokenmill.plan.question.model_names import describe_for_planning
from tokenmill.plan.simulate.job import FleetOptions, Limits, SimulatedEngine, TransferTime, simulate, simulate_engine
from tokenmill.plan.simulate.measured import measured_engine
from tokenmill.plan.simulate.report import Simulation
from tokenmill.plan.simulate.synthetic import SyntheticLoad, at_rate, synthetic_arrivals
from tokenmill.plan.simulate.traces import open_trace
from tokenmill.plan.simulate.workload import Workload, adjusted

_KV_BYTES = {"bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "int8": 1.0, "int4": 0.5}
_SYNTHETIC_REQUESTS = 1000


@dataclass(frozen=True, slots=True)
class LoadQuestion:
    """A trace, or lengths; with `rate` or `users` where there are no times (or instead of them)."""

    trace: str = ""
    input_tokens: int = 0
    output_tokens: int = 0
    rate: float = 0.0
    variation: float = 1.0  # of the intervals: 1 is Poisson, more is bursty
    users: int = 0
    spread: float = 0.0
    shared_prefix: int = 0
    prefixes: int = 1
    speedup: float = 1.0
    limit: int = 0
    repeat: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        if self.trace and (self.input_tokens or self.output_tokens):
            raise UserError("both a trace and lengths are given", "give --trace, or --input-len and --output-len")
        if self.rate and self.users:
            raise UserError("both a rate and users are given", "give --rate or --concurrency")
        if self.rate < 0 or self.users < 0:
            raise UserError("a negative load is given", "give --rate or --concurrency above 0")
        if not self.speedup > 0:
            raise UserError(f"the speed-up is {self.speedup:g}", "give more than 0")
        if self.limit < 0 or self.repeat < 1:
            raise UserError(f"limit {self.limit}, repeat {self.repeat}", "give --limit 0 or more, --repeat 1 or more")


@dataclass(frozen=True, slots=True)
class EngineQuestion:
    """The engine and its parallelism. 0 and "": the default."""

    model: str
    gpu: str
    weights: str = ""
    kv_dtype: str = "bf16"
    engine: str = ""
    tp: int = 0
    pp: int = 1
    replicas: int = 0
    context: int = 0
    batch_tokens: int = 0
    max_sequences: int = 0
    prices: Path | None = None


def load_of(question: LoadQuestion) -> Workload:
    q = question
    if q.trace:
        trace = open_trace(q.trace, q.seed)
        if not trace.timed and not q.rate and not q.users:
            raise UserError(f"{q.trace} has no arrival times", "give --rate or --concurrency as well")
        rows, name, timed = trace.arrivals, f"{trace.kind} {Path(q.trace).name}", trace.timed
    else:
        if not (q.input_tokens and q.output_tokens):
            raise UserError("no load is given", "give --trace FILE, or --input-len, --output-len and --rate")
        if not q.rate and not q.users:
            raise UserError("no arrival process is given", "give --rate or --concurrency")
        load = SyntheticLoad(
            q.input_tokens, q.output_tokens, q.limit or _SYNTHETIC_REQUESTS, q.spread, q.shared_prefix, q.prefixes
        )
        rows, name, timed = (lambda: synthetic_arrivals(load, q.seed)), "synthetic", False
    if q.rate:  # after repetition, so that the process goes on
        return Workload(
            f"{name}, {q.rate:g} requests/s",
            lambda: adjusted(
                at_rate(adjusted(rows(), 1.0, q.limit, q.repeat), q.rate, q.variation, q.seed), q.speedup, 0
            ),
        )
    users = f", {q.users} users" if q.users else "" if timed else ", at once"
    return Workload(name + users, lambda: adjusted(rows(), q.speedup, q.limit, q.repeat), q.users)


def deployment_of(question: EngineQuestion, engines: int) -> tuple[Deployment, int]:
    """(deployment, replicas). The devices are divided into `engines` equal ones; if 0, by --tp, else all in one."""
    q = question
    group = DeviceGroup(calibrated_device(q.model)) if is_this_machine(q.gpu) else parse_gpu(q.gpu, q.prices)
    model = describe_for_planning(q.model)
    if q.pp < 1 or q.tp < 0:
        raise UserError(f"tp {q.tp}, pp {q.pp}", "give --tp and --pp of at least 1")
    parts = engines or (max(1, group.count // (q.tp * q.pp)) if q.tp else 1)
    tp = q.tp or group.count // (parts * q.pp)
    if tp * q.pp * parts != group.count:
        raise UserError(
            f"{group.count} devices are not {parts} engines of {max(tp, 1)} x {q.pp}",
            f"write --gpu {group.device.name}x{parts * max(tp, 1) * q.pp}, or change --tp, --pp or the engines",
        )
    if q.kv_dtype not in _KV_BYTES:
        raise unknown_name("KV dtype", q.kv_dtype, _KV_BYTES)
    deployment = Deployment(
        model,
        group.device,
        find_format(q.weights or model.stored_format),
        _KV_BYTES[q.kv_dtype],
        q.engine or default_engine(group.device),
        tp,
        q.pp,
    )
    default = default_limits(deployment.engine, deployment.device.kind)
    tokens, sequences = q.batch_tokens or default.tokens, q.max_sequences or default.sequences
    return replace(deployment, batch_tokens=tokens, max_sequences=sequences), parts


def ask(
    engine: EngineQuestion, load: LoadQuestion, fleet: FleetOptions, limits: Limits
) -> tuple[Simulation, dict[str, Any]]:
    """The simulation, and the answer as plain values with what it rests on."""
    workload = load_of(load)
    if is_this_machine(engine.gpu):
        check_engine(engine.engine)
        if is_measured(engine.model) and not engine.weights:
            return _ask_this_machine(engine, workload, fleet, limits)
    split = fleet.prefill_replicas + fleet.decode_replicas
    deployment, replicas = deployment_of(engine, split or engine.replicas)
    fleet = replace(fleet, replicas=replicas) if not split else fleet
    result = simulate(deployment, workload, fleet, limits, engine.context)
    d = deployment
    return result, {
        "model": d.model.name,
        "device": f"{d.device.name} x{d.devices * (split or replicas)}",
        "deployment": f"{d.weights.name} weights, {8 * d.kv_bytes:g}-bit KV, tp {d.tp}, pp {d.pp}, {d.engine} costs",
        "workload": workload.name,
        "scheduler": f"tokenmill, fcfs, {d.batch_tokens} tokens a step, {d.max_sequences} sequences",
        "router": fleet.router,
        "basis": basis_of(d) + _remedy(engine),
        **result.to_json(),
    }


def _remedy(engine: EngineQuestion) -> str:
    if not is_this_machine(engine.gpu):
        return ""
    return f"; for measured steps: tokenmill plan {engine.model} --calibrate, and no --weights"


def _ask_this_machine(
    engine: EngineQuestion, workload: Workload, fleet: FleetOptions, limits: Limits
) -> tuple[Simulation, dict[str, Any]]:
    measured = _with_limits(measured_engine(engine.model), engine)
    result = simulate_engine(measured, workload, fleet, limits, TransferTime())
    shape = measured.shape
    return result, {
        "model": engine.model,
        "device": "this-machine",
        "workload": workload.name,
        "scheduler": f"tokenmill, fcfs, {shape.batch_tokens} tokens a step, {shape.max_running} sequences",
        "router": fleet.router,
        "basis": f"measured: steps of this engine on this machine (plan --calibrate, {measured_on(engine.model)})",
        **result.to_json(),
    }


def _with_limits(measured: SimulatedEngine, question: EngineQuestion) -> SimulatedEngine:
    shape = measured.shape
    shape = replace(
        shape,
        batch_tokens=question.batch_tokens or shape.batch_tokens,
        max_running=question.max_sequences or shape.max_running,
        context=question.context or shape.context,
    )
    return replace(measured, shape=shape)
