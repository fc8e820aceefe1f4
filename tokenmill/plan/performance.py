"""The closed-form answer: TTFT, TPOT and throughput of a deployment under a steady load, each with interval and basis.

Joins memory, step cost and the closed loop. Intervals come from the residuals of the validation rows (P10 to P90 of
measured over predicted); where nothing was measured they are wider and say so. Called by the search and the CLI.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources

from tokenmill.errors import UserError
from tokenmill.hardware.memory import MemoryPlan
from tokenmill.plan.closed_loop import Load, Scheduling, run_closed_loop
from tokenmill.plan.deployment import Deployment, concurrent_sequences, kv_token_capacity, plan_memory
from tokenmill.plan.engines import roof_shares
from tokenmill.plan.step_cost import StepCost
from tokenmill.plan.tables import MEASURED_ON

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
    roofs = roof_shares(d.engine, d.device.name, d.device.kind)
    if roofs:
        shares = f"bandwidth share measured for {d.engine}" if roofs.measured else "assumed shares"
        return f"formula: roofs of {d.device.name} x {shares} (F13)"
    latent = any(kind.attention.kind == "latent" for kind in d.model.layers)
    extra = "; latent attention by formula" if latent else ""
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
    return low, high


def estimate(deployment: Deployment, load: Load, cost: StepCost | None = None) -> Estimate:
    """Steady-state latency and throughput; refuses what does not fit into memory."""
    memory = plan_memory(deployment)
    fit = concurrent_sequences(deployment, load.input_tokens + load.output_tokens)
    if not memory.fits or fit < 1:
        raise UserError(*_does_not_fit(deployment, memory, load))
    cost = cost or StepCost(deployment)
    stages = deployment.pp
    users = replace(load, concurrency=max(1, -(-load.concurrency // stages)))  # one micro-batch per stage in flight
    room = min(max(1, fit // stages), deployment.max_sequences)
    scheduling = Scheduling(
        deployment.batch_tokens * deployment.data_parallel, cost.costs.mixed, room, cost.costs.request_ms
    )
    result = run_closed_loop(cost, users, scheduling)
    basis = basis_of(deployment)
    tpot_low, tpot_high = interval("tpot", deployment)
    ttft_low, ttft_high = interval("ttft", deployment)
    ttft, tpot, rate = result.steady_ttft_ms, result.steady_tpot_ms, result.output_tok_s * stages
    return Estimate(
        deployment=deployment,
        load=load,
        memory=memory,
        kv_tokens=kv_token_capacity(deployment),
        sequences_that_fit=fit,
        ttft=Figure(ttft, ttft * ttft_low, ttft * ttft_high, "ms", basis),
        tpot=Figure(tpot, tpot * tpot_low, tpot * tpot_high, "ms", basis),
        output_rate=Figure(rate, rate / tpot_high, rate / tpot_low, "tokens/s", basis),
        saturated=result.saturated,
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
        problem += f", less than one request of {load.input_tokens + load.output_tokens} tokens"
    return problem, "use fewer bits per weight, more devices (--tp), or a device with more memory"
