"""What one tenant sends lengthens the steps of another only so far; nobody stands still for it."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.unit.engine.building import answer, make_kv, make_request, make_scheduler
from tokenmill.engine.order.step_costs import StepCosts
from tokenmill.engine.scheduler import Scheduler
from tokenmill.types import StepPlan

_FIXED, _TOKEN = 0.003, 0.0006  # seconds of a step: a small model on a small machine


def _seconds(plan: StepPlan, costs: dict[str, float] | None = None) -> float:
    return _FIXED + sum((costs or {}).get(row.request.tenant, _TOKEN) * row.count for row in plan.scheduled)


def _busy(num_evil: int) -> Scheduler:
    scheduler = make_scheduler(make_kv(num_pages=600), "fair", max_batch_tokens=256, max_running=32, context_length=256)
    scheduler.add(make_request(4, "good", max_tokens=200, tenant="good"))
    for number in range(num_evil):
        scheduler.add(make_request([number, 1, 2, 3], f"evil{number}", max_tokens=200, tenant="evil"))
    return scheduler


def _run(
    scheduler: Scheduler, num_steps: int, costs: dict[str, float] | None = None
) -> list[tuple[Counter[str], float]]:
    """(tokens by tenant, seconds) of each step."""
    steps = []
    for _ in range(num_steps):
        plan = scheduler.schedule()
        seconds = _seconds(plan, costs)
        counts: Counter[str] = Counter()
        for row in plan.scheduled:
            counts[row.request.tenant] += row.count
        steps.append((counts, seconds))
        scheduler.record_step(plan, scheduler.update(plan, answer(plan)), seconds)
    return steps


def test_steps_of_one_tenant_at_most_double() -> None:
    steps = _run(_busy(15), 120)
    alone = _FIXED + _TOKEN
    assert all(counts["good"] == 1 for counts, _ in steps[1:])  # it has a token in every step
    settled = [seconds for _, seconds in steps[60:]]
    assert max(settled) < 2 * alone
    assert min(counts["evil"] for counts, _ in steps[60:]) >= 1


def test_sequences_that_give_way_take_turns() -> None:
    scheduler = _busy(15)
    _run(scheduler, 150)
    outputs = [r.num_output_tokens for r in scheduler._running.snapshot() if r.tenant == "evil"]
    assert len(outputs) == 15
    assert max(outputs) - min(outputs) <= 4


def test_a_step_that_costs_the_same_for_all_has_all() -> None:
    """As on a GPU: weights are read once for any number of sequences."""
    steps = _run(_busy(15), 100, {"good": 1e-6, "evil": 1e-6})
    assert all(counts["evil"] == 15 for counts, _ in steps[40:])


def test_dear_tokens_count_for_what_they_cost() -> None:
    """Grammars or long contexts make them so."""
    cheap = _run(_busy(15), 150)
    dear = _run(_busy(15), 150, {"good": _TOKEN, "evil": 4 * _TOKEN})
    assert sum(counts["evil"] for counts, _ in dear[80:]) < 0.6 * sum(counts["evil"] for counts, _ in cheap[80:])


def test_one_tenant_alone_has_no_limit() -> None:
    scheduler = make_scheduler(make_kv(num_pages=600), "fair", max_running=32, context_length=256)
    for number in range(16):
        scheduler.add(make_request([number, 1, 2, 3], f"r{number}", max_tokens=50, tenant="one"))
    steps = _run(scheduler, 40)
    assert all(counts["one"] == 16 for counts, _ in steps[1:])


def test_a_tenant_that_was_here_a_moment_ago_finds_short_steps() -> None:
    scheduler = _busy(15)
    _run(scheduler, 60)
    scheduler.cancel("good")
    soon = _run(scheduler, 10)
    assert max(counts["evil"] for counts, _ in soon) < 15
    later = _run(scheduler, 60)
    assert later[-1][0]["evil"] == 15


def test_long_prompts_of_one_do_not_hold_up_the_tokens_of_another() -> None:
    scheduler = _busy(0)
    _run(scheduler, 40)
    for number in range(4):
        scheduler.add(make_request([number, *range(200)], f"long{number}", max_tokens=4, tenant="evil"))
    steps = _run(scheduler, 60)
    assert max(seconds for _, seconds in steps) < 2.2 * (_FIXED + _TOKEN)
    assert all(counts["good"] == 1 for counts, _ in steps)


def test_the_limit_can_be_turned_off() -> None:
    scheduler = _busy(15)
    scheduler.discipline.max_slowdown = 0.0
    assert _run(scheduler, 60)[-1][0]["evil"] == 15


@pytest.mark.parametrize("fixed", [0.0, 0.0005, 0.004])
def test_costs_are_learned_from_steps_of_different_size(fixed: float) -> None:
    costs = StepCosts()
    for number in range(400):
        num_tokens = 1 + number % 5
        costs.record(num_tokens, fixed + 0.001 * num_tokens)
    assert costs.predict(4) == pytest.approx(fixed + 0.004, rel=0.05)
    assert costs.token == pytest.approx(0.001, rel=0.1)


def test_nothing_counts_as_fixed_until_steps_differ() -> None:
    costs = StepCosts()
    for _ in range(100):
        costs.record(16, 0.010)
    assert costs.predict(1) < 0.001


def test_now_and_then_a_slow_step_changes_little() -> None:
    costs = StepCosts()
    for number in range(1000):
        costs.record(1, 0.02 if number % 20 == 0 else 0.003)
    assert costs.predict(1) < 0.0033
