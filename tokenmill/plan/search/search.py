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

CAREFUL_LOSS = 1.0  # percent of quality that the first answer may lose, at the high end of the published range
_LEADERS = 12  # plans that are tuned, besides the front
_SAFE_LEADERS = 4  # of them, those that keep quality
_WORTH_NAMING = 0.97  # of the cost


@dataclass(frozen=True, slots=True)
class Refused:
    """A candidate that cannot exist: the model, its KV or the claim does not fit the hardware."""

    deployment: Deployment
    reason: str


@dataclass(frozen=True, slots=True)
class SearchResult:
    winner: Plan | None  # the cheapest that keeps the promises and quality, and counts on nothing unmeasured
    front: tuple[Plan, ...]  # no other plan is cheaper, faster and safer at once
    plans: tuple[Plan, ...]  # all that fit into memory, best first
    refused: tuple[Refused, ...]
    nearest_cheaper: Plan | None  # breaks a promise, costs less
    bolder: Plan | None = None  # keeps the promises, costs less: by a larger loss of quality or by assumed drafts


def search(
    deployments: Iterable[Deployment],
    terms: Terms,
    tuning: Tuning = Tuning(),  # noqa: B008
    quality_loss: float = CAREFUL_LOSS,
) -> SearchResult:
    """`quality_loss`: percent at the high end of the range that the first answer may lose; infinite: the formats were
    asked for. Speculation on an assumed acceptance is left to the bolder plan."""
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
    safe = [plan for plan in plans if plan.risk.high <= quality_loss]
    leaders = {id(plan) for plan in (*plans[:_LEADERS], *safe[:_SAFE_LEADERS], *front)}
    plans = [
        tuned(plan, costs.of(plan.deployment), terms, tuning, speculates=False) if id(plan) in leaders else plan
        for plan in plans
    ]
    plans.sort(key=Plan.order)
    good = [plan for plan in plans if plan.good]
    winner = next((plan for plan in good if plan.risk.high <= quality_loss), good[0] if good else None)
    bolder = _bolder(winner, good, costs, terms, tuning) if winner else None
    cheaper = [plan for plan in plans if not plan.good and (winner is None or plan.rank < winner.rank)]
    nearest = min(cheaper, key=lambda plan: (len(plan.failures), plan.rank), default=None)
    return SearchResult(winner, _front(plans), tuple(plans), tuple(refused), nearest, bolder)


def _bolder(winner: Plan, good: Sequence[Plan], costs: _Costs, terms: Terms, tuning: Tuning) -> Plan | None:
    """The cheapest plan whatever it loses or assumes, where it is clearly cheaper than the careful one."""
    best = good[0]
    if tuning.speculation == "auto":
        different = [best] if best is winner else [best, winner]
        drafting = [tuned(plan, costs.of(plan.deployment), terms, tuning) for plan in different]
        best = min([best, *[plan for plan in drafting if plan.good]], key=Plan.order)
    return best if best.rank[0] < _WORTH_NAMING * winner.rank[0] else None


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
