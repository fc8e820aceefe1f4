"""Judges every candidate under the workload's promises and picks the cheapest: winner, Pareto front, and the reasons.

Each candidate is sized (how many users one replica bears within the promises, how many replicas the load takes), priced
and given its quality range. What fails is kept with the constraint that binds. Knows neither flags nor printing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil

from tokenmill.plan.ceilings import decode_ceiling
from tokenmill.plan.closed_loop import Load
from tokenmill.plan.cost import Pricing, TokenCosts, token_costs
from tokenmill.plan.deployment import Deployment, concurrent_sequences, kv_token_capacity, plan_memory
from tokenmill.plan.performance import Estimate, estimate
from tokenmill.plan.quality import QualityRisk, quality_risk
from tokenmill.plan.step_cost import StepCost
from tokenmill.plan.workload import Workload

_MOST_USERS = 512


@dataclass(frozen=True, slots=True)
class Limits:
    """What a plan must keep besides the workload's latencies. 0: no limit."""

    dollars_per_month: float = 0.0
    quality_loss: float = 0.0  # percent, at the high end of the range
    devices: int = 0  # at most so many


@dataclass(frozen=True, slots=True)
class Plan:
    deployment: Deployment
    estimate: Estimate  # of one replica under its share of the load
    users: int  # per replica
    replicas: int
    costs: TokenCosts | None  # None: no price is known
    risk: QualityRisk
    failures: tuple[str, ...] = ()  # promises that it breaks
    excess: float = 1.0  # by which factor the worst of them is missed

    @property
    def devices(self) -> int:
        return self.deployment.devices * self.replicas

    @property
    def good(self) -> bool:
        return not self.failures

    @property
    def rank(self) -> tuple[float, float, float]:
        """Cheapest first; equal money: fewer risks, then faster."""
        money = self.costs.output if self.costs else self.devices / max(1e-9, self.estimate.output_rate.value)
        return (money, self.risk.high, self.estimate.tpot.value)


@dataclass(frozen=True, slots=True)
class Refused:
    """A candidate that cannot exist: the model, its KV or the claim does not fit the hardware."""

    deployment: Deployment
    reason: str


@dataclass(frozen=True, slots=True)
class SearchResult:
    winner: Plan | None
    front: tuple[Plan, ...]  # nobody is cheaper, faster and safer at once
    plans: tuple[Plan, ...]  # all that fit into memory, best first
    refused: tuple[Refused, ...]
    nearest_cheaper: Plan | None  # breaks a promise, costs less


def search(
    deployments: Iterable[Deployment],
    workload: Workload,
    pricing: Pricing,
    limits: Limits,
    devices_given: int = 0,
) -> SearchResult:
    """`devices_given`: a fixed fleet that replicas fill; 0 sizes the fleet by the load."""
    plans: list[Plan] = []
    refused: list[Refused] = []
    for deployment in deployments:
        reason = refusal(deployment, workload)
        if reason:
            refused.append(Refused(deployment, reason))
        else:
            plans.append(judge(deployment, workload, pricing, limits, devices_given))
    plans.sort(key=lambda plan: (len(plan.failures), plan.excess, plan.rank))  # a good plan's excess is 1
    winner = plans[0] if plans and plans[0].good else None
    cheaper = [plan for plan in plans if not plan.good and (winner is None or plan.rank < winner.rank)]
    nearest = min(cheaper, key=lambda plan: (len(plan.failures), plan.rank), default=None)
    return SearchResult(winner, pareto(plans), tuple(plans), tuple(refused), nearest)


def refusal(deployment: Deployment, workload: Workload) -> str:
    """Why the candidate cannot hold even one request of the workload or keep its promise; empty if it can."""
    gib = 1 << 30
    floor_ms = 1e3 / decode_ceiling(deployment.model, deployment.weights, deployment.device, deployment.tp)
    if workload.itl_ms and workload.itl_ms < floor_ms:
        return f"an ITL of {workload.itl_ms:g} ms is impossible: reading the weights once takes {floor_ms:.1f} ms"
    memory = plan_memory(deployment)
    budget = memory.usable * memory.utilization
    parts = (
        f"{memory.weights / gib:.1f} GiB of weights, {memory.activations / gib:.1f} of activations and "
        f"{memory.runtime / gib:.1f} of runtime within the usable {budget / gib:.1f} GiB"
    )
    if memory.weights > budget:
        return f"the weights alone do not fit: {memory.weights / gib:.1f} GiB of {budget / gib:.1f} GiB usable"
    if not memory.fits:
        return f"no room is left for KV: {parts}"
    if concurrent_sequences(deployment, workload.total_tokens) < 1:
        tokens = kv_token_capacity(deployment)
        return f"{parts} leave {tokens:,} KV tokens, less than one request of {workload.total_tokens:,}"
    return ""


def judge(deployment: Deployment, workload: Workload, pricing: Pricing, limits: Limits, devices_given: int = 0) -> Plan:
    cost = StepCost(deployment)
    users, replicas, best = _size(deployment, workload, cost, devices_given)
    costs = _price(deployment, workload, pricing, cost, best, replicas)
    risk = quality_risk(deployment)
    failures = tuple(_failures(deployment, workload, limits, best, replicas, costs, risk))
    excess = _excess(workload, limits, best, costs, risk) if failures else 1.0
    return Plan(deployment, best, users, replicas, costs, risk, failures, excess)


def _size(deployment: Deployment, workload: Workload, cost: StepCost, devices_given: int) -> tuple[int, int, Estimate]:
    """(users per replica, replicas, estimate of a replica)."""
    fleet = max(1, devices_given // deployment.devices) if devices_given else 0
    if workload.concurrency:
        replicas = fleet or ceil(workload.concurrency / _best_users(deployment, workload, cost)[0])
        users = ceil(workload.concurrency / replicas)
        return users, replicas, estimate(deployment, _load(workload, users), cost)
    users, best = _best_users(deployment, workload, cost)
    if workload.rate:
        per_replica = best.output_rate.value / workload.output_tokens
        return users, max(1, ceil(workload.rate / per_replica)), best
    return users, fleet or 1, best


def _load(workload: Workload, users: int) -> Load:
    return Load(workload.uncached_tokens, workload.output_tokens, users)


def _best_users(deployment: Deployment, workload: Workload, cost: StepCost) -> tuple[int, Estimate]:
    """The most users that one replica bears within the promises (at least one, kept or not)."""
    most = min(_MOST_USERS, max(1, concurrent_sequences(deployment, workload.total_tokens)))
    best = (1, estimate(deployment, _load(workload, 1), cost))
    users = 2
    while users <= most:
        found = estimate(deployment, _load(workload, users), cost)
        if _late(workload, found):
            break
        best = (users, found)
        users *= 2
    return best


def _late(workload: Workload, found: Estimate) -> bool:
    return bool(
        (workload.ttft_ms and found.ttft.value > workload.ttft_ms)
        or (workload.itl_ms and found.tpot.value > workload.itl_ms)
    )


def _price(
    deployment: Deployment, workload: Workload, pricing: Pricing, cost: StepCost, found: Estimate, replicas: int
) -> TokenCosts | None:
    if pricing.price is None and deployment.device.price is None:
        return None
    hour = pricing.device_hour(deployment.device)
    rate = found.output_rate.value * replicas
    if workload.rate:  # what is not asked for is not sold: the stated rate is the peak
        rate = min(rate, workload.rate * workload.output_tokens)
    return token_costs(
        cost,
        workload,
        rate,
        deployment.devices * replicas,
        hour,
        pricing.utilization,
    )


def _failures(
    deployment: Deployment,
    workload: Workload,
    limits: Limits,
    found: Estimate,
    replicas: int,
    costs: TokenCosts | None,
    risk: QualityRisk,
) -> Iterable[str]:
    if workload.ttft_ms and found.ttft.value > workload.ttft_ms:
        yield f"TTFT {found.ttft.value:.0f} ms is above {workload.ttft_ms:g} ms"
    if workload.itl_ms and found.tpot.value > workload.itl_ms:
        yield f"ITL {found.tpot.value:.1f} ms is above {workload.itl_ms:g} ms"
    if found.saturated and workload.concurrency:
        yield f"only {found.sequences_that_fit} requests fit into KV memory at once"
    if limits.dollars_per_month and costs and costs.monthly > limits.dollars_per_month:
        yield f"${costs.monthly:,.0f} a month is above ${limits.dollars_per_month:,.0f}"
    if limits.quality_loss and risk.high > limits.quality_loss:
        yield f"up to {risk.high:.1f} % quality loss is above {limits.quality_loss:g} %"
    if limits.devices and deployment.devices * replicas > limits.devices:
        yield f"needs {deployment.devices * replicas} devices, {limits.devices} are allowed"


def _excess(workload: Workload, limits: Limits, found: Estimate, costs: TokenCosts | None, risk: QualityRisk) -> float:
    pairs = [
        (found.ttft.value, workload.ttft_ms),
        (found.tpot.value, workload.itl_ms),
        (costs.monthly if costs else 0.0, limits.dollars_per_month),
        (risk.high, limits.quality_loss),
    ]
    return max([value / limit for value, limit in pairs if limit] + [1.0])


def pareto(plans: Sequence[Plan]) -> tuple[Plan, ...]:
    """Plans that no other beats in money, latency and risk at once, cheapest first."""
    front = []
    for plan in plans:
        a = _axes(plan)
        if not any(all(x <= y for x, y in zip(_axes(other), a, strict=True)) and _axes(other) != a for other in plans):
            front.append(plan)
    return tuple(sorted(front, key=lambda plan: plan.rank))


def _axes(plan: Plan) -> tuple[float, float, float]:
    return (plan.rank[0], plan.estimate.tpot.value, plan.risk.high)
