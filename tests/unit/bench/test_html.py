"""The HTML reports of the benchmarks: every chart there, failures shown, nothing from the net."""

from __future__ import annotations

import re
from array import array
from pathlib import Path

import pytest

from tokenmill.bench.html import write_serve_report, write_throughput_report
from tokenmill.bench.serve import Measurement
from tokenmill.bench.serve_client import Sample
from tokenmill.bench.serve_job import ServeJob
from tokenmill.bench.serve_report import build_report
from tokenmill.bench.throughput import ThroughputReport
from tokenmill.errors import UserError


def measured(succeeding: int = 10, failing: int = 0) -> Measurement:
    """Requests one a second, each of four tokens in two seconds."""
    samples = [
        Sample(float(n), float(n), 16, n + 2.0, array("d", [n + 0.5, n + 1.0, n + 1.5, n + 2.0]), 4)
        for n in range(succeeding)
    ]
    samples += [Sample(0.0, 0.0, 16, 1.0, error="HTTP 500: <oops>") for _ in range(failing)]
    return Measurement(ServeJob.from_options({}), "a<b", samples, 0.0, 11.0, False, 0.1)


def written(path: Path, measurement: Measurement) -> str:
    write_serve_report(path, measurement, build_report(measurement))
    return path.read_text(encoding="utf-8")


def test_a_served_run_is_drawn(tmp_path: Path) -> None:
    text = written(tmp_path / "serve.html", measured())
    assert set(re.findall(r'data-chart="([^"]+)"', text)) == {"rate", "load", "ttft"}
    assert "no failures" in text
    assert "a&lt;b: 4 output tokens/s" in text
    assert "500.0 ms" in text
    assert "Failures" not in text
    assert not re.search(r"https?://|<script|<link|@import|url\(", text)


def test_failures_are_named(tmp_path: Path) -> None:
    text = written(tmp_path / "serve.html", measured(failing=2))
    assert "2 of 12 requests failed" in text
    assert "HTTP 500: &lt;oops&gt;" in text


def test_a_run_in_which_nothing_succeeded_is_still_a_page(tmp_path: Path) -> None:
    assert "3 of 3 requests failed" in written(tmp_path / "serve.html", measured(0, 3))


def test_throughput(tmp_path: Path) -> None:
    report = ThroughputReport(100.0, 300.0, 2.0, 5.0, 10, 1000, 500, 0.02, 0.4, 8, 900, 0.25, 0, None, None, 1.0)
    write_throughput_report(tmp_path / "t.html", "tiny", report)
    assert "tiny: 100.0 output tokens/s" in (tmp_path / "t.html").read_text(encoding="utf-8")
    with pytest.raises(UserError, match="--report"):
        write_throughput_report(tmp_path / "no" / "t.html", "tiny", report)
