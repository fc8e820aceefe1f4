"""What a server must survive: leaving clients, a killed engine, a stuck engine, a shutdown, many clients at once."""

from __future__ import annotations

import contextlib
import json
import os
import random
import resource
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.serving import RunningServer, serving, wait_until

_LONG = {"prompt": "Once upon a time", "max_tokens": 200, "ignore_eos": True, "temperature": 0}
_FLAGS = ("--context", "256", "--concurrency", "4", "--served-model-name", "stories")


@pytest.fixture(scope="module")
def server(model_path: Callable[[str], Path]) -> Iterator[RunningServer]:
    """A server whose engine is harmed."""
    with serving(model_path("stories15m"), *_FLAGS, "--stall-timeout", "4", "--no-spare-engine") as running:
        yield running


@pytest.fixture(scope="module")
def steady(model_path: Callable[[str], Path]) -> Iterator[RunningServer]:
    """A server that no test harms."""
    with serving(model_path("stories15m"), *_FLAGS, "--max-num-queued-reqs", "2") as running:
        yield running


def _data(lines: Iterator[str]) -> Iterator[str]:
    return (line[6:] for line in lines if line.startswith("data: "))


def _first_answer(server: RunningServer) -> str:
    answer = server.http.post("/v1/completions", json={**_LONG, "max_tokens": 5})
    assert answer.status_code == 200
    text: str = answer.json()["choices"][0]["text"]
    return text


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_pages(steady: RunningServer, stream: bool) -> None:
    body = {**_LONG, "stream": stream, "n": 16}  # four at a time: it lasts
    with httpx.Client(base_url=steady.url, timeout=30) as leaving:
        if stream:
            with leaving.stream("POST", "/v1/completions", json=body) as answer:
                events = _data(answer.iter_lines())  # kept: a generator that is dropped closes the connection
                next(events)
                wait_until(lambda: steady.load()["kv_pages_held"] > 0, 20)
        else:
            with pytest.raises(httpx.ReadTimeout):
                leaving.post("/v1/completions", json=body, timeout=0.1)
    steady.wait_idle()


def test_keys_guard_every_route_but_the_probes(model_path: Callable[[str], Path], tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    slow_keys = ("{key: slow-key, name: slow, requests_per_minute: 1}", "{key: once-key, requests_per_minute: 1}")
    keys.write_text(f"keys: [{', '.join(slow_keys)}]\n")
    flags = (*_FLAGS, "--api-key", "good-key", "--api-keys-file", str(keys))
    with serving(model_path("stories15m"), *flags, env={"TOKENMILL_API_KEY": "env-key"}) as server:
        http = server.http
        for path in ("/livez", "/readyz", "/health", "/ping"):
            assert http.get(path).status_code == 200
        for path in ("/v1/models", "/metrics", "/load", "/version", "/docs", "/openapi.json", "/nothing", "/api/tags"):
            refused = http.get(path)
            assert refused.status_code == 401
            assert refused.json()["error"]["code"] == "invalid_api_key"
            assert http.get(path, headers={"Authorization": "Bearer wrong"}).status_code == 401
        for path in ("/v1/completions", "/v1/chat/completions", "/v1/messages", "/tokenize"):
            assert http.post(path, json={}).status_code == 401
        refused_body = {"Authorization": "Bearer once-key"}
        assert http.post("/detokenize", json={"tokens": "x"}, headers=refused_body).status_code == 400
        assert http.post("/detokenize", json={"tokens": [1]}, headers=refused_body).status_code == 429
        for headers in ({"Authorization": "Bearer good-key"}, {"x-api-key": "good-key"}, {"x-api-key": "env-key"}):
            assert http.get("/v1/models", headers=headers).status_code == 200
        slow = {"Authorization": "Bearer slow-key"}
        body = {"prompt": "The", "max_tokens": 1}
        assert http.post("/v1/completions", json=body, headers=slow).status_code == 200
        again = http.post("/v1/completions", json=body, headers=slow)
        assert again.status_code == 429
        assert 1 <= int(again.headers["retry-after"]) <= 61
        assert again.json()["error"]["code"] == "request_quota"
        doors = ("/tokenize", "/detokenize", "/v1/embeddings", "/v1/chat/completions", "/v1/messages", "/api/generate")
        assert {http.post(path, content=b"{", headers=slow).status_code for path in doors} == {429}
        server.logged('"key": "slow"')
        assert not any(key in server.log for key in ("good-key", "slow-key", "env-key"))


def test_a_full_queue_is_429_with_a_time_to_come_back(steady: RunningServer) -> None:
    statuses: list[int] = []
    retry_after = []

    def ask() -> None:
        # One client for all: making one takes longer than a short answer, and then nobody would have to wait.
        answer = steady.http.post("/v1/completions", json={**_LONG, "max_tokens": 100})
        statuses.append(answer.status_code)
        if answer.status_code == 429:
            retry_after.append(int(answer.headers["retry-after"]))

    threads = [threading.Thread(target=ask) for _ in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(statuses) == {200, 429}
    assert min(retry_after) >= 1
    steady.wait_idle()


def test_a_deadline_that_passes_in_the_queue_is_429(steady: RunningServer) -> None:
    answer = steady.http.post("/v1/completions", json={**_LONG, "deadline_ms": 0.01})
    assert answer.status_code == 429
    assert answer.json()["error"]["code"] == "deadline"
    headers = {"X-Request-Deadline-Ms": "60000"}
    assert steady.http.post("/v1/completions", json={**_LONG, "max_tokens": 1}, headers=headers).status_code == 200
    steady.wait_idle()


def _harm_engine_mid_stream(server: RunningServer, harm: signal.Signals) -> list[tuple[int, list[str]]]:
    """Eight streams, four of which wait; the engine is harmed once tokens move. (status, events) of each."""
    answers: list[tuple[int, list[str]]] = []
    started = threading.Event()
    engine = server.load()["engine_pid"]

    def follow() -> None:
        body = {**_LONG, "stream": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as answer:
            events: list[str] = []
            answers.append((answer.status_code, events))
            for data in _data(answer.iter_lines()):
                events.append(data)
                started.set()

    streams = [threading.Thread(target=follow) for _ in range(8)]
    for stream in streams:
        stream.start()
    assert started.wait(60)
    os.kill(engine, harm)
    for stream in streams:
        stream.join(60)
    return answers


def test_a_killed_engine_is_replaced(server: RunningServer) -> None:
    text = _first_answer(server)
    answers = _harm_engine_mid_stream(server, signal.SIGKILL)
    assert len(answers) == 8
    assert {status for status, _ in answers} <= {200, 503}
    streamed = [events for status, events in answers if status == 200]
    assert streamed
    assert all(events[-1] == "[DONE]" for events in streamed)
    told = [json.loads(events[-2])["error"] for events in streamed if '"error"' in events[-2]]
    assert all("SIGKILL" in error["message"] for error in told)
    assert told or len(streamed) < 8  # somebody was in flight
    server.logged("killed by SIGKILL")
    wait_until(lambda: server.http.get("/health").status_code == 200, 60)
    assert _first_answer(server) == text
    server.wait_idle()
    server.logged("serving again")


def test_an_idle_engine_that_is_killed_is_noticed(server: RunningServer) -> None:
    os.kill(server.load()["engine_pid"], signal.SIGKILL)
    wait_until(lambda: server.http.get("/health").status_code == 503, 20)
    wait_until(lambda: server.http.get("/health").status_code == 200, 60)
    assert _first_answer(server)


def test_a_stuck_engine_is_dumped_killed_and_replaced(server: RunningServer) -> None:
    old = server.load()["engine_pid"]
    os.kill(old, signal.SIGSTOP)
    # Not at once: an engine that answered a moment ago counts as alive for that moment.
    wait_until(lambda: server.http.get("/health").status_code == 503, 60)
    server.logged("stuck: no sign of life", 60)
    wait_until(lambda: server.http.get("/health").status_code == 200, 60)
    assert server.load()["engine_pid"] != old
    assert _first_answer(server)


@pytest.mark.parametrize("whole_host", [True, False])
def test_a_frozen_host_or_server_does_not_cost_an_engine(server: RunningServer, whole_host: bool) -> None:
    wait_until(lambda: server.http.get("/readyz").status_code == 200, 60)
    engine = server.load()["engine_pid"]
    num_restarts = server.log.count("serving again")
    frozen = [server.process.pid, *([engine] if whole_host else [])]
    for pid in frozen:
        os.kill(pid, signal.SIGSTOP)
    over = time.monotonic() + 6  # beyond the stall timeout
    wait_until(lambda: time.monotonic() > over, 60)
    seen = server.log.count("the server did not run")
    for pid in frozen:
        os.kill(pid, signal.SIGCONT)
    wait_until(lambda: server.log.count("the server did not run") > seen, 20)
    assert _first_answer(server)
    assert server.load()["engine_pid"] == engine
    assert server.log.count("serving again") == num_restarts


def test_no_file_descriptors_for_a_new_engine(server: RunningServer) -> None:
    pid, old = server.process.pid, server.load()["engine_pid"]
    limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, limits[1]))
    try:
        os.kill(old, signal.SIGKILL)
        server.logged("the engine does not start: ")
        unready = server.http.get("/readyz")  # over the connection that there is
        assert unready.status_code == 503
        assert "oo many open files" in unready.json()["error"]["message"]
        assert server.http.get("/health").status_code == 503
        assert server.http.get("/livez").json() == {"status": "ok", "engine": "restarting"}  # a restart would not help
        refused = server.http.post("/v1/completions", json=_LONG)
        assert refused.status_code == 503
        assert refused.headers["retry-after"]
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)
    wait_until(lambda: server.http.get("/readyz").status_code == 200, 60)
    assert server.load()["engine_pid"] != old
    assert _first_answer(server)


def test_sigterm_lets_requests_end_and_refuses_new_ones(server: RunningServer) -> None:
    """The last test of this server."""
    whole: list[Any] = []

    def ask() -> None:
        body = {**_LONG, "n": 4, "max_tokens": 240}
        whole.append(httpx.post(f"{server.url}/v1/completions", json=body, timeout=60))

    thread = threading.Thread(target=ask)
    thread.start()
    wait_until(lambda: server.load()["server_load"] > 0, 60)
    server.process.send_signal(signal.SIGTERM)
    server.logged("shutting down")  # a signal takes its time: what comes before is not new
    statuses: set[int] = set()
    with contextlib.suppress(httpx.HTTPError):  # the port closes at the end
        while True:
            statuses.add(httpx.post(f"{server.url}/v1/completions", json=_LONG, timeout=10).status_code)
    thread.join(60)
    assert whole[0].status_code == 200
    assert len(whole[0].json()["choices"]) == 4
    assert statuses <= {503}
    assert server.process.wait(60) == 0


def test_what_cannot_start_says_why(model_path: Callable[[str], Path], tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="context 999999 is more than"):
        RunningServer(model_path("stories15m"), "--context", "999999")
    with pytest.raises(AssertionError, match=r"missing\.gguf"):
        RunningServer(tmp_path / "missing.gguf")


class _Chaos:
    """Clients that misbehave in every way; every request must get an answer or be left by its own client."""

    def __init__(self, server: RunningServer, seconds: float) -> None:
        self.server = server
        self.end = time.monotonic() + seconds
        self.outcomes: list[str] = []  # not counted here: threads would lose counts

    def run(self, seed: int) -> None:
        choose = random.Random(seed)
        with httpx.Client(base_url=self.server.url, timeout=60) as http:
            while time.monotonic() < self.end:
                act = choose.choice((self.whole, self.streamed, self.leave, self.bad, self.too_long, self.slow))
                act(http, choose)

    def body(self, choose: random.Random, **extra: Any) -> dict[str, Any]:
        prompt = " ".join(choose.choices(("the", "dog", "saw", "a", "cat", "and", "ran"), k=choose.randint(1, 40)))
        return {"prompt": prompt, "max_tokens": choose.randint(1, 60), "n": choose.choice((1, 1, 2)), **extra}

    def whole(self, http: httpx.Client, choose: random.Random) -> None:
        answer = http.post("/v1/completions", json=self.body(choose))
        assert answer.status_code in (200, 429), answer.text
        self.outcomes.append(f"whole {answer.status_code}")

    def streamed(self, http: httpx.Client, choose: random.Random, pause: float = 0.0) -> None:
        with http.stream("POST", "/v1/completions", json=self.body(choose, stream=True)) as answer:
            assert answer.status_code in (200, 429)
            for last in answer.iter_lines():
                time.sleep(pause)
                assert '"error":' not in last or answer.status_code == 429
                if last == "data: [DONE]":
                    self.outcomes.append("done")
            self.outcomes.append(f"streamed {answer.status_code}")

    def slow(self, http: httpx.Client, choose: random.Random) -> None:
        self.streamed(http, choose, pause=0.01)

    def leave(self, http: httpx.Client, choose: random.Random) -> None:
        with http.stream("POST", "/v1/completions", json=self.body(choose, stream=True)) as answer:
            for _ in zip(range(choose.randint(0, 8)), answer.iter_lines(), strict=False):
                pass
        self.outcomes.append("left")

    def bad(self, http: httpx.Client, choose: random.Random) -> None:
        content = choose.choice((b"{", b"[]", b'{"prompt": 5}', b'{"prompt": "x", "n": -1}', b"\xff\xfe"))
        answer = http.post("/v1/completions", content=content, headers={"content-type": "application/json"})
        assert answer.status_code in (400, 429)  # what is wrong beyond the form is seen after the door
        self.outcomes.append("bad")

    def too_long(self, http: httpx.Client, choose: random.Random) -> None:
        answer = http.post("/v1/completions", json=self.body(choose) | {"prompt": "dog " * 500})
        assert answer.status_code in (400, 429)  # a full queue is not even tokenized for
        self.outcomes.append("too long")


def test_chaos(steady: RunningServer) -> None:
    text = _first_answer(steady)
    chaos = _Chaos(steady, 8)
    failures: list[BaseException] = []

    def run(seed: int) -> None:
        try:
            chaos.run(seed)
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]
    outcomes = Counter(chaos.outcomes)
    assert outcomes["done"] == outcomes["streamed 200"]
    assert {"left", "bad", "too long", "whole 200", "streamed 200"} <= set(outcomes)
    steady.wait_idle()
    assert _first_answer(steady) == text
    metrics = steady.http.get("/metrics").text
    assert 'status="500"' not in metrics
    assert steady.load()["queued_requests"] == 0
