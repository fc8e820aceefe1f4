"""Judges every candidate under the workload's promises and picks the cheapest: winner, Pareto front, refused plans.

Each candidate is sized and priced (judging.py), the leaders are tuned (tuning.py: batch limits, speculation). What
fails is kept with the constraint that binds. Knows neither flags nor printing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tokenmill.plan.cost.step_cost import StepCost
from tokenmill.plan.question.deployment import Deployment
from tokenmill.plan.question.question import Tuning
from tokenmill.plan.search.judging import Plan, Terms
from tokenmill.plan.search.tuning import first_choice, tuned
from tokenmill.report.pareto import pareto_front

_LEADERS = 12  # plans that are tuned, besides the front


@dataclass(frozen=True, slots=True)
class Refused:
    """A candidate that cannot exist: the model, its KV or the claim does not fit the hardware."""

    deployment: Deployment
    reason: str


@dataclass(frozen=True, slots=True)
class SearchResult:
    winner: Plan | None
    front: tuple[Plan, ...]  # no other plan is cheaper, faster and safer at once
    plans: tuple[Plan, ...]  # all that fit into memory, best first
    refused: tuple[Refused, ...]
    nearest_cheaper: Plan | None  # breaks a promise, costs less


def search(deployments: Iterable[Deployment], terms: Terms, tuning: Tuning = Tuning()) -> SearchResult:  # noqa: B008
    plans: list[Plan] = []
    refused: list[Refused] = []
    costs = _Costs()
    for deployment in deployments:
        reason, fitting = first_choice(deployment, terms, tuning)
        if reason:
            refused.append(Refused(deployment, reason))
        else:
            plans.append(terms.judge(fitting, costs.of(fitting), tuning.fixed_speculation(fitting)))
    plans.sort(key=Plan.order)
    front = _front(plans)
    leaders = {id(plan) for plan in (*plans[:_LEADERS], *front)}
    plans = [tuned(plan, costs.of(plan.deployment), terms, tuning) if id(plan) in leaders else plan for plan in plans]
    plans.sort(key=Plan.order)
    winner = plans[0] if plans and plans[0].good else None
    cheaper = [plan for plan in plans if not plan.good and (winner is None or plan.rank < winner.rank)]
    nearest = min(cheaper, key=lambda plan: (len(plan.failures), plan.rank), default=None)
    return SearchResult(winner, _front(plans), tuple(plans), tuple(refused), nearest)


class _Costs:
    """Step costs by what they depend on; plans that differ in KV width or batch limits share the rest."""

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], StepCost] = {}

    def of(self, d: Deployment) -> StepCost:
        key = (d.model.name, d.device.name, d.weights, d.engine, d.tp, d.pp, d.ep, d.data_parallel)
        if (key, d.kv_bytes) not in self._known:
            base = self._known.get(key)
            self._known[key, d.kv_bytes] = self._known[key] = base.with_kv(d) if base else StepCost(d)
        return self._known[key, d.kv_bytes]


def _front(plans: Sequence[Plan]) -> tuple[Plan, ...]:
    """Plans that no other beats in money, latency and risk at once, cheapest first."""
    front = pareto_front(plans, lambda plan: (plan.rank[0], plan.estimate.tpot.value, plan.risk.high))
    return tuple(sorted(front, key=lambda plan: plan.rank))
