"""The time of a step, divided among its sequences: parts add up to the whole, and follow what was measured."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from tests.unit.engine.building import CountingRunner, make_kv, make_request, make_scheduler
from tokenmill.engine import core as core_module
from tokenmill.engine.core import EngineCore
from tokenmill.engine.step_meter import StepMeter
from tokenmill.types import Request, ScheduledTokens, StepPlan, StepResult, TokenEvent

_FIXED, _TOKEN, _POSITION = 8e-3, 1e-4, 1.5e-6  # seconds


class _Clock:
    now = 100.0

    def perf_counter(self) -> float:
        return self.now


class _SlowRunner(CountingRunner):
    """Takes as long as its rows cost, and some more at random."""

    def __init__(self, clock: _Clock) -> None:
        super().__init__()
        self.clock = clock
        self.total = 0.0
        self.random = random.Random(5)

    def execute(self, plan: StepPlan) -> StepResult:
        seconds = _cost([(row.start, row.count) for row in plan.scheduled]) * self.random.uniform(0.9, 1.2)
        self.clock.now += seconds
        self.total += seconds
        return super().execute(plan)


def _cost(rows: list[tuple[int, int]]) -> float:
    return _FIXED + sum(_TOKEN * count + _POSITION * count * (start + count) for start, count in rows)


def _plan(rows: list[tuple[str, int, int]]) -> StepPlan:
    """(tenant, start, count) of each."""
    requests = [Request(f"{number}", [1], make_request(1).params, tenant=row[0]) for number, row in enumerate(rows)]
    return StepPlan([ScheduledTokens(request, start, count, (), False)
                     for request, (_, start, count) in zip(requests, rows, strict=True)])  # fmt: skip


def _result(plan: StepPlan) -> StepResult:
    size = len(plan.scheduled)
    return StepResult([None] * size, [None] * size, [None] * size)


def _taught(meter: StepMeter) -> StepMeter:
    chance = random.Random(3)
    for _ in range(300):
        rows = [("x", chance.randrange(4000), 1) for _ in range(chance.randrange(1, 8))]
        if chance.random() < 0.4:
            rows.append(("x", chance.randrange(2000), chance.randrange(16, 512)))
        plan = _plan(rows)
        seconds = _cost([row[1:] for row in rows]) * chance.uniform(0.97, 1.03)
        meter.record(plan, _result(plan), [], seconds)
    meter.take()
    return meter


def test_the_parts_of_a_mixed_run_add_up_to_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = _Clock()
    monkeypatch.setattr(core_module, "time", clock)
    runner = _SlowRunner(clock)
    core = EngineCore(make_scheduler(make_kv(num_pages=64), "fair", max_batch_tokens=16, max_running=4), runner)
    core.meter = StepMeter()
    requests = [
        make_request(40, "long", tenant="a", max_tokens=6),
        make_request(5, "short", tenant="b", max_tokens=20),
        make_request([7, 8, 9], "siblings", tenant="b", max_tokens=5, n=2),
        make_request(30, "leaves", tenant="c", max_tokens=30),
        make_request(1, "tiny", tenant="a", max_tokens=1),
    ]
    for request in requests:
        core.add(request)
    by_tenant: Counter[str] = Counter()
    reported: Counter[str] = Counter()
    num_steps = 0
    while core.has_work:
        for event in core.step():
            assert event.device_seconds > 0
            reported[event.request_id] += event.device_seconds  # type: ignore[assignment]
        by_tenant.update(core.meter.take())
        num_steps += 1
        if num_steps == 4:
            core.cancel("leaves")
    assert runner.total > 0
    assert sum(by_tenant.values()) == pytest.approx(runner.total, rel=1e-9)
    assert core.stats.total_seconds == pytest.approx(runner.total, rel=1e-9)
    lost = by_tenant["c"] - reported["leaves"]  # what it took since its last event is its key's all the same
    assert lost >= 0
    assert sum(reported.values()) + lost == pytest.approx(runner.total, rel=1e-9)
    assert by_tenant["a"] == pytest.approx(reported["long"] + reported["tiny"], rel=1e-9)
    assert core.meter.take() == {}


def test_shares_follow_what_steps_were_measured_to_cost() -> None:
    meter = _taught(StepMeter())
    rows = [("deep", 3500, 1), ("shallow", 10, 1), ("prompt", 0, 400)]
    plan = _plan(rows)
    meter.record(plan, _result(plan), [], _cost([row[1:] for row in rows]))
    shares = meter.take()
    for tenant, start, count in rows:
        expected = _FIXED / 3 + _TOKEN * count + _POSITION * count * (start + count)
        assert shares[tenant] == pytest.approx(expected, rel=0.1), tenant
    assert shares["deep"] > 1.5 * shares["shallow"]


def test_a_slow_moment_of_the_machine_is_paid_for_but_teaches_little() -> None:
    meter = _taught(StepMeter())
    rows = [("a", 100, 1), ("b", 0, 256)]
    usual = _plan(rows)
    for seconds in (5.0, _cost([row[1:] for row in rows])):
        meter.record(usual, _result(usual), [], seconds)
        shares = meter.take()
        assert sum(shares.values()) == pytest.approx(seconds)
        assert 0.02 < shares["a"] / seconds < 0.3
    before = StepMeter()
    plan = _plan([("a", 0, 30), ("b", 50, 10)])
    before.record(plan, _result(plan), [], 1.0)
    assert before.take() == pytest.approx({"a": 0.75, "b": 0.25})  # by tokens, while nothing is known


def test_drafts_count_and_time_waits_for_an_event() -> None:
    meter = StepMeter()
    plan = _plan([("a", 8, 1), ("b", 8, 1), ("c", 0, 2)])
    result = _result(plan)
    result.num_drafted = {0: 4}
    second = plan.scheduled[1].request
    event = TokenEvent(second.request_id)
    meter.record(plan, result, [event], 0.8)
    assert meter.take() == pytest.approx({"a": 0.5, "b": 0.1, "c": 0.2})
    assert event.device_seconds == pytest.approx(0.1)
    later = TokenEvent(plan.scheduled[0].request.request_id)
    meter.record(plan, _result(plan), [later], 0.4)
    assert later.device_seconds == pytest.approx(0.6)  # of both steps
    assert second.device_seconds == pytest.approx(0.1)
