"""The closed-form answer: TTFT, TPOT and throughput of a deployment under a steady load, each with interval and basis.

Joins memory, step cost and the steady state. Intervals come from the residuals of the validation rows (P10 to P90 of
measured over predicted); where nothing was measured they are wider, and the basis says so. Called by the search and the
CLI.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources

from tokenmill.errors import UserError
from tokenmill.hardware.memory import MemoryPlan
from tokenmill.plan.cost.closed_loop import Load, Scheduling
from tokenmill.plan.cost.engine_costs import device_roofs
from tokenmill.plan.cost.speculation import speculative_step
from tokenmill.plan.cost.steady_state import steady_state
from tokenmill.plan.cost.step_cost import StepCost
from tokenmill.plan.cost.tables import MEASURED_ON
from tokenmill.plan.question.deployment import Deployment, Room, room_for
from tokenmill.plan.question.question import Speculation

# How far the steady state typically lies from the event loop with lengths that vary (test_steady_state.py).
_STEADY = {"tpot": 1.1, "ttft": 1.2}
_MEASURED_FAMILIES = ("hopper", "blackwell")


@dataclass(frozen=True, slots=True)
class Figure:
    """A number with its interval (P10 to P90) and where it comes from."""

    value: float
    low: float
    high: float
    unit: str
    basis: str

    def scaled(self, factor: float, unit: str) -> Figure:
        return Figure(self.value * factor, self.low * factor, self.high * factor, unit, self.basis)


@dataclass(frozen=True, slots=True)
class Estimate:
    deployment: Deployment
    load: Load
    memory: MemoryPlan
    kv_tokens: int
    sequences_that_fit: int
    ttft: Figure  # ms, mean in the steady state
    tpot: Figure  # ms
    output_rate: Figure  # tokens/s of the whole deployment
    saturated: bool
    bubble: float = 0.0  # share of time that the stages of a pipeline idle


def basis_of(deployment: Deployment) -> str:
    """Where the times come from: a measured table, the table moved by data sheets, or formulas alone."""
    d = deployment
    roofs = device_roofs(d.engine, d.device)
    if roofs and d.device.measured_shares:
        return f"formula: measured roofs of this machine x the shares that {d.engine} reached ({d.device.source})"
    if roofs:
        shares = f"bandwidth share measured for {d.engine}" if roofs.measured else "assumed shares"
        return f"formula: roofs of {d.device.name} x {shares} (F13)"
    extra = "; latent attention by formula" if "latent" in d.model.mixer_kinds else ""
    if d.device.name == MEASURED_ON:
        return f"table: ops measured on {MEASURED_ON}, vLLM 0.24.0{extra}"
    if d.device.family in _MEASURED_FAMILIES:
        return f"table scaled: ops measured on {MEASURED_ON}, moved to {d.device.name} by its roofs{extra}"
    return f"extrapolated: ops measured on {MEASURED_ON}, moved to {d.device.name}, a generation without rows{extra}"


@cache
def _residuals() -> dict[str, dict[str, list[float]]]:
    text = (resources.files("tokenmill.plan") / "data" / "residuals.toml").read_text(encoding="utf-8")
    residuals: dict[str, dict[str, list[float]]] = tomllib.loads(text)["residual"]
    return residuals


def interval(metric: str, deployment: Deployment) -> tuple[float, float]:
    """Factors (P10, P90) of measured over predicted for this metric, engine and kind of model."""
    kind = "moe" if deployment.model.is_moe else "dense"
    table = _residuals()[metric]
    low, high = table.get(f"{deployment.engine}-{kind}") or table[f"any-{kind}"]
    if not basis_of(deployment).startswith("table"):  # nothing like it was measured: half as wide again on both sides
        low, high = low / 1.5, high * 1.5
    return low / _STEADY[metric], high * _STEADY[metric]


def estimate(
    deployment: Deployment,
    load: Load,
    cost: StepCost | None = None,
    speculation: Speculation | None = None,
    room: Room | None = None,
) -> Estimate:
    """Steady-state latency and throughput; refuses what does not fit into memory. `cost` and `room` (of the load's mean
    tokens) where the caller has them already."""
    room = room or room_for(deployment, load.mean_tokens)
    memory, fit = room.memory, room.sequences
    if not memory.fits or fit < 1:
        raise UserError(*_does_not_fit(deployment, memory, load))
    cost = cost or StepCost(deployment)
    in_flight = min(deployment.pp, load.concurrency)  # micro-batches: one per stage, each with a part of the users
    users = replace(load, concurrency=-(-load.concurrency // in_flight))
    scheduling = Scheduling(
        batch_tokens=deployment.batch_tokens * deployment.data_parallel,
        mixed=cost.costs.mixed,
        max_running=min(max(1, fit // in_flight), deployment.max_sequences),
        request_ms=cost.costs.request_ms,
        in_flight=in_flight,
    )
    plain = steady_state(cost.step_ms, users, scheduling)
    found = steady_state(speculative_step(speculation, cost), users, scheduling) if speculation else plain
    bubble = 1 - in_flight / deployment.pp / found.stretch
    basis = basis_of(deployment)
    if deployment.pp > 1:
        basis += f"; pipeline stages idle {bubble:.0%} of the time (F9)"
    if speculation:
        basis += f"; speculation by F10, {speculation.acceptance:.0%} of {speculation.draft_tokens} drafts taken"
    tpot_low, tpot_high = interval("tpot", deployment)
    ttft_low, ttft_high = interval("ttft", deployment)
    slowest = max(found.tpot_ms, plain.tpot_ms) * tpot_high  # drafts that are never accepted gain nothing
    rate = found.output_tok_s * in_flight
    slow_rate = min(rate, plain.output_tok_s * in_flight) / tpot_high
    return Estimate(
        deployment=deployment,
        load=load,
        memory=memory,
        kv_tokens=room.kv_tokens,
        sequences_that_fit=fit,
        ttft=Figure(found.ttft_ms, found.ttft_ms * ttft_low, found.ttft_ms * ttft_high, "ms", basis),
        tpot=Figure(found.tpot_ms, found.tpot_ms * tpot_low, slowest, "ms", basis),
        output_rate=Figure(rate, slow_rate, rate / tpot_low, "tokens/s", basis),
        saturated=found.saturated,
        bubble=bubble,
    )


def _does_not_fit(deployment: Deployment, memory: MemoryPlan, load: Load) -> tuple[str, str]:
    d, gib = deployment, 1 << 30
    where = f"{d.device.name} x{d.devices}"
    budget = memory.usable * memory.utilization
    problem = (
        f"{d.model.name} as {d.weights.name} does not fit on {where}: per device {memory.weights / gib:.1f} GiB of "
        f"weights, {memory.activations / gib:.1f} of activations and {memory.runtime / gib:.1f} of runtime leave "
        f"{memory.kv / gib:.1f} GiB for KV within {budget / gib:.1f} GiB"
    )
    if memory.fits:
        problem += f", less than one request of {load.mean_tokens} tokens"
    return problem, "use fewer bits per weight, more devices (--tp), or a device with more memory"
