"""Admission: bounds, quotas, deadlines, and that everything taken is given back."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenmill.engine.stats import EngineStats
from tokenmill.serve.errors import ApiError
from tokenmill.serve.tenants.keys import Client
from tokenmill.serve.tenants.limits import Admission, Pace, check_grammar_quota


def _admission(slots: int = 2, requests: int = 3, tokens: int = 100) -> Admission:
    return Admission(slots, requests, tokens, Pace())


def _refused(code: str, admission: Admission, client: Client, lengths: list[int], **extra: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        admission.admit(client, lengths, 1, extra.get("deadline"), extra.get("now", 1.0))
    assert caught.value.status == 429
    assert caught.value.code == code
    assert int(caught.value.headers()["retry-after"]) >= 1
    return caught.value


def test_the_queue_is_bounded_in_requests_and_tokens() -> None:
    admission, client = _admission(), Client()
    for _ in range(5):  # two slots and three that wait
        admission.admit(client, [10], 1, None, 1.0)
    _refused("queue_full", admission, client, [1])
    admission = _admission()
    admission.admit(client, [60], 1, None, 1.0)
    _refused("queue_full", admission, client, [41])
    admission.admit(client, [40], 1, None, 1.0)


def test_one_long_prompt_may_exceed_the_token_bound_when_nothing_waits() -> None:
    admission = _admission()
    admission.admit(Client(), [500], 1, None, 1.0)
    assert admission.waiting_tokens == 500


def test_a_first_token_makes_room() -> None:
    admission, client = _admission(slots=1, requests=0), Client()
    ticket = admission.admit(client, [10], 1, None, 1.0)
    _refused("queue_full", admission, client, [1])
    admission.started(ticket, 10)
    admission.admit(client, [1], 1, None, 1.0)


def test_quotas_say_when_to_come_back() -> None:
    client = Client("alice", requests_per_minute=60, tokens_per_minute=600)
    admission = _admission(slots=100)
    for _ in range(60):
        admission.release(admission.admit(client, [1], 1, None, 10.0), 1, 10.0)
    error = _refused("request_quota", admission, client, [1], now=10.0)
    assert "alice" in error.message
    ticket = admission.admit(client, [1], 1, None, 12.0)
    admission.release(ticket, 5000, 12.0)  # the output is paid for afterwards
    assert _refused("token_quota", admission, client, [1], now=20.0).retry_after > 300


def test_requests_in_flight_per_key() -> None:
    client, other = Client("a", max_parallel=1), Client("b", max_parallel=1)
    admission = _admission()
    ticket = admission.admit(client, [1], 1, None, 1.0)
    _refused("parallel_limit", admission, client, [1])
    admission.admit(other, [1], 1, None, 1.0)
    admission.release(ticket, 0, 1.0)
    admission.admit(client, [1], 1, None, 1.0)


def test_deadlines_use_the_measured_speed() -> None:
    admission, client = _admission(slots=1, requests=50, tokens=10**6), Client()
    admission.admit(client, [1000], 1, 0.001, 1.0)  # nothing measured yet: nothing to refuse on
    admission.pace.record_step(EngineStats(step_tokens=512, step_seconds=1.0))
    assert admission.predict(512) == pytest.approx(1512 / 512)
    _refused("deadline", admission, client, [512], deadline=2.0)
    admission.admit(client, [512], 1, 60.0, 1.0)
    admission.pace.record_service(10.0)
    assert admission.predict(0) > 20.0  # two turns before it


def test_a_small_step_says_nothing_about_prompt_speed() -> None:
    pace = Pace()
    pace.record_step(EngineStats(step_tokens=4, step_seconds=1.0))
    assert pace.prompt_rate is None


def test_draining_refuses_with_503() -> None:
    admission = _admission()
    admission.draining = True
    with pytest.raises(ApiError) as caught:
        admission.check_client(Client(), 1.0)
    assert caught.value.status == 503


@settings(deadline=None)
@given(st.lists(st.tuples(st.lists(st.integers(1, 30), min_size=1, max_size=3), st.integers(1, 3), st.booleans())))
def test_everything_taken_is_given_back(work: list[tuple[list[int], int, bool]]) -> None:
    admission, client = _admission(4, 6, 200), Client("x", max_parallel=5)
    open_tickets = []
    for lengths, answers, starts in work:
        try:
            ticket = admission.admit(client, lengths, answers, None, 1.0)
        except ApiError:
            if open_tickets:
                admission.release(open_tickets.pop(0), 3, 1.0)
            continue
        open_tickets.append(ticket)
        if starts:
            admission.started(ticket, lengths[0])
        assert admission.num_waiting <= 10
    for ticket in open_tickets:
        admission.release(ticket, 3, 1.0)
    assert (admission.num_active, admission.num_waiting, admission.waiting_tokens, client.num_active) == (0, 0, 0, 0)


def _keys(*names: str, **limits: Any) -> list[Client]:
    clients = [Client(name, **limits) for name in names]
    for client in clients:
        client.share_with(len(clients))
    return clients


def test_sequences_are_counted_and_not_requests() -> None:
    client = Client("a", max_sequences=8)
    admission = _admission(slots=100)
    with pytest.raises(ApiError) as caught:
        admission.admit(client, [1, 1, 1], 3, None, 1.0)
    assert (caught.value.status, caught.value.code) == (400, "sequence_limit")  # it could never run
    ticket = admission.admit(client, [1, 1], 3, None, 1.0)
    assert client.num_sequences == 6
    with pytest.raises(ApiError) as caught:
        admission.admit(client, [1], 3, None, 1.0)
    assert (caught.value.status, caught.value.code) == (429, "sequence_limit")
    admission.admit(client, [1], 2, None, 1.0)
    admission.release(ticket, 0, 1.0)
    admission.admit(client, [1, 1], 3, None, 1.0)


def test_output_is_reserved_and_then_settled() -> None:
    client = Client("a", tokens_per_minute=600)
    admission = _admission(slots=100, tokens=10**6)
    ticket = admission.admit(client, [100], 1, None, 1.0, max_output=400)
    assert _refused("token_quota", admission, client, [101]).retry_after == pytest.approx(0.1)
    admission.release(ticket, 50, 1.0)  # 350 of the reserved tokens come back
    admission.admit(client, [200], 1, None, 1.0, max_output=250)
    _refused("token_quota", admission, client, [1])


def test_a_request_larger_than_the_quota_needs_a_full_bucket_and_cannot_be_repeated() -> None:
    client = Client("a", tokens_per_minute=600)
    admission = _admission(slots=100, tokens=10**6)
    ticket = admission.admit(client, [100], 1, None, 1.0, max_output=5000)
    _refused("token_quota", admission, client, [1])
    admission.release(ticket, 5000, 1.0)
    assert _refused("token_quota", admission, client, [1], now=1.0).retry_after > 400


def test_one_key_cannot_fill_the_queue() -> None:
    heavy, light = _keys("heavy", "light")
    admission = _admission(slots=4, requests=16, tokens=1000)
    for _ in range(10):
        admission.admit(heavy, [1], 1, None, 1.0)
    error = _refused("queue_share", admission, heavy, [1])
    assert "light" not in error.message
    for _ in range(10):
        admission.admit(light, [1], 1, None, 1.0)
    assert "waiting" not in _refused("queue_share", admission, light, [1]).message.replace("requests waiting", "")


def test_one_key_cannot_fill_the_queue_with_tokens() -> None:
    heavy, light = _keys("heavy", "light")
    admission = _admission(slots=4, requests=16, tokens=1000)
    admission.admit(heavy, [400], 1, None, 1.0)
    _refused("queue_share", admission, heavy, [200])
    admission.admit(light, [500], 1, None, 1.0)


def test_a_full_queue_is_open_to_keys_below_their_fair_share() -> None:
    first, second, late = _keys("first", "second", "late", max_queue_share=1.0)
    admission = _admission(slots=2, requests=4, tokens=10**6)
    for client in (first, first, first, second, second, second):
        admission.admit(client, [1], 1, None, 1.0)
    error = _refused("queue_full", admission, first, [1])
    assert "6" not in error.message  # nor how many requests others have
    tickets = [admission.admit(late, [1], 1, None, 1.0) for _ in range(2)]  # a third of six
    _refused("queue_full", admission, late, [1])
    for ticket in tickets:
        admission.release(ticket, 0, 1.0)
    assert (late.num_waiting, late.waiting_tokens, admission.num_waiting) == (0, 0, 6)


def test_the_bound_beyond_the_full_queue_is_twice_the_queue() -> None:
    clients = _keys(*map(str, range(40)))
    admission = _admission(slots=2, requests=4, tokens=10**6)
    admitted = 0
    for client in clients:
        try:
            admission.admit(client, [1], 1, None, 1.0)
        except ApiError as error:
            assert error.code == "queue_full"  # noqa: PT017
            continue
        admitted += 1
    assert admitted == 12


def test_a_withdrawn_key_is_refused_at_once() -> None:
    client = Client("a")
    client.withdrawn = True
    with pytest.raises(ApiError) as caught:
        _admission().admit(client, [1], 1, None, 1.0)
    assert (caught.value.status, caught.value.code) == (401, "invalid_api_key")


def test_grammar_time_is_a_quota() -> None:
    client = Client("a", grammar_seconds_per_minute=6.0)
    check_grammar_quota(client, 1.0)
    client.charge_grammar(9.0, 1.0)
    with pytest.raises(ApiError) as caught:
        check_grammar_quota(client, 1.0)
    assert (caught.value.status, caught.value.code) == (429, "grammar_quota")
    check_grammar_quota(client, 32.0)  # 0.1 s a second
    unlimited = Client()
    unlimited.charge_grammar(1e6, 1.0)
    check_grammar_quota(unlimited, 1.0)


def test_what_yields_is_in_nobodys_way() -> None:
    admission, client = _admission(slots=2, requests=10), Client()
    admission.pace.service_seconds, admission.pace.prompt_rate = 60.0, 10.0
    rows = [admission.admit(client, [10], 1, None, 1.0, yields=True) for _ in range(3)]
    assert not admission.has_idle_slot
    assert admission.predict(0) == 0.0
    assert admission.predict(0, yields=True) > 60.0
    live = admission.admit(client, [5], 1, 1.0, 1.0)  # within a deadline that it would miss behind the rows
    admission.started(rows[0], 10)
    for ticket in (*rows, live):
        admission.release(ticket, 1, 2.0)
    assert admission.num_active == admission.num_yielding == admission.yielding_tokens == admission.waiting_tokens == 0
    assert admission.has_idle_slot
    admission.draining = True
    assert not admission.has_idle_slot
