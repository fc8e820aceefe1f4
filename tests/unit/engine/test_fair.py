"""The fair discipline: shares follow weights, nobody is starved, one tenant is first come first served."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.unit.engine.building import make_request, make_scheduler
from tokenmill.engine.scheduler import Scheduler
from tokenmill.types import Request, StepResult


def _run(scheduler: Scheduler, steps: int) -> Counter[str]:
    """Run with a token of output for every row that samples; tokens computed by tenant."""
    computed: Counter[str] = Counter()
    for _ in range(steps):
        plan = scheduler.schedule()
        rows = plan.scheduled
        for row in rows:
            computed[row.request.tenant] += row.count
        tokens = [1 if row.samples else None for row in rows]
        scheduler.update(plan, StepResult(tokens, [None] * len(rows), [None] * len(rows)))
    return computed


def _backlog(weights: dict[str, float], count: int) -> list[Request]:
    """All of one tenant's requests before the next tenant's first: the worst case for the latecomers."""
    names = [(name, number) for name in weights for number in range(count)]
    return [
        make_request(
            6, f"{name}{number}", arrival=arrival, max_tokens=6, tenant=name, weight=weights[name], ignore_eos=True
        )
        for arrival, (name, number) in enumerate(names)
    ]


@pytest.mark.parametrize("weights", [{"a": 1.0, "b": 1.0}, {"a": 1.0, "b": 3.0}, {"a": 4.0, "b": 1.0, "c": 1.0}])
def test_shares_follow_weights_under_backlog(weights: dict[str, float]) -> None:
    scheduler = make_scheduler(discipline="fair", max_running=2)
    for request in _backlog(weights, 60):
        scheduler.add(request)
    computed = _run(scheduler, 120)
    total, weight = sum(computed.values()), sum(weights.values())
    for name in weights:
        assert computed[name] / total == pytest.approx(weights[name] / weight, abs=0.1)


def test_one_tenant_is_first_come_first_served() -> None:
    fair, plain = make_scheduler(discipline="fair", max_running=2), make_scheduler(max_running=2)
    orders = []
    for scheduler in (fair, plain):
        for request in _backlog({"a": 1.0}, 10):
            scheduler.add(request)
        order: list[str] = []
        while scheduler.has_work:
            plan = scheduler.schedule()
            order += [row.request.request_id for row in plan.scheduled]
            rows = len(plan.scheduled)
            scheduler.update(plan, StepResult([1] * rows, [None] * rows, [None] * rows))
        orders.append(order)
    assert orders[0] == orders[1]


def test_a_latecomer_does_not_wait_for_the_backlog_and_gets_no_credit_for_absence() -> None:
    scheduler = make_scheduler(discipline="fair", max_running=1)
    for request in _backlog({"a": 1.0}, 40):
        scheduler.add(request)
    _run(scheduler, 60)
    for request in _backlog({"b": 1.0}, 40):
        request.arrival += 100
        scheduler.add(request)
    computed = _run(scheduler, 80)
    assert computed["b"] / sum(computed.values()) == pytest.approx(0.5, abs=0.12)


def test_priority_numbers_come_before_shares() -> None:
    scheduler = make_scheduler(discipline="fair", max_running=1)
    scheduler.add(make_request(4, "batch", arrival=0, priority=1000, tenant="a", max_tokens=4))
    scheduler.add(make_request(4, "urgent", arrival=1, priority=0, tenant="b", max_tokens=4))
    assert [row.request.request_id for row in scheduler.schedule().scheduled] == ["urgent"]


def test_nothing_is_kept_of_requests_that_left() -> None:
    scheduler = make_scheduler(discipline="fair", max_running=2)
    for request in _backlog({"a": 1.0, "b": 2.0}, 5):
        scheduler.add(request)
    _run(scheduler, 3)
    for name in ("a", "b"):
        for number in range(5):
            scheduler.cancel(f"{name}{number}")
    discipline = scheduler.discipline
    assert discipline._charges == {}  # type: ignore[attr-defined]
    assert all(tenant.num_live == 0 for tenant in discipline._tenants.values())  # type: ignore[attr-defined]
