"""What a server's metrics tell: each symptom from the metrics that show it, in the names of three servers."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import httpx
import pytest

from tokenmill.bench.symptoms import job
from tokenmill.bench.symptoms.reading import Reading, read
from tokenmill.bench.symptoms.rules import Finding, diagnose
from tokenmill.bench.symptoms.scrape import Scrape, metrics_url, parse, quantile
from tokenmill.cli.render.draw import as_text
from tokenmill.cli.screens.symptoms import symptoms_screen
from tokenmill.engine.stats import DeviceStats, EngineStats
from tokenmill.errors import UserError
from tokenmill.runtime.speculation.gate import Decision
from tokenmill.serve.metrics import Metrics

_VLLM = """
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 32.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="m"} 40.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.98
# TYPE vllm:num_preemptions counter
vllm:num_preemptions_total{engine="0",model_name="m"} 17.0
# TYPE vllm:prefix_cache_queries counter
vllm:prefix_cache_queries_total{engine="0",model_name="m"} 100000.0
# TYPE vllm:prefix_cache_hits counter
vllm:prefix_cache_hits_total{engine="0",model_name="m"} 90000.0
# TYPE vllm:generation_tokens counter
vllm:generation_tokens_total{engine="0",model_name="m"} 5000.0
"""
_LLAMACPP = """
# TYPE llamacpp:prompt_tokens_total counter
llamacpp:prompt_tokens_total 900
# TYPE llamacpp:tokens_predicted_total counter
llamacpp:tokens_predicted_total 400
# TYPE llamacpp:requests_processing gauge
llamacpp:requests_processing 4
# TYPE llamacpp:requests_deferred gauge
llamacpp:requests_deferred 9
"""


def _scrape(text: str, moment: float = 0.0) -> Scrape:
    return Scrape(moment, parse(text))


def _ours(**stats: Any) -> Metrics:
    metrics = Metrics("m")
    metrics.on_step(EngineStats(**stats))
    metrics.set("engine_up", 1)
    metrics.set("requests_running_limit", 8)
    metrics.add("generation_tokens", 100)
    return metrics


def _read(metrics: Metrics) -> Reading:
    scrape = _scrape(metrics.render().decode())
    return read(scrape, scrape)


def _symptoms(metrics: Metrics) -> dict[str, Finding]:
    return {found.symptom: found for found in diagnose(_read(metrics))}


def test_a_healthy_server_has_no_symptom() -> None:
    assert _symptoms(_ours(num_running=3, kv_usage=0.4)) == {}


@pytest.mark.parametrize(
    ("stats", "times", "cause", "fix"),
    [
        ({"kv_usage": 0.97, "num_running": 3}, (), "the KV cache is full", "--kv-cache-dtype"),
        ({"kv_usage": 0.2, "num_running": 8}, (), "every slot is taken", "--concurrency"),
        ({"kv_usage": 0.2, "num_running": 3}, (9.0, 1.0), "prompts take most of the time", "--batch-tokens"),
        ({"kv_usage": 0.2, "num_running": 3}, (1.0, 9.0), "neither KV cache nor slots run out", "replica"),
    ],
)
def test_why_requests_wait(stats: dict[str, Any], times: tuple[float, ...], cause: str, fix: str) -> None:
    metrics = _ours(num_waiting=20, **stats)
    for name, seconds in zip(("prefill_seconds", "decode_seconds"), times, strict=False):
        metrics.observe(name, seconds)
    (found,) = [each for symptom, each in _symptoms(metrics).items() if cause in symptom]
    assert "20 waiting" in found.evidence
    assert fix in found.fix


def test_preemptions_errors_refusals_restarts_and_memory() -> None:
    metrics = _ours(num_preemptions=5, num_expired=2)
    metrics.add("http_responses", 90, "200")
    metrics.add("http_responses", 10, "500")
    metrics.add("requests", 5, "error")
    metrics.add("admission_rejections", 7, "queue_full")
    metrics.add("engine_restarts")
    metrics.set("host_memory_available_bytes", 1)
    metrics.set("host_memory_bytes", 100)
    metrics.on_devices([DeviceStats("0", 0.1, 99, 100, 90)])
    found = _symptoms(metrics)
    assert set(found) == {
        "sequences are preempted",
        "requests fail",
        "sequences end with an error",
        "requests are refused (429)",
        "deadlines are missed",
        "the engine was replaced",
        "the machine runs out of memory",
        "the GPU's memory is full",
    }
    assert found["requests fail"].severity == "critical"
    assert "7 queue_full" in found["requests are refused (429)"].evidence


def test_the_prefix_cache_has_its_own_reasons() -> None:
    metrics = _ours(num_prefix_query_tokens=10_000, num_prefix_hit_tokens=100)
    metrics.add("prefix_cache_requests", 50, "partial")
    found = _symptoms(metrics)["the prefix cache is of little use"]
    assert "1.0% of 10000" in found.evidence
    assert "return_prefix_break" in found.fix
    assert not _symptoms(_ours(num_prefix_query_tokens=100, num_prefix_hit_tokens=0))


def test_stutter_and_bad_drafts() -> None:
    metrics = _ours(num_drafted=100, num_accepted=10, saved_seconds=-5.0)
    for value in [0.01] * 95 + [0.7] * 5:
        metrics.observe("itl_seconds", value)
    found = _symptoms(metrics)
    assert "answers stutter: prompts of others interrupt them" in found
    assert "speculation loses time" in found


def test_what_was_decided_about_drafts_is_shown() -> None:
    stats = EngineStats()
    stats.take_decisions(
        [
            Decision("suffix", "5-8", False, -0.021, "measured not to pay"),
            Decision("suffix", "1", True, 0.25, "measured to pay"),
        ]
    )
    metrics = _ours()
    metrics.on_step(stats)
    reading = _read(metrics)
    assert [(each.sequences, each.on, each.gain) for each in reading.drafting] == [
        ("1", True, 0.25),
        ("5-8", False, -0.021),
    ]
    result = {"server": "tokenmill", "url": "u", "verdict": "healthy", "findings": [], "reading": asdict(reading)}
    text = as_text(symptoms_screen(result))
    assert "suffix at 1" in text
    assert "on: wins 25% of the time (measured to pay)" in text
    assert "off: loses 2% of the time (measured not to pay)" in text


def test_an_engine_that_is_down_comes_first() -> None:
    metrics = _ours(num_preemptions=1)
    metrics.set("engine_up", 0)
    assert diagnose(_read(metrics))[0].symptom == "the engine is down"


def test_vllms_names() -> None:
    first, last = _scrape(_VLLM), _scrape(_VLLM.replace(" 40.0", " 90.0").replace(" 5000.0", " 6000.0"), 10.0)
    reading = read(first, last)
    assert (reading.server, reading.seconds, reading.output_tokens) == ("vLLM", 10.0, 1000.0)
    found = diagnose(reading)
    assert found[0].symptom == "the queue grows: the KV cache is full"
    assert "90 waiting" in found[0].evidence
    assert "--gpu-memory-utilization" in found[0].fix
    assert reading.preemptions == 0  # none since the first look
    assert "sequences are preempted" in [each.symptom for each in diagnose(read(first, first))]


def test_llamacpps_names() -> None:
    scrape = _scrape(_LLAMACPP)
    reading = read(scrape, scrape)
    (found,) = diagnose(reading)
    assert (reading.server, found.symptom) == ("llama.cpp", "requests wait: every slot is taken")
    assert "--parallel" in found.fix


def test_text_that_is_no_metrics_of_a_known_server() -> None:
    with pytest.raises(UserError, match="not known here"):
        read(_scrape("up 1\n"), _scrape("up 1\n"))
    with pytest.raises(UserError, match="no metrics"):
        parse("")
    with pytest.raises(UserError, match="not Prometheus text"):
        parse("<html>{")


def test_quantiles_are_of_what_came_between() -> None:
    metrics = Metrics("m")
    for _ in range(100):
        metrics.observe("ttft_seconds", 0.003)
    first = _scrape(metrics.render().decode())
    for _ in range(10):
        metrics.observe("ttft_seconds", 3.0)
    last = _scrape(metrics.render().decode())
    assert quantile(None, last, "tokenmill_ttft_seconds", 0.5) == 0.005
    assert quantile(first, last, "tokenmill_ttft_seconds", 0.5) == 5.0
    assert quantile(last, last, "tokenmill_ttft_seconds", 0.5) is None


@pytest.mark.parametrize(
    "url", ["localhost:8000", "http://localhost:8000/", "http://localhost:8000/v1", "http://localhost:8000/metrics"]
)
def test_any_address_of_the_server_will_do(url: str) -> None:
    assert metrics_url(url) == "http://localhost:8000/metrics"


@pytest.mark.parametrize(
    ("status", "remedy"), [(401, "--api-key"), (403, "metrics"), (501, "--metrics"), (500, "address")]
)
def test_what_a_server_may_answer_instead(monkeypatch: pytest.MonkeyPatch, status: int, remedy: str) -> None:
    monkeypatch.setattr(httpx, "get", lambda *_, **__: httpx.Response(status, text="no"))
    with pytest.raises(UserError) as caught:
        job.examine("localhost:1", seconds=0)
    assert remedy in str(caught.value)


def test_the_screen_has_symptom_evidence_and_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(httpx, "get", lambda *_, **__: httpx.Response(200, text=_VLLM))
    result = job.examine("localhost:8000", seconds=0)
    assert result["verdict"] == "needs attention"
    text = as_text(symptoms_screen(result))
    assert "vLLM at http://localhost:8000/metrics: needs attention" in text
    assert "Requests wait: the KV cache is full" in text
    assert "raise --gpu-memory-utilization" in text
    assert "prompt tokens cached" in text
