"""Who gets tokens: budget, chunks, order of admission, endings, cancels, siblings."""

from __future__ import annotations

import pytest

from tests.unit.engine.building import MIXED, answer, make_kv, make_request, make_scheduler, rows_of, step
from tokenmill.errors import UserError
from tokenmill.types import StepResult, TokenLogprobs


def test_a_prompt_is_cut_to_the_budget() -> None:
    scheduler = make_scheduler(max_batch_tokens=10)
    scheduler.add(make_request(25, "long", max_tokens=2))
    counts = []
    while scheduler.has_work:
        rows, events = step(scheduler)
        counts.append((rows["long"], len(events)))
    assert counts == [(10, 0), (10, 0), (5, 1), (1, 1)]


def test_decodes_come_before_a_long_prompt_that_arrived_earlier() -> None:
    scheduler = make_scheduler(max_batch_tokens=10)
    scheduler.add(make_request(30, "long", arrival=0))
    step(scheduler)
    scheduler.add(make_request([9], "short", arrival=1))
    scheduler.cancel("long")
    step(scheduler)  # the short one decodes from here on
    scheduler.add(make_request(30, "long", arrival=0))
    assert step(scheduler)[0] == {"short": 1, "long": 9}
    assert step(scheduler)[0] == {"short": 1, "long": 9}


def test_what_the_budget_leaves_goes_to_the_next_in_line() -> None:
    scheduler = make_scheduler(max_batch_tokens=10)
    for number in range(3):
        scheduler.add(make_request([number] * 7, f"r{number}", arrival=number))
    assert step(scheduler)[0] == {"r0": 7, "r1": 3}
    assert step(scheduler)[0] == {"r0": 1, "r1": 4, "r2": 5}


def test_nobody_overtakes_the_head_of_the_line() -> None:
    scheduler = make_scheduler(make_kv(num_pages=10), context_length=40)
    scheduler.add(make_request([1] * 20, "first", arrival=0, max_tokens=3))
    step(scheduler)
    scheduler.add(make_request([2] * 30, "big", arrival=1))
    scheduler.add(make_request([3], "small", arrival=2))
    assert step(scheduler)[0] == {"first": 1}  # small would fit, but big waits before it
    assert step(scheduler)[0] == {"first": 1}
    assert step(scheduler)[0] == {"big": 30, "small": 1}


def test_no_more_than_max_running() -> None:
    scheduler = make_scheduler(max_running=2)
    for number in range(3):
        scheduler.add(make_request([number], f"r{number}", arrival=number, max_tokens=2))
    assert set(step(scheduler)[0]) == {"r0", "r1"}
    assert (scheduler.num_running, scheduler.num_waiting) == (2, 1)
    assert set(step(scheduler)[0]) == {"r0", "r1"}
    assert set(step(scheduler)[0]) == {"r2"}


def test_a_prefix_hit_is_not_computed_again() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request(16, "a", arrival=0))
    step(scheduler)
    scheduler.add(make_request(18, "b", arrival=1))
    rows, events = step(scheduler)
    assert rows == {"a": 1, "b": 2}
    assert {event.request_id: event.num_cached_tokens for event in events} == {"a": 0, "b": 16}


def test_a_prefix_that_this_step_computes_for_another_is_waited_for() -> None:
    scheduler = make_scheduler(make_kv(num_pages=600), max_batch_tokens=1024, context_length=1000)
    scheduler.add(make_request([*range(400), 1], "first", arrival=0))
    scheduler.add(make_request([*range(400), 2], "second", arrival=1))
    scheduler.add(make_request([*range(500, 800)], "other", arrival=2))
    assert step(scheduler)[0] == {"first": 401}  # not 400 tokens twice; nobody overtakes
    assert step(scheduler)[0] == {"first": 1, "second": 1, "other": 300}
    scheduler.kv.check()


def test_a_short_prefix_in_common_delays_nobody() -> None:
    scheduler = make_scheduler(max_batch_tokens=64)
    scheduler.add(make_request([*range(20), 1], "first", arrival=0))
    scheduler.add(make_request([*range(20), 2], "second", arrival=1))
    assert step(scheduler)[0] == {"first": 21, "second": 21}


# --- endings ---


def test_endings() -> None:
    scheduler = make_scheduler(context_length=8)
    scheduler.add(make_request([1], "eos", stop_ids=frozenset({100})))
    scheduler.add(make_request([2], "stop id", stop_ids=frozenset({100}), stop_token_ids=(100,)))
    scheduler.add(make_request([3], "length", max_tokens=1))
    scheduler.add(make_request([4] * 7, "context"))
    scheduler.add(make_request([5], "goes on"))
    _, events = step(scheduler, token=100)
    endings = {event.request_id: (event.finish_reason, event.stop_reason) for event in events}
    assert endings == {
        "eos": ("stop", None),
        "stop id": ("stop", 100),
        "length": ("length", None),
        "context": ("length", None),
        "goes on": (None, None),
    }
    assert all(event.token_ids == [100] for event in events)
    assert scheduler.num_running == 1


def test_a_pool_too_small_for_the_context_is_refused_with_the_remedy() -> None:
    with pytest.raises(
        UserError, match=r"64 tokens needs 16 KV pages of 4 tokens, but there are 10.*at most 40"
    ) as error:
        make_scheduler(make_kv(num_pages=10), context_length=64)
    assert "--memory" in error.value.remedy
    make_scheduler(make_kv(num_pages=10), context_length=40)


def test_a_lone_request_of_the_full_context_runs_in_the_smallest_pool() -> None:
    kv = make_kv(MIXED)
    smallest = make_kv(MIXED, kv.layout.peak_pages(64))
    scheduler = make_scheduler(smallest, max_batch_tokens=64, context_length=64)
    for prompt in (make_request([1] * 60, "a", max_tokens=10), make_request([1] * 30, "b", max_tokens=40)):
        scheduler.add(prompt)  # the second finds a prefix, and needs most of the pool beside it
        for _ in range(60):
            step(scheduler)
        assert not scheduler.has_work


# --- cancels ---


def test_cancel_between_schedule_and_update() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request(6, "a", arrival=0))
    scheduler.add(make_request([7] * 6, "b", arrival=1))
    plan = scheduler.schedule()
    assert scheduler.cancel("a")
    scheduler.kv.check()
    scheduler.add(make_request([8], "a", arrival=2))  # the id is free again, and the old row is not taken for it
    events = scheduler.update(plan, answer(plan))
    assert [event.request_id for event in events] == ["b"]
    scheduler.kv.check()
    assert step(scheduler)[0] == {"b": 1, "a": 1}


def test_cancel_frees_everything_waiting_or_running() -> None:
    scheduler = make_scheduler(max_running=2)
    scheduler.add(make_request(6, "a", n=4))
    step(scheduler)
    assert (scheduler.num_running, scheduler.num_waiting) == (2, 2)
    assert scheduler.cancel("a")
    assert not scheduler.has_work
    assert (scheduler.num_running, scheduler.num_waiting) == (0, 0)
    assert scheduler.kv.measure().num_pages_held == 0
    assert not scheduler.cancel("a")
    assert not scheduler.schedule().scheduled


# --- siblings ---


def test_siblings_share_the_prompt_and_recompute_its_last_token() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request(10, "a", n=3, max_tokens=3, seed=5))
    rows, events = step(scheduler)
    assert rows == {"a": 10}
    assert [(event.index, event.finish_reason) for event in events] == [(0, None)]
    plan = scheduler.schedule()
    assert rows_of(plan) == {"a": 1, "a#1": 1, "a#2": 1}
    assert [row.start for row in plan.scheduled] == [10, 9, 9]
    assert [row.request.seed for row in plan.scheduled] == [5, 6, 7]
    assert len(plan.page_copies) == 2  # the last to write keeps the page
    tables = [row.block_tables[0] for row in plan.scheduled]
    assert len({tuple(table[:2]) for table in tables}) == 1
    assert len({table[2] for table in tables}) == 3
    scheduler.update(plan, answer(plan))
    finished = []
    while scheduler.has_work:
        finished += [event.index for event in step(scheduler)[1] if event.finish_reason]
    assert finished == [0, 1, 2]
    assert scheduler.kv.measure().num_pages_held == 0


def test_siblings_outlive_a_parent_that_ends_at_once() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request(8, "a", n=2, max_tokens=1))
    assert [event.finish_reason for event in step(scheduler)[1]] == ["length"]
    assert scheduler.has_work
    rows, events = step(scheduler)
    assert rows == {"a#1": 1}
    assert [(event.index, event.finish_reason) for event in events] == [(1, "length")]
    assert not scheduler.has_work


def test_siblings_without_a_slot_wait() -> None:
    scheduler = make_scheduler(make_kv(prefix_caching=False), max_running=2)
    scheduler.add(make_request(6, "a", n=3, max_tokens=2, arrival=0))
    scheduler.add(make_request([5], "b", arrival=1))
    assert step(scheduler)[0] == {"a": 6, "b": 1}
    assert step(scheduler)[0] == {"a": 1, "b": 1}  # no slot for a sibling; a ends here
    assert step(scheduler)[0] == {"b": 1, "a#1": 6}  # computed anew: nothing was cached


# --- prompt log-probabilities ---


def logprobs_answer(plan, token=100):
    """Rows report prompt tokens start+1 .. start+count, as the runtime does."""
    prompt_logprobs = []
    for row in plan.scheduled:
        ids = row.request.prompt_ids[row.start + 1 : row.start + row.count + 1]
        wanted = row.request.params.prompt_logprobs is not None
        prompt_logprobs.append([TokenLogprobs(token_id, -1.0, 1) for token_id in ids] if wanted else None)
    sampled = [token if row.samples else None for row in plan.scheduled]
    own = [TokenLogprobs(token, -0.5, 1) if row.samples else None for row in plan.scheduled]
    return StepResult(sampled, own, prompt_logprobs)


def test_prompt_logprobs_come_whole_with_the_first_token() -> None:
    scheduler = make_scheduler(max_batch_tokens=5)
    scheduler.add(make_request(12, "warm", max_tokens=1))
    while scheduler.has_work:
        step(scheduler)
    scheduler.add(make_request(12, "a", prompt_logprobs=0, max_tokens=3, n=2))
    events = []
    starts = []
    while scheduler.has_work:
        plan = scheduler.schedule()
        starts += [row.start for row in plan.scheduled if row.request.index == 0]
        events += scheduler.update(plan, logprobs_answer(plan))
    assert starts[0] == 0  # the cached prompt is computed again: its log-probabilities are wanted
    first, *others = [event for event in events if event.index == 0]
    assert [entry.token_id for entry in first.prompt_logprobs] == list(range(1, 12))
    assert [entry.token_id for entry in first.logprobs] == [100]
    assert not any(event.prompt_logprobs for event in others)
    assert not any(event.prompt_logprobs for event in events if event.index == 1)


def test_prompt_logprobs_are_not_doubled_by_a_preemption() -> None:
    scheduler = make_scheduler(max_batch_tokens=5)
    scheduler.add(make_request(12, "a", prompt_logprobs=0, max_tokens=2))
    plan = scheduler.schedule()
    scheduler.update(plan, logprobs_answer(plan))
    scheduler._preempt(plan.scheduled[0].request)
    events = []
    while scheduler.has_work:
        plan = scheduler.schedule()
        events += scheduler.update(plan, logprobs_answer(plan))
    assert [entry.token_id for event in events for entry in event.prompt_logprobs] == list(range(1, 12))
