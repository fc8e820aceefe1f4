"""One candidate judged: whether it fits, how many users a replica serves within the promises, what that costs.

Owns the terms of the question (workload, prices, limits, fleet) and the verdict. Judges only the deployment
it is given: search.py compares, tuning.py varies.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil

from tokenmill.plan.cost.ceilings import decode_ceiling
from tokenmill.plan.cost.closed_loop import Load
from tokenmill.plan.cost.performance import Estimate, estimate
from tokenmill.plan.cost.step_cost import StepCost
from tokenmill.plan.question.deployment import Deployment, Room, plan_memory, room_for
from tokenmill.plan.question.pricing import Pricing
from tokenmill.plan.question.question import Limits, Speculation
from tokenmill.plan.question.workload import Workload
from tokenmill.plan.search.money import TokenCosts, token_costs
from tokenmill.plan.search.quality import QualityRisk, quality_risk

_MAX_USERS = 1024  # of one replica
_WORTH = 1.03  # more users must bring at least this factor in throughput
_RESOLUTION = 16  # users are found to one part in this many


@dataclass(frozen=True, slots=True)
class Plan:
    deployment: Deployment  # its batch limits are the plan's
    estimate: Estimate  # of one replica under its share of the load
    users: int  # per replica
    replicas: int
    costs: TokenCosts | None  # None: no price is known
    risk: QualityRisk
    failures: tuple[str, ...] = ()  # promises that it breaks
    excess: float = 1.0  # by which factor the worst of them is missed
    speculation: Speculation | None = None
    tuning: tuple[str, ...] = ()  # why its batch limits and speculation are what they are

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

    def order(self) -> tuple[int, float, tuple[float, float, float]]:
        """Fewest broken promises, then those missed least, then the rank."""
        return (len(self.failures), self.excess, self.rank)  # a good plan's excess is 1


@dataclass(frozen=True, slots=True)
class Terms:
    """What every candidate is judged by. `fleet`: devices that are given and paid; 0 sizes the fleet by the load."""

    workload: Workload
    pricing: Pricing
    limits: Limits
    fleet: int = 0

    def judge(self, deployment: Deployment, cost: StepCost, speculation: Speculation | None = None) -> Plan:
        users, replicas, found = self._size(deployment, cost, speculation)
        costs = self._price(deployment, cost, found, replicas)
        risk = quality_risk(deployment)
        plan = Plan(deployment, found, users, replicas, costs, risk, speculation=speculation)
        failures = tuple(self._failures(plan))
        return replace(plan, failures=failures, excess=self._excess(plan)) if failures else plan

    def estimate(
        self,
        deployment: Deployment,
        users: int,
        cost: StepCost,
        speculation: Speculation | None = None,
        room: Room | None = None,
    ) -> Estimate:
        w = self.workload
        load = Load(w.uncached_tokens, w.output_tokens, users, cached_tokens=w.input_tokens - w.uncached_tokens)
        return estimate(deployment, load, cost, speculation, room, w.arrivals)

    def _size(
        self, deployment: Deployment, cost: StepCost, speculation: Speculation | None
    ) -> tuple[int, int, Estimate]:
        """(users per replica, replicas, estimate of a replica)."""
        fleet = max(1, self.fleet // deployment.devices) if self.fleet else 0
        if self.workload.concurrency:
            most = 0 if fleet else self._best_users(deployment, cost, speculation)[0]
            replicas = fleet or ceil(self.workload.concurrency / most)
            users = ceil(self.workload.concurrency / replicas)
            return users, replicas, self.estimate(deployment, users, cost, speculation)
        users, best = self._best_users(deployment, cost, speculation)
        if self.workload.rate:
            per_replica = best.output_rate.value / self.workload.output_tokens
            return users, max(1, ceil(self.workload.rate / per_replica)), best
        return users, fleet or 1, best

    def _best_users(
        self, deployment: Deployment, cost: StepCost, speculation: Speculation | None
    ) -> tuple[int, Estimate]:
        """The most users that one replica serves within the promises (at least one, even if it breaks them)."""
        room = room_for(deployment, self.workload.total_tokens)
        most = max(1, min(_MAX_USERS, room.sequences, deployment.max_sequences))
        good, best = 1, self.estimate(deployment, 1, cost, speculation, room)
        late = most + 1
        users = min(4, most)
        while late - good > max(1, good // _RESOLUTION):
            found = self.estimate(deployment, users, cost, speculation, room)
            if self._late(found) or not self._worth(found, best):
                late = users
            else:
                good, best = users, found
            users = min(4 * good, most) if late > most else max(good + 1, round((good * late) ** 0.5))
        return good, best

    def _late(self, found: Estimate) -> bool:
        w = self.workload
        return bool((w.ttft_ms and found.ttft.value > w.ttft_ms) or (w.itl_ms and found.tpot.value > w.itl_ms))

    def _worth(self, found: Estimate, best: Estimate) -> bool:
        """Without promises, more users count only while they raise the throughput."""
        promised = self.workload.ttft_ms or self.workload.itl_ms
        return bool(promised) or found.output_rate.value > _WORTH * best.output_rate.value

    def _price(self, deployment: Deployment, cost: StepCost, found: Estimate, replicas: int) -> TokenCosts | None:
        pricing, workload = self.pricing, self.workload
        if pricing.price is None and deployment.device.price is None:
            return None
        rate = found.output_rate.value * replicas
        if workload.rate:  # capacity beyond the given rate earns nothing
            rate = min(rate, workload.rate * workload.output_tokens)
        hourly = pricing.fleet_hour(deployment.device, deployment.devices * replicas)
        return token_costs(cost, workload, rate, hourly, pricing.utilization)

    def _failures(self, plan: Plan) -> Iterator[str]:
        w, limits, found, costs = self.workload, self.limits, plan.estimate, plan.costs
        if w.ttft_ms and found.ttft.value > w.ttft_ms:
            yield f"TTFT {found.ttft.value:.0f} ms is above {w.ttft_ms:g} ms"
        if w.itl_ms and found.tpot.value > w.itl_ms:
            yield f"ITL {found.tpot.value:.1f} ms is above {w.itl_ms:g} ms"
        if w.concurrency and plan.users > found.sequences_that_fit:
            yield f"only {found.sequences_that_fit} requests fit into KV memory at once"
        if limits.dollars_per_month and costs and costs.monthly > limits.dollars_per_month:
            yield f"${costs.monthly:,.0f} a month is above ${limits.dollars_per_month:,.0f}"
        if limits.quality_loss and plan.risk.high > limits.quality_loss:
            yield f"up to {plan.risk.high:.1f} % quality loss is above {limits.quality_loss:g} %"
        if limits.devices and plan.devices > limits.devices:
            yield f"needs {plan.devices} devices, {limits.devices} are allowed"

    def _excess(self, plan: Plan) -> float:
        pairs = [
            (plan.estimate.ttft.value, self.workload.ttft_ms),
            (plan.estimate.tpot.value, self.workload.itl_ms),
            (plan.costs.monthly if plan.costs else 0.0, self.limits.dollars_per_month),
            (plan.risk.high, self.limits.quality_loss),
        ]
        return max([value / limit for value, limit in pairs if limit] + [1.0])


def refusal(deployment: Deployment, workload: Workload) -> str:
    """Why the candidate cannot hold even one request of the workload or keep its promise; empty if it can."""
    gib = 1 << 30
    floor_ms = 1e3 / decode_ceiling(deployment.model, deployment.weights, deployment.device, deployment.group)
    if workload.itl_ms and workload.itl_ms < floor_ms:
        return f"an ITL of {workload.itl_ms:g} ms is impossible: reading the weights once takes {floor_ms:.1f} ms"
    memory = plan_memory(deployment)
    budget = memory.usable * memory.utilization
    parts = (
        f"{memory.weights / gib:.1f} GiB of weights, {memory.activations / gib:.1f} of activations and "
        f"{memory.runtime / gib:.1f} of runtime within the usable {budget / gib:.1f} GiB"
    )
    if memory.weights > budget:
        return (
            f"the weights alone do not fit: {memory.weights / gib:.1f} GiB of {budget / gib:.1f} GiB usable, "
            "so no room is left for KV"
        )
    if not memory.fits:
        return f"no room is left for KV: {parts}"
    room = room_for(deployment, workload.total_tokens)
    if room.sequences < 1:
        return f"{parts} leave {room.kv_tokens:,} KV tokens, less than one request of {workload.total_tokens:,}"
    return ""
