"""The fair discipline: shares follow weights, nobody is starved, one tenant is first come first served."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.unit.engine.building import answer, make_kv, make_request, make_scheduler, rows_of
from tokenmill.engine.order import DISCIPLINES
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


def _steps_to_first_token(scheduler: Scheduler, request_id: str, limit: int = 200) -> int:
    for number in range(1, limit):
        plan = scheduler.schedule()
        scheduler.kv.check()
        events = scheduler.update(plan, answer(plan))
        if any(event.request_id == request_id for event in events):
            return number
    raise AssertionError("no token")


def test_many_sequences_of_one_tenant_do_not_keep_another_waiting() -> None:
    """64 prompts of 16 sequences each fill every slot for hundreds of steps; a latecomer takes one at once."""
    kv = make_kv(num_pages=400)
    scheduler = make_scheduler(kv, "fair", max_running=8)
    for number in range(64):
        prompt = list(range(number, number + 6))
        scheduler.add(make_request(prompt, f"h{number}", arrival=number, tenant="heavy", n=16, max_tokens=50))
    _run(scheduler, 20)
    assert scheduler.num_running == 8
    scheduler.add(make_request([7] * 6, "late", arrival=100, tenant="light", max_tokens=50))
    assert _steps_to_first_token(scheduler, "late") == 1
    assert scheduler.num_running == 8


def test_slots_are_shared_by_weight_and_nothing_is_preempted_in_return() -> None:
    kv = make_kv(num_pages=400)
    scheduler = make_scheduler(kv, "fair", max_running=8)
    for request in _long("heavy", 20):
        scheduler.add(request)
    _run(scheduler, 3)
    for request in _long("light", 20):
        request.arrival += 100
        scheduler.add(request)
    _run(scheduler, 2)
    assert _running(scheduler) == {"heavy": 4, "light": 4}
    preemptions = scheduler.stats.num_preemptions
    assert preemptions == 4
    _run(scheduler, 10)
    assert scheduler.stats.num_preemptions == preemptions


def test_pages_are_taken_from_the_tenant_that_runs_most() -> None:
    kv = make_kv(num_pages=16, prefix_caching=False)
    scheduler = make_scheduler(kv, "fair", max_running=8)
    for number in range(3):
        prompt = [number] * 4
        scheduler.add(make_request(prompt, f"h{number}", arrival=number, tenant="heavy", max_tokens=40))
    _run(scheduler, 1)
    light = make_request(4, "light", arrival=9, tenant="light", max_tokens=40)
    scheduler.add(light)
    _run(scheduler, 1)
    assert scheduler._running.last() is light  # the last in order, but not the one to go
    while scheduler.stats.num_preemptions < 2:
        plan = scheduler.schedule()
        assert light in [row.request for row in plan.scheduled]
        scheduler.update(plan, answer(plan))
    assert light.num_preemptions == 0
    assert _running(scheduler) == {"heavy": 1, "light": 1}


def test_a_long_prompt_leaves_others_their_share_of_a_step() -> None:
    kv = make_kv(num_pages=200)
    scheduler = make_scheduler(kv, "fair", max_batch_tokens=16, context_length=256)
    scheduler.add(make_request(200, "long", arrival=0, tenant="heavy", max_tokens=4))
    _run(scheduler, 1)
    scheduler.add(make_request([3] * 8, "short", arrival=1, tenant="light", max_tokens=4))
    plan = scheduler.schedule()
    assert rows_of(plan) == {"long": 8, "short": 8}
    scheduler.update(plan, answer(plan))
    plan = scheduler.schedule()  # the short one decodes: the rest is the long one's
    assert rows_of(plan) == {"short": 1, "long": 15}


def test_what_a_tenant_does_not_use_of_its_share_goes_to_the_others() -> None:
    kv = make_kv(num_pages=200)
    scheduler = make_scheduler(kv, "fair", max_batch_tokens=16, context_length=256)
    scheduler.add(make_request(200, "long", arrival=0, tenant="heavy", max_tokens=4))
    _run(scheduler, 1)
    scheduler.add(make_request([3] * 2, "short", arrival=1, tenant="light", max_tokens=4))
    assert rows_of(scheduler.schedule()) == {"long": 14, "short": 2}


def test_a_lower_priority_takes_neither_slots_nor_tokens_for_fairness() -> None:
    kv = make_kv(num_pages=200)
    scheduler = make_scheduler(kv, "fair", max_batch_tokens=16, max_running=2, context_length=256)
    for request in _long("heavy", 2):
        scheduler.add(request)
    _run(scheduler, 2)
    scheduler.add(make_request(8, "batch", arrival=50, tenant="light", priority=1000))
    _run(scheduler, 2)
    assert _running(scheduler) == {"heavy": 2}


def test_requests_that_are_passed_over_hold_up_nobody() -> None:
    scheduler = make_scheduler(discipline="fair", max_running=1)
    first, second = make_request(4, "a", tenant="a"), make_request(4, "b", tenant="b", arrival=1)
    scheduler.add(first)
    scheduler.add(second)
    for discipline in (scheduler.discipline, DISCIPLINES.get("fcfs")()):
        assert discipline.next(scheduler._waiting) is first
        scheduler._waiting.set_aside([first])
        assert discipline.next(scheduler._waiting) is second
        scheduler._waiting.bring_back()


def test_a_prompt_computed_now_is_waited_for_only_under_the_same_salt() -> None:
    """Else the time to the first token would tell that another tenant sends the same."""
    for salts, expected in (((b"", b""), {"one"}), ((b"a" * 16, b"b" * 16), {"one", "two"})):
        kv = make_kv(num_pages=400)
        scheduler = make_scheduler(kv, "fair", max_batch_tokens=1024, context_length=512)
        for name, salt in zip(("one", "two"), salts, strict=True):
            scheduler.add(make_request(300, name, tenant=name, cache_salt=salt))
        assert set(rows_of(scheduler.schedule())) == expected


def _long(tenant: str, count: int) -> list[Request]:
    """Requests that decode for long, with prompts of their own."""
    base = sum(tenant.encode())
    return [
        make_request([base + number] * 6, f"{tenant}{number}", arrival=number, tenant=tenant, max_tokens=50)
        for number in range(count)
    ]


def _running(scheduler: Scheduler) -> Counter[str]:
    return Counter(request.tenant for request in scheduler._running.snapshot())
