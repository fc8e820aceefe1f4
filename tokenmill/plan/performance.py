"""The closed-form answer: TTFT, TPOT and throughput of a deployment under a steady load, each with interval and basis.

Joins memory, step cost and the steady state. Intervals come from the residuals of the validation rows (P10 to P90 of
measured over predicted); where nothing was measured they are wider and say so. Called by the search and the CLI.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources

from tokenmill.errors import UserError
from tokenmill.hardware.memory import MemoryPlan
from tokenmill.plan.closed_loop import Load, Scheduling
from tokenmill.plan.deployment import Deployment, Room, room_for
from tokenmill.plan.engines import device_roofs
from tokenmill.plan.speculation import Speculation, speculative_step
from tokenmill.plan.steady_state import steady_state
from tokenmill.plan.step_cost import StepCost
from tokenmill.plan.tables import MEASURED_ON

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

    @property
    def rate_per_device(self) -> Figure:
        return self.output_rate.scaled(1 / self.deployment.devices, "tokens/s/device")

    @property
    def rate_per_user(self) -> Figure:
        """Tokens per second that one user sees: slow steps make the low end."""
        t = self.tpot
        return Figure(1e3 / t.value, 1e3 / t.high, 1e3 / t.low, "tokens/s/user", t.basis)


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
    stages = deployment.pp
    users = replace(load, concurrency=max(1, -(-load.concurrency // stages)))  # one micro-batch per stage in flight
    scheduling = Scheduling(
        batch_tokens=deployment.batch_tokens * deployment.data_parallel,
        mixed=cost.costs.mixed,
        max_running=min(max(1, fit // stages), deployment.max_sequences),
        request_ms=cost.costs.request_ms,
    )
    plain = steady_state(cost.step_ms, users, scheduling)
    found = steady_state(speculative_step(speculation, cost), users, scheduling) if speculation else plain
    basis = basis_of(deployment)
    if speculation:
        basis += f"; speculation by F10, {speculation.acceptance:.0%} of {speculation.draft_tokens} drafts taken"
    tpot_low, tpot_high = interval("tpot", deployment)
    ttft_low, ttft_high = interval("ttft", deployment)
    slowest = max(found.tpot_ms, plain.tpot_ms) * tpot_high  # drafts that are never accepted gain nothing
    slow_rate = min(found.output_tok_s, plain.output_tok_s) / tpot_high
    rate = found.output_tok_s
    return Estimate(
        deployment=deployment,
        load=load,
        memory=memory,
        kv_tokens=room.kv_tokens,
        sequences_that_fit=fit,
        ttft=Figure(found.ttft_ms, found.ttft_ms * ttft_low, found.ttft_ms * ttft_high, "ms", basis),
        tpot=Figure(found.tpot_ms, found.tpot_ms * tpot_low, slowest, "ms", basis),
        output_rate=Figure(rate * stages, slow_rate * stages, rate * stages / tpot_low, "tokens/s", basis),
        saturated=found.saturated,
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
