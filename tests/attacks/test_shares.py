"""One tenant that takes more than its share: priorities, pins, sequences, the queue."""

from __future__ import annotations

from pathlib import Path

import httpx

from benchmarks import attack_shapes as shapes
from benchmarks.tenant_keys import key_of
from tests.attacks.conftest import AttackedServer
from tests.attacks.tenant import streaming


def test_s4_a_tenant_cannot_make_itself_urgent(served: AttackedServer) -> None:
    with streaming(served.url, key_of("good")):
        statuses = shapes.priority_flood(served.target())
    assert set(statuses) <= {"200", "400", "403", "429"}, statuses
    served.wait_idle(60)


def test_s4_a_tenant_who_may_is_urgent(served: AttackedServer) -> None:
    body = {"prompt": "Once", "max_tokens": 2, "priority": -100}
    with served.target("vip").http() as http:
        assert http.post("/v1/completions", json=body).status_code == 200


def test_s4_sequences_count_not_requests(served: AttackedServer) -> None:
    """Four requests with 1,024 sequences each, of a key that may have 64."""
    with streaming(served.url, key_of("good")):
        statuses = shapes.sequence_flood(served.target())
    assert set(statuses) <= {"400", "413", "429"}, statuses
    served.wait_idle(60)


def test_r2_one_tenant_cannot_fill_the_queue(served: AttackedServer) -> None:
    """The others are never told to come back later."""
    with streaming(served.url, key_of("good"), patience=None):
        statuses = shapes.queue_flood(served.target(), 80)
    assert statuses["429"] > 0, statuses
    assert set(statuses) <= {"200", "429", "late"}, statuses  # late: by the attacker's own patience
    served.wait_idle(60)


def test_s4_pins_of_one_tenant_leave_the_cache_to_others(tiny_chat: Path, tmp_path: Path) -> None:
    """A server of its own: what is pinned stays."""
    server = AttackedServer(tiny_chat, tmp_path / "keys.json")
    try:
        with streaming(server.url, key_of("good")):
            statuses = shapes.pin_flood(server.target(), 24)  # more than all pages hold
        assert set(statuses) <= {"200", "400", "429"}, statuses
        cached = [_cached(server.http, list(range(700, 900))) for _ in range(2)]
        assert cached[1] > 0, "nothing of another tenant's prompt could be cached"
        load = server.load()
        assert load["kv_pages_cached"] <= load["kv_pages_total"]
        # A prompt of the whole context still finds room.
        answer = server.http.post("/v1/completions", json={"prompt": list(range(300, 540)), "max_tokens": 8})
        assert answer.status_code == 200, answer.text
        server.wait_idle()
    finally:
        server.stop()


def _cached(http: httpx.Client, prompt: list[int]) -> int:
    answer = http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 1})
    assert answer.status_code == 200, answer.text
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])
