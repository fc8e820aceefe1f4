"""Many small requests: cancelled, reconnecting, with guessed keys, all at once."""

from __future__ import annotations

import threading
from functools import partial

import httpx

from benchmarks import attack_shapes as shapes
from benchmarks.soak_verdict import resident
from benchmarks.tenant_keys import key_of
from tests.attacks.conftest import AttackedServer
from tests.attacks.tenant import Prober, streaming


def test_a_cancel_storm_leaves_nothing_behind(served: AttackedServer) -> None:
    with streaming(served.url, key_of("good")):
        statuses = shapes.cancel_storm(served.target())
    assert set(statuses) <= {"200", "429", "left"}, statuses
    served.wait_idle(40)


def test_a_reconnect_storm_is_answered(served: AttackedServer) -> None:
    with streaming(served.url, key_of("good")):
        statuses = shapes.reconnect_storm(served.target())
    assert set(statuses) <= {"200", "cut", "429", "503"}, statuses


def test_no_guess_is_a_key(served: AttackedServer) -> None:
    """And whoever has a key does not notice that another guesses."""
    with streaming(served.url, key_of("good")), Prober(served.url, key_of("other")) as prober:
        statuses = shapes.key_guessing(served.target())
    assert set(statuses) <= {"401", "400", "429", "431", "cut"}, statuses
    assert not prober.failures
    assert key_of("evil") not in served.log


def test_a_wrong_key_learns_nothing_about_routes(served: AttackedServer) -> None:
    """The same answer wherever it knocks, and none for the body that it sent."""
    answers = set()
    with httpx.Client(base_url=served.url, timeout=10) as http:
        for path in ("/v1/models", "/nothing", "/metrics", "/load", "/docs", "/v1/completions"):
            answer = http.post(path, content=b"{" * 1000, headers={"Authorization": "Bearer wrong"})
            answers.add((answer.status_code, answer.json()["error"]["message"]))
    assert len(answers) == 1, answers


def test_all_attacks_at_once(served: AttackedServer) -> None:
    """Together they are no more than each alone: the tenant streams, and memory does not run away."""
    before = resident(served.process.pid)
    attacks = (
        partial(shapes.grammar_corpus, without=("many properties", "conditions")),
        shapes.mixed_ids,
        shapes.body_corpus,
        shapes.tokenize_flood,
        shapes.priority_flood,
        shapes.slow_heads,
        shapes.slow_readers,
        shapes.reconnect_storm,
    )
    with streaming(served.url, key_of("good")):
        threads = [threading.Thread(target=attack, args=(served.target(),)) for attack in attacks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert resident(served.process.pid) - before < 512 << 20
    served.wait_idle(60)


def test_a_tenant_over_its_limits_is_told_when_to_come_back(served: AttackedServer) -> None:
    """429 always has a time, and never the name of another tenant."""
    with served.target().http() as http:
        answers: list[httpx.Response] = []
        body = {"prompt": "Once", "max_tokens": 40, "ignore_eos": True}
        threads = [
            threading.Thread(target=lambda: answers.append(http.post("/v1/completions", json=body))) for _ in range(120)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    refused = [answer for answer in answers if answer.status_code == 429]
    assert refused
    assert all(int(answer.headers["retry-after"]) >= 1 for answer in refused)
    assert not any(name in answer.text for answer in refused for name in ("good", "vip"))
    served.wait_idle(60)
