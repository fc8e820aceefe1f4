"""Numbers of a benchmark from samples whose every time is known."""

from __future__ import annotations

import json
from array import array
from pathlib import Path
from typing import Any

import pytest

from tokenmill.bench.serve import Measurement, request_body
from tokenmill.bench.serve_client import Sample
from tokenmill.bench.serve_file import save
from tokenmill.bench.serve_item import Item
from tokenmill.bench.serve_job import ServeJob
from tokenmill.bench.serve_report import build_report, details


def _sample(sent: float, *stamps: float, intended: float | None = None, tokens: int = 0, error: str = "") -> Sample:
    ended = (stamps[-1] if stamps else sent) + 0.1
    return Sample(
        sent if intended is None else intended, sent, 10, ended, array("d", stamps), tokens or len(stamps), 0, error
    )


def _report(samples: list[Sample], open_loop: bool = False, **options: Any) -> dict[str, Any]:
    job = ServeJob.from_options(options)
    ended = max(sample.ended for sample in samples)
    return build_report(Measurement(job, "m", samples, 0.0, ended, open_loop, 0.5))


def test_latencies_follow_their_definitions() -> None:
    report = _report([_sample(1.0, 1.5, 2.0, 4.0), _sample(0.0, 1.5)])
    assert report["mean_ttft_ms"] == pytest.approx(1000)
    assert report["mean_tpot_ms"] == pytest.approx(1250)  # the answer of one token has none
    assert report["mean_itl_ms"] == pytest.approx(1250)
    assert report["median_itl_ms"] == pytest.approx(1250)
    assert report["p99_itl_ms"] == pytest.approx(1985)
    assert report["mean_e2el_ms"] == pytest.approx(1000 * (3.1 + 1.6) / 2)
    assert (report["total_input_tokens"], report["total_output_tokens"]) == (20, 4)
    assert report["output_throughput"] == pytest.approx(4 / 4.1)
    assert report["total_token_throughput"] == pytest.approx(24 / 4.1)
    assert report["client_cpu_us_per_token"] == pytest.approx(125000)


def test_tpot_counts_tokens_and_itl_counts_pieces() -> None:
    report = _report([_sample(0.0, 1.0, 3.0, tokens=5)])
    assert report["mean_tpot_ms"] == pytest.approx(500)
    assert report["mean_itl_ms"] == pytest.approx(2000)


def test_failures_change_no_other_number() -> None:
    good = [_sample(0.0, 1.0, 2.0), _sample(0.5, 1.0, 2.0)]
    bad = [_sample(0.0, 0.001, error="HTTP 500: x"), _sample(0.2, error="HTTP 500: x")]
    clean, mixed = _report(good), _report([*bad, *good])
    assert (mixed["completed"], mixed["failed"]) == (2, 2)
    assert mixed["failures"] == {"HTTP 500: x": 2}
    differing = {key for key in clean if clean[key] != mixed[key]}
    assert differing - {"date"} == {"num_prompts", "failed", "failures"}


def test_latency_from_the_schedule_shows_the_wait_that_sending_hides() -> None:
    late = [_sample(5.0, 5.5, intended=1.0), _sample(2.0, 2.5, intended=2.0)]
    report = _report(late, open_loop=True, request_rate=1.0)
    assert report["mean_ttft_ms"] == pytest.approx(500)
    assert report["mean_ttft_scheduled_ms"] == pytest.approx(2500)
    assert report["max_send_delay_ms"] == pytest.approx(4000)
    assert "mean_ttft_scheduled_ms" not in _report(late)


@pytest.mark.parametrize(
    ("limits", "met"),
    [("ttft:500", 1), ("ttft:2000", 2), ("tpot:400", 1), ("itl:900", 1), ("itl:1100", 2), ("ttft:500 itl:900", 0)],
)
def test_goodput_wants_every_limit(limits: str, met: int) -> None:
    samples = [_sample(0.0, 0.4, 1.4), _sample(0.0, 1.0, 1.2, 1.4)]
    assert _report(samples, goodput=(limits,))["request_goodput"] == pytest.approx(met / 1.5)
    assert _report(samples)["request_goodput"] is None


def test_the_steady_window_leaves_out_the_ramp_and_the_tail() -> None:
    ramp = [_sample(float(at), *(at + step for step in range(1, 21))) for at in range(4)]  # one more each second
    report = _report(ramp)
    assert report["max_concurrent_requests"] == 4
    steady = report["steady_state"]
    assert steady["start_s"] == pytest.approx(3)
    assert steady["seconds"] == pytest.approx(17.1)  # until the first ends at 20.1
    assert steady["output_throughput"] == pytest.approx((18 + 18 + 18 + 17) / 17.1)


def test_without_success_there_are_no_latencies() -> None:
    report = _report([_sample(0.0, error="x")])
    assert report["mean_ttft_ms"] is None
    assert report["steady_state"] is None
    assert report["output_throughput"] == 0
    json.dumps(report, allow_nan=False)


def test_the_file(tmp_path: Path) -> None:
    job = ServeJob.from_options({"metric_percentiles": "50,90", "result_dir": str(tmp_path), "goodput": ("ttft:1",)})
    measurement = Measurement(job, "org/m", [_sample(0.0, 1.0, 2.0), _sample(0.0, error="no")], 0.0, 2.1, False, 0.1)
    report = build_report(measurement)
    path = save(report, details(measurement), job)
    assert path.name.startswith("openai-infqps-m-")
    found = json.loads(path.read_text())
    assert (found["itls"], found["errors"], found["ttfts"]) == ([[1.0], []], ["", "no"], [1.0, 0.0])
    assert {"model_id", "duration", "request_goodput", "std_tpot_ms", "max_output_tokens_per_s"} <= found.keys()


def test_bodies_ask_for_a_stream_with_usage() -> None:
    job = ServeJob.from_options({"backend": "openai-chat", "extra_body": '{"top_p": 0.5}', "ignore_eos": True})
    body = json.loads(request_body(job, Item("hi", 1, 7), "m"))
    assert body["messages"] == [{"role": "user", "content": "hi"}]
    assert (body["stream"], body["stream_options"], body["top_p"]) == (True, {"include_usage": True}, 0.5)
    assert (body["max_tokens"], body["ignore_eos"]) == (7, True)
    plain = json.loads(request_body(ServeJob(), Item([1, 2], 2, 7), "m"))
    assert plain["prompt"] == [1, 2]
    assert "ignore_eos" not in plain
