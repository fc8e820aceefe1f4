"""A replay over HTTP against a small server of the test's own, and the verdict on made-up samples."""

from __future__ import annotations

import json
import threading
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from tokenmill.bench.serve_client import Sample
from tokenmill.optimize.dialects import DIALECTS, find_dialect, get_dialect
from tokenmill.optimize.objectives import Objectives
from tokenmill.optimize.replay import Arrivals, judge_samples, replay
from tokenmill.optimize.results import Latency


class _Server(ThreadingHTTPServer):
    """Answers completions token by token; `refuse` may turn one down by its number."""

    daemon_threads = True

    def __init__(self, owner: str, refuse: Callable[[int], bool]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.owner = owner
        self.refuse = refuse
        self.bodies: list[dict[str, Any]] = []
        self.keys: set[str] = set()
        self.silent = threading.Event()  # set: answers never end until `release`
        self.release = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    def log_message(self, *_arguments: Any) -> None: ...

    def do_GET(self) -> None:
        self._send(200, json.dumps({"data": [{"id": "a-model", "owned_by": self.server.owner}]}).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        number = len(self.server.bodies)
        self.server.bodies.append(body)
        self.server.keys.add(self.headers.get("authorization", ""))
        if self.server.silent.is_set():
            self.server.release.wait(30)
        if self.server.refuse(number):
            self._send(429, b'{"error": "full"}')
            return
        events = [{"choices": [{"text": "x"}]} for _ in range(body["max_tokens"])]
        events += [{"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": body["max_tokens"]}}]
        text = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
        self._send(200, text.encode())

    def _send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@contextmanager
def _serving(owner: str = "tokenmill", refuse: Callable[[int], bool] = lambda _: False) -> Iterator[_Server]:
    with _Server(owner, refuse) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        try:
            yield server
        finally:
            server.release.set()
            server.shutdown()


def _arrivals(count: int = 12, interval: float = 0.005) -> Arrivals:
    times = tuple(interval * number for number in range(count))
    return Arrivals(times, tuple([[1, 2, number] for number in range(count)]), (4,) * count, "test", vocab_size=100)


_GENEROUS = Objectives.parse(["p95=20s"], ["p95=20s"], ["p95=30s"])


def test_a_replay_counts_tokens_and_meets_generous_objectives() -> None:
    with _serving() as server:
        latency = replay(server.url, _arrivals(), _GENEROUS, model="", api_key="k", time_limit_s=30)
    assert (latency.requests, latency.failed, latency.attainment) == (12, 0, 1.0)
    assert latency.objective_met
    assert latency.refusal == ""
    assert latency.goodput_tok_s == latency.output_tok_s > 0
    assert latency.offered_requests_s == pytest.approx(200)
    assert 0 < latency.ttft_ms.p50 <= latency.ttft_ms.p95 <= latency.ttft_ms.p99
    assert server.keys == {"Bearer k"}
    warm_ups, measured = server.bodies[:-12], server.bodies[-12:]  # two one by one, then some together
    assert 2 <= len(warm_ups) <= 12
    assert sorted(body["prompt"] for body in measured) == [[1, 2, number] for number in range(12)]
    assert all(body["ignore_eos"] and body["max_tokens"] == 4 and body["model"] == "a-model" for body in measured)
    assert all(body["prompt"][0] != 1 for body in warm_ups)


def test_an_objective_that_nobody_can_meet_is_missed_by_name() -> None:
    with _serving() as server:
        latency = replay(server.url + "/v1/", _arrivals(), Objectives.parse(["0.001ms"], []), model="", time_limit_s=30)
    assert not latency.objective_met
    assert "ttft p95 is" in latency.refusal
    assert "the objective is 0.001ms" in latency.refusal
    assert latency.goodput_tok_s == latency.attainment == 0
    assert latency.output_tok_s > 0


def test_failed_requests_are_counted_and_refuse_the_server() -> None:
    with _serving(refuse=lambda number: number % 2 == 1) as server:
        latency = replay(server.url, _arrivals(), Objectives(), model="m", time_limit_s=30)
    assert latency.failed == 6
    assert not latency.objective_met
    assert "6 of 12 requests failed (HTTP 429" in latency.refusal


def test_no_server_is_a_latency_with_failures_and_does_not_wait_for_the_schedule() -> None:
    with _serving() as server:
        url = server.url
    latency = replay(url, _arrivals(200, interval=0.1), _GENEROUS, model="m", time_limit_s=60, dialect="vllm")
    assert latency.failed == latency.requests == 200
    assert latency.duration_s < 10  # of 20
    assert "cannot connect" in latency.refusal or "the server is gone" in latency.refusal


def test_a_server_that_hangs_costs_no_more_than_the_limit() -> None:
    with _serving() as server:
        server.silent.set()
        latency = replay(server.url, _arrivals(), _GENEROUS, model="m", time_limit_s=0.5)
    assert latency.failed == 12
    assert latency.duration_s < 5
    assert not latency.objective_met


@pytest.mark.parametrize(
    ("owner", "name"), [("vllm", "vllm"), ("llamacpp", "llama.cpp"), ("library", "ollama"), ("me", "openai")]
)
def test_engines_are_told_apart_by_their_model_list(owner: str, name: str) -> None:
    with _serving(owner) as server:
        dialect, model = find_dialect(server.url)
        latency = replay(server.url, _arrivals(3), Objectives(), model="", time_limit_s=30)
    assert (dialect.name, model) == (name, "a-model")
    assert latency.failed == 0
    body = server.bodies[-1]
    assert isinstance(body["prompt"], list) == dialect.takes_ids
    assert ("ignore_eos" in body) == (name not in ("ollama", "openai"))
    assert ("n_predict" in body) == (name == "llama.cpp")


def test_every_dialect_streams_greedily_and_text_stays_text() -> None:
    for name in DIALECTS:
        body = json.loads(get_dialect(name).body("m", "a story", 7))
        assert (body["prompt"], body["max_tokens"], body["stream"], body["temperature"]) == ("a story", 7, True, 0.0)


# --- the verdict ---


def _sample(intended: float, first: float, gaps: list[float], error: str = "") -> Sample:
    stamps = array("d", [intended + first])
    for gap in gaps:
        stamps.append(stamps[-1] + gap)
    return Sample(intended, intended, 3, stamps[-1], stamps, len(stamps), error=error)


def _judged(samples: list[Sample], *flags: list[str]) -> Latency:
    times = tuple(sample.intended for sample in samples)
    arrivals = Arrivals(times, ([1],) * len(times), (1,) * len(times), "test")
    return judge_samples(samples, times[0], arrivals, Objectives.parse(*flags))


def test_the_percentile_asked_for_decides() -> None:
    samples = [_sample(float(n), 1.0 if n == 0 else 0.1, [0.01]) for n in range(20)]
    assert _judged(samples, ["p95=200ms"], []).objective_met
    assert not _judged(samples, ["p99=200ms"], []).objective_met
    assert _judged(samples, ["p99=1.1s"], []).objective_met
    latency = _judged(samples, ["p95=200ms"], [])
    assert latency.attainment == pytest.approx(0.95)
    assert latency.goodput_tok_s == pytest.approx(0.95 * latency.output_tok_s)


def test_gaps_are_pooled_for_the_verdict_and_late_tokens_are_no_goodput() -> None:
    steady = [_sample(float(n), 0.1, [0.01] * 20) for n in range(9)]
    stalled = _sample(9.0, 0.1, [0.01] * 15 + [0.5] * 5)
    latency = _judged([*steady, stalled], [], ["p95=40ms"])
    assert latency.objective_met  # 5 of 200 gaps
    assert latency.attainment == pytest.approx(205 / 210)
    assert latency.goodput_tok_s == pytest.approx(latency.attainment * latency.output_tok_s)
    assert not _judged([*steady, stalled], [], ["p99=40ms"]).objective_met


def test_a_failed_request_has_missed_every_objective() -> None:
    samples = [_sample(float(n), 0.1, [0.01], "HTTP 500" if n == 0 else "") for n in range(200)]
    assert _judged(samples, ["p95=200ms"], []).objective_met  # half a percent
    assert not _judged(samples, ["p100=200ms"], []).objective_met
    assert "unbounded" in _judged(samples, ["p100=200ms"], []).refusal
    assert _judged(samples, ["p95=200ms"], []).attainment == pytest.approx(199 / 200)
    everything = [_sample(0.0, 0.1, [], "HTTP 500")]
    latency = _judged(everything, [], ["p95=40ms"])
    assert not latency.objective_met
    assert latency.ttft_ms.p95 == latency.output_tok_s == 0


def test_rates_of_a_server_that_keeps_up_are_those_of_the_arrivals() -> None:
    samples = [_sample(float(n), 0.5, [0.1] * 9) for n in range(10)]  # one a second, ten tokens each, 1.4 s long
    assert _judged(samples, [], []).output_tok_s == pytest.approx(10.0)
    late = [_sample(float(n), 0.5 + n, [0.1] * 9) for n in range(10)]  # falls a second behind with each
    assert _judged(late, [], []).output_tok_s == pytest.approx(100 / 18)
    assert _judged(late, [], ["p95=1s"]).output_tok_s == pytest.approx(100 / 18), "gaps say nothing of the queue"


def test_answers_that_are_still_running_at_the_end_do_not_lower_the_rate() -> None:
    samples = [_sample(float(n), 0.5, [0.1] * (9 if n else 1)) for n in range(10)]
    samples.append(_sample(10.0, 0.5, [0.1] * 90))  # nine seconds after the last arrival
    assert _judged(samples, ["p95=1s"], []).output_tok_s == pytest.approx((2 + 9 * 10 + 91) / 11)
    assert _judged(samples, [], []).output_tok_s < 10


def test_latency_counts_from_the_intended_time() -> None:
    sample = _sample(10.0, 0.2, [])
    sample.sent = 10.15
    assert _judged([sample], [], []).ttft_ms.p50 == pytest.approx(200)
