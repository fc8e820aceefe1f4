"""A row that had to sample but could not (its grammar allows nothing): the sequence ends with an error, alone."""

from __future__ import annotations

import pytest

from tests.unit.engine.building import make_request, make_scheduler
from tokenmill.types import StepPlan, StepResult


def _result(plan: StepPlan, unlucky: str) -> StepResult:
    tokens = [100 if row.samples and row.request.request_id != unlucky else None for row in plan.scheduled]
    return StepResult(list(tokens), [None] * len(tokens), [None] * len(tokens))


@pytest.mark.parametrize("n", [1, 3])
def test_the_sequence_and_its_siblings_end_and_the_neighbour_goes_on(n: int) -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request(5, "unlucky", n=n, max_tokens=8))
    scheduler.add(make_request(5, "lucky", max_tokens=4))
    reasons: dict[str, list[str | None]] = {"unlucky": [], "lucky": []}
    for _ in range(8):
        plan = scheduler.schedule()
        for event in scheduler.update(plan, _result(plan, "unlucky")):
            if event.finish_reason is not None:
                reasons[event.request_id].append(event.finish_reason)
        scheduler.kv.check()
    assert reasons == {"unlucky": ["error"] * n, "lucky": ["length"]}
    assert not scheduler.has_work
    assert scheduler.kv._pool.available == scheduler.kv.num_pages


def test_a_prompt_still_being_computed_is_no_error() -> None:
    scheduler = make_scheduler(max_batch_tokens=4)
    scheduler.add(make_request(10, "r", max_tokens=1))
    reasons = []
    while scheduler.has_work:
        plan = scheduler.schedule()
        reasons += [event.finish_reason for event in scheduler.update(plan, _result(plan, ""))]
    assert reasons == ["length"]
