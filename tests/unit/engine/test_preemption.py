"""Who gives way when pages or slots run out, under each discipline."""

from __future__ import annotations

from tests.unit.engine.building import make_kv, make_request, make_scheduler, step


def test_the_last_arrival_gives_way_and_resumes_in_its_place() -> None:
    scheduler = make_scheduler(make_kv(num_pages=5, prefix_caching=False), context_length=20)
    scheduler.add(make_request([1] * 5, "a", arrival=0, max_tokens=6))
    scheduler.add(make_request([2] * 8, "c", arrival=1))
    assert step(scheduler)[0] == {"a": 5, "c": 8}
    for _ in range(3):
        assert step(scheduler)[0] == {"a": 1, "c": 1}
    scheduler.add(make_request([3], "d", arrival=2))
    assert step(scheduler)[0] == {"a": 1}  # its third page was one of c's; d would fit, but c waits before it
    assert (scheduler.stats.num_preemptions, scheduler.num_waiting) == (1, 2)
    assert step(scheduler)[0] == {"a": 1}
    assert step(scheduler)[0] == {"c": 12, "d": 1}  # its prompt and the four tokens it had


def test_the_needy_gives_way_itself_if_it_is_the_last() -> None:
    scheduler = make_scheduler(make_kv(num_pages=6, prefix_caching=False), context_length=24)
    scheduler.add(make_request([1] * 8, "a", arrival=0))
    scheduler.add(make_request([2] * 12, "b", arrival=1))
    assert step(scheduler)[0] == {"a": 8, "b": 12}
    assert step(scheduler)[0] == {"a": 1}
    assert scheduler.stats.num_preemptions == 1


def test_a_request_is_admitted_only_if_the_others_can_still_grow() -> None:
    scheduler = make_scheduler(make_kv(num_pages=5, prefix_caching=False), context_length=20)
    scheduler.add(make_request([1] * 8, "a", arrival=0, max_tokens=2))
    scheduler.add(make_request([2] * 12, "b", arrival=1))
    assert step(scheduler)[0] == {"a": 8}  # b needs the three other pages, a its third in the next step
    assert step(scheduler)[0] == {"a": 1}
    assert step(scheduler)[0] == {"b": 12}
    assert scheduler.stats.num_preemptions == 0


def test_nobody_is_admitted_in_a_step_that_preempted() -> None:
    scheduler = make_scheduler(make_kv(num_pages=7, prefix_caching=False), max_running=2, context_length=28)
    scheduler.add(make_request([1] * 5, "a", arrival=0, n=2))
    scheduler.add(make_request([2] * 16, "b", arrival=1))
    assert step(scheduler)[0] == {"a": 5, "b": 16}
    for _ in range(3):
        assert step(scheduler)[0] == {"a": 1, "b": 1}
    assert step(scheduler)[0] == {"a": 1}  # a preempted b; its sibling could have b's slot and pages
    assert scheduler.stats.num_preemptions == 1
    assert step(scheduler)[0] == {"a": 1, "a#1": 5}


def test_tokens_taken_back_from_a_victim_are_given_to_others() -> None:
    kv = make_kv(prefix_caching=False)
    scheduler = make_scheduler(kv, "priority", max_batch_tokens=4)
    scheduler.add(make_request([1], "decode", priority=9))
    step(scheduler)
    scheduler.add(make_request([2] * 20, "prompt", priority=5))
    assert step(scheduler)[0] == {"decode": 1, "prompt": 3}
    scheduler.max_batch_tokens = 5
    scheduler.add(make_request([3] * 20, "urgent", priority=1))
    assert step(scheduler)[0] == {"decode": 1, "urgent": 4}
    hog = make_request(4 * kv.measure().num_pages_free)
    assert kv.reserve(hog, hog.num_tokens)  # no page is free now, and urgent needs one
    assert step(scheduler)[0] == {"urgent": 4, "prompt": 1}
    assert scheduler.stats.num_preemptions == 1


def test_a_preempted_request_finds_its_own_pages_in_the_cache() -> None:
    scheduler = make_scheduler(make_kv(num_pages=7), context_length=28)
    scheduler.add(make_request([1] * 8, "a", arrival=0, max_tokens=2))
    scheduler.add(make_request([2] * 16, "b", arrival=1, max_tokens=3))
    assert step(scheduler)[0] == {"a": 8, "b": 16}
    assert step(scheduler)[0] == {"a": 1}  # b gave way; a needed one page, and ends
    rows, events = step(scheduler)
    assert rows == {"b": 1}  # its four full pages were still cached
    assert events[0].num_cached_tokens == 0  # what the first admission found


# --- priority ---


def test_an_urgent_request_takes_the_slot_of_a_lesser_one() -> None:
    scheduler = make_scheduler(discipline="priority", max_running=2)
    scheduler.add(make_request([1], "low", priority=5, arrival=0))
    scheduler.add(make_request([2], "lower", priority=9, arrival=1))
    step(scheduler)
    scheduler.add(make_request([3], "urgent", priority=1, arrival=2))
    scheduler.add(make_request([4], "equal", priority=5, arrival=3))
    assert set(step(scheduler)[0]) == {"low", "urgent"}  # equal does not push low aside
    assert scheduler.stats.num_preemptions == 1


def test_an_urgent_request_takes_pages_but_never_in_vain() -> None:
    scheduler = make_scheduler(make_kv(num_pages=10, prefix_caching=False), "priority", context_length=40)
    scheduler.add(make_request([1] * 20, "high", priority=0, arrival=0))
    scheduler.add(make_request([2] * 8, "low", priority=9, arrival=1))
    step(scheduler)
    scheduler.add(make_request([3] * 30, "huge", priority=1, arrival=2))
    assert step(scheduler)[0] == {"high": 1, "low": 1}  # what low holds would not be enough
    scheduler.cancel("huge")
    scheduler.add(make_request([3] * 12, "urgent", priority=1, arrival=3))
    assert step(scheduler)[0] == {"high": 1, "urgent": 12}


def test_an_urgent_request_does_not_wait_for_a_long_prompt() -> None:
    scheduler = make_scheduler(discipline="priority", max_batch_tokens=8)
    scheduler.add(make_request([1] * 40, "long", priority=5, arrival=0))
    assert step(scheduler)[0] == {"long": 8}
    scheduler.add(make_request([2] * 6, "urgent", priority=1, arrival=1))
    assert step(scheduler)[0] == {"urgent": 6, "long": 2}


def test_first_come_first_served_ignores_priority() -> None:
    scheduler = make_scheduler(max_running=1)
    scheduler.add(make_request([1], "first", priority=9, arrival=0, max_tokens=2))
    scheduler.add(make_request([2], "second", priority=0, arrival=1))
    assert step(scheduler)[0] == {"first": 1}
    assert step(scheduler)[0] == {"first": 1}
    assert step(scheduler)[0] == {"second": 1}
