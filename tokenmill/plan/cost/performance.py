"""The answer for a deployment under a load: TTFT, TPOT and throughput, each with interval and basis.

`estimate` is the one function that plans, `--validate` and the report ask: it joins memory, step cost and the model
of the arrivals asked for (lock-step: closed_loop.py; poisson and traces: steady_state.py). Intervals come from the
score of the same kind of arrivals (intervals.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tokenmill.errors import UserError
from tokenmill.hardware.memory import MemoryPlan
from tokenmill.plan.cost.closed_loop import Load, Scheduling, StepTime, run_closed_loop
from tokenmill.plan.cost.engine_costs import device_roofs
from tokenmill.plan.cost.intervals import Interval, interval
from tokenmill.plan.cost.speculation import speculative_step
from tokenmill.plan.cost.split import SplitDeployment, split_state
from tokenmill.plan.cost.steady_state import SteadyState, steady_state
from tokenmill.plan.cost.step_cost import StepCost
from tokenmill.plan.cost.tables import MEASURED_ON
from tokenmill.plan.question.deployment import Deployment, Room, room_for
from tokenmill.plan.question.question import Speculation
from tokenmill.plan.question.workload import Arrivals

_MEASURED_FAMILIES = ("hopper", "blackwell")
_POISSON = Arrivals()


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
    ttft: Figure  # ms, mean
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


def estimate(
    deployment: Deployment,
    load: Load,
    cost: StepCost | None = None,
    speculation: Speculation | None = None,
    room: Room | None = None,
    arrivals: Arrivals = _POISSON,
) -> Estimate:
    """Latency and throughput under these arrivals; refuses what does not fit into memory. `cost` and `room` (of the
    load's mean tokens) where the caller has them already."""
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
        burstiness=arrivals.burstiness,
    )
    if arrivals.kind == "lockstep" and not users.spread:
        users = replace(users, spread=cost.costs.drift)
    plain = _state(cost.step_ms, users, scheduling, arrivals)
    found = _state(speculative_step(speculation, cost), users, scheduling, arrivals) if speculation else plain
    bubble = 1 - in_flight / deployment.pp / found.stretch
    basis = basis_of(deployment)
    if deployment.pp > 1:
        basis += f"; pipeline stages idle {bubble:.0%} of the time (F9)"
    if speculation:
        basis += f"; speculation by F10, {speculation.acceptance:.0%} of {speculation.draft_tokens} drafts taken"
    kind, extrapolated = "moe" if deployment.model.is_moe else "dense", not basis.startswith("table")
    tpot = interval(arrivals.kind, "tpot", deployment.engine, kind, extrapolated)
    ttft = interval(arrivals.kind, "ttft", deployment.engine, kind, extrapolated)
    waited_ms = cost.queue_steps * found.tpot_ms * (1 - 1 / load.concurrency)  # a lone user meets no running step
    slowest = max(found.tpot_ms, plain.tpot_ms) * tpot.high  # drafts that are never accepted gain nothing
    rate = found.output_tok_s * in_flight
    slow_rate = min(rate, plain.output_tok_s * in_flight) / tpot.high
    return Estimate(
        deployment=deployment,
        load=load,
        memory=memory,
        kv_tokens=room.kv_tokens,
        sequences_that_fit=fit,
        ttft=_figure(found.ttft_ms + waited_ms, ttft, "ms", basis),
        tpot=replace(_figure(found.tpot_ms, tpot, "ms", basis), high=slowest),
        output_rate=Figure(rate, slow_rate, rate / tpot.low, "tokens/s", f"{basis}; {tpot.basis}"),
        saturated=found.saturated,
        bubble=bubble,
    )


def _state(step_ms: StepTime, load: Load, scheduling: Scheduling, arrivals: Arrivals) -> SteadyState:
    if arrivals.kind != "lockstep":
        return steady_state(step_ms, load, scheduling)
    found = run_closed_loop(step_ms, load, scheduling)
    return SteadyState(found.ttft_ms, found.tpot_ms, found.output_tok_s, found.saturated)


def _figure(value: float, factors: Interval, unit: str, basis: str) -> Figure:
    return Figure(value, value * factors.low, value * factors.high, unit, f"{basis}; {factors.basis}")


@dataclass(frozen=True, slots=True)
class SplitEstimate:
    deployment: SplitDeployment
    load: Load
    ttft: Figure
    tpot: Figure
    output_rate: Figure
    saturated: bool


def estimate_split(
    deployment: SplitDeployment,
    load: Load,
    costs: tuple[StepCost, StepCost] | None = None,
    arrivals: Arrivals = _POISSON,
) -> SplitEstimate:
    """The same for split pools; `costs` of a prefill and a decode engine where the caller has them already."""
    for pool in (deployment.prefill, deployment.decode):
        room = room_for(pool, load.mean_tokens)
        if not room.memory.fits or room.sequences < 1:
            raise UserError(*_does_not_fit(pool, room.memory, load))
    prefill, decode = costs or (StepCost(deployment.prefill), StepCost(deployment.decode))
    found = split_state(deployment, prefill, decode, load, cold=arrivals.kind == "lockstep")
    basis = f"{basis_of(deployment.decode)}; KV sent over the network of the devices"
    extrapolated = not basis.startswith("table")
    tpot, ttft = (
        interval(arrivals.kind, metric, deployment.engine, "split", extrapolated) for metric in ("tpot", "ttft")
    )
    return SplitEstimate(
        deployment=deployment,
        load=load,
        ttft=_figure(found.ttft_ms, ttft, "ms", basis),
        tpot=_figure(found.tpot_ms, tpot, "ms", basis),
        output_rate=Figure(
            found.output_tok_s, found.output_tok_s / tpot.high, found.output_tok_s / tpot.low, "tokens/s", basis
        ),
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
