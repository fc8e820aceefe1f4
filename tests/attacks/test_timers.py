"""Deadlines: their timers end with the requests, and they hold while a request waits in the engine (R1)."""

from __future__ import annotations

import gc
import json
from pathlib import Path

import pytest

from benchmarks import attack_client as client
from benchmarks.soak_verdict import resident
from tests.attacks.conftest import AttackedServer
from tests.e2e.serving import wait_until

_FAR = 86_400_000  # milliseconds


@pytest.mark.slow  # memory is told from noise by as many log-probabilities as this
def test_r1_finished_requests_with_a_far_deadline_are_forgotten(served: AttackedServer) -> None:
    """Each answered request stayed in memory until its deadline, with 4,000 log-probabilities."""
    fields = {"max_tokens": 100, "n": 2, "logprobs": 20, "ignore_eos": True, "deadline_ms": _FAR}
    sizes = []
    for _ in range(6):
        statuses = client.at_once(served.target("other"), "/v1/completions", [{"prompt": "Once", **fields}] * 8)
        assert set(statuses) == {"200"}, statuses
        sizes.append(resident(served.process.pid) >> 20)
    assert sizes[-1] - sizes[2] < 7, f"MiB after each eight requests: {sizes}"  # the first of them warm it up


def test_r1_a_deadline_holds_while_a_request_waits_in_the_engine(tiny_chat: Path, tmp_path: Path) -> None:
    server = AttackedServer(tiny_chat, tmp_path / "keys.json", "--concurrency", "1")
    try:
        long = {"prompt": "Once", "max_tokens": 200, "n": 16, "ignore_eos": True}
        with client.pending(server.target("good"), "/v1/completions", [long] * 2), server.target().http() as http:
            wait_until(lambda: server.load()["requests_running"] > 0, 20)
            body = {"prompt": "Once", "max_tokens": 1, "deadline_ms": 300, "lane": "batch"}
            answer = http.post("/v1/completions", json=body)
        assert answer.status_code in (408, 429, 504), answer.text
        server.wait_idle(40)
    finally:
        server.stop()


@pytest.mark.slow
def test_r1_memory_is_flat_over_a_thousand_deadlines(served: AttackedServer) -> None:
    body = json.dumps({"prompt": [300] * 200, "max_tokens": 1, "deadline_ms": _FAR}).encode()
    samples = []
    with served.target("other").http() as http:
        for _ in range(5):
            for _ in range(400):
                client.post(http, "/v1/completions", body)
            gc.collect()
            samples.append(resident(served.process.pid))
    assert samples[-1] < 1.02 * samples[1], samples
