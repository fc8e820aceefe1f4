"""The result as text, in the block that users of vLLM's benchmark know, and as a file. Knows field names only."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenmill.bench.serve_job import ServeJob
from tokenmill.errors import UserError

_WIDTH = 50
_LINES = (
    ("Successful requests", "completed"),
    ("Failed requests", "failed"),
    ("Maximum request concurrency", "max_concurrency"),
    ("Request rate configured (RPS)", "request_rate"),
    ("Benchmark duration (s)", "duration"),
    ("Total input tokens", "total_input_tokens"),
    ("Total generated tokens", "total_output_tokens"),
    ("Request throughput (req/s)", "request_throughput"),
    ("Request goodput (req/s)", "request_goodput"),
    ("Output token throughput (tok/s)", "output_throughput"),
    ("Peak output token throughput (tok/s)", "max_output_tokens_per_s"),
    ("Peak concurrent requests", "max_concurrent_requests"),
    ("Total token throughput (tok/s)", "total_token_throughput"),
)
_METRICS = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
    "ttft_scheduled": "TTFT from the intended send time",
    "e2el_scheduled": "E2EL from the intended send time",
}


def as_block(report: dict[str, Any], job: ServeJob) -> str:
    lines = [" Serving Benchmark Result ".center(_WIDTH, "=")]
    lines += [_line(title, report[key]) for title, key in _LINES if report[key] is not None]
    for name, title in _METRICS.items():
        if name in job.shown_metrics() or (f"mean_{name}_ms" in report and name.endswith("_scheduled")):
            lines += _latency_lines(report, name, title)
    steady = report["steady_state"]
    if steady is not None:
        lines += [
            "Steady State".center(_WIDTH, "-"),
            _line("Window (s)", steady["seconds"]),
            _line("Output token throughput (tok/s)", steady["output_throughput"]),
        ]
    lines += ["Client".center(_WIDTH, "-"), _line("CPU of this client (s)", report["client_cpu_s"])]
    lines += [f"{count} x {error}" for error, count in report["failures"].items()]
    return "\n".join([*lines, "=" * _WIDTH])


def save(report: dict[str, Any], details: dict[str, Any] | None, job: ServeJob) -> Path:
    """Detailed lists go into the file only."""
    limit = f"-concurrency{job.max_concurrency}" if job.max_concurrency else ""
    model = report["model_id"].split("/")[-1]
    name = job.result_filename or f"{report['label']}-{report['request_rate']}qps{limit}-{model}-{report['date']}.json"
    path = Path(job.result_dir) / name
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a" if job.append_result else "w", encoding="utf-8") as file:
            if job.append_result and file.tell():
                file.write("\n")
            json.dump(report | (details or {}), file)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}", "check --result-dir") from None
    return path


def _latency_lines(report: dict[str, Any], name: str, title: str) -> list[str]:
    shown = [title.center(_WIDTH, "-")]
    short = name.upper() if "_" not in name else name.split("_")[0].upper()
    end = f"_{name}_ms"
    for key in report:
        head = key.removesuffix(end)
        if head != key and head != "std" and report[key] is not None:
            shown.append(_line(f"{head.capitalize()} {short} (ms)", report[key]))
    return shown


def _line(title: str, value: Any) -> str:
    text = f"{value:.2f}" if isinstance(value, float) else str(value)
    return f"{title + ':':<40} {text:<10}".rstrip()
