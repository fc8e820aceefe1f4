"""The HTML report of a benchmark (`bench serve|throughput --report FILE`): tiles, latencies, load over time.

Reads finished measurements and draws them with report/. Measures nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenmill.bench.serve import Measurement
from tokenmill.bench.serve_client import Sample
from tokenmill.report.charts import Curve, Point, curves, scatter
from tokenmill.report.page import Tile, grid, render_page, section, table, tiles, write_page

if TYPE_CHECKING:
    from tokenmill.bench.throughput import ThroughputReport  # imports the engine, which a load generator does without

_MAX_POINTS = 2000  # requests drawn; of more, every n-th
_WINDOWS = 120  # of the curves over time
_METRICS = (("ttft", "time to first token"), ("tpot", "time per output token"), ("itl", "inter-token latency"),
            ("e2el", "end to end"))  # fmt: skip


def write_serve_report(path: Path, measurement: Measurement, report: Mapping[str, Any]) -> None:
    """`report`: what serve_report.py made of the measurement."""
    good = [sample for sample in measurement.samples if sample.ok]
    title = f"{report['model_id']}: {report['output_throughput']:,.0f} output tokens/s"
    limit = f", at most {report['max_concurrency']} in flight" if report["max_concurrency"] else ""
    subtitle = (
        f"{report['num_prompts']:,} requests ({report['dataset_name']}) in {report['duration']:,.1f} s, "
        f"request rate {report['request_rate']}{limit}"
    )
    failed = report["failed"]
    badge = (f"{failed:,} of {report['num_prompts']:,} requests failed", False) if failed else ("no failures", True)
    failures = table(["error", "requests"], [[error, count] for error, count in report["failures"].items()])
    sections = [*_over_time(measurement, good), _latencies(report), section("Failures", failures, wide=True)]
    body = [tiles(_headline(report)), grid(sections)]
    page = render_page(title, subtitle, body, badge=badge, footer="Times as the client saw them.")
    write_page(path, page, "--report")


def _headline(report: Mapping[str, Any]) -> list[Tile]:
    shown = [
        Tile(f"{report['output_throughput']:,.0f}/s", "output tokens"),
        Tile(f"{report['request_throughput']:,.2f}/s", "requests completed"),
        Tile(f"{report['max_concurrent_requests']:,}", "requests in flight at the peak"),
    ]
    if report["request_goodput"] is not None:
        shown.append(Tile(f"{report['request_goodput']:,.2f}/s", "requests within every limit"))
    for name, label in _METRICS[:2]:
        if report[f"median_{name}_ms"] is not None:
            shown.append(Tile(f"{report[f'median_{name}_ms']:,.1f} ms", f"{label}, median"))
    return shown


def _latencies(report: Mapping[str, Any]) -> str:
    heads = [key.removesuffix("_ttft_ms") for key in report if key.endswith("_ttft_ms")]
    rows = [
        [label, *(report[f"{head}_{name}_ms"] for head in heads)]
        for name, label in _METRICS
        if report.get(f"mean_{name}_ms") is not None
    ]
    return section("Latencies, ms", table(["", *(head.upper() if head[0] == "p" else head for head in heads)], rows))


def _over_time(measurement: Measurement, good: Sequence[Sample]) -> list[str]:
    if not good:
        return []
    began = measurement.began
    stride = max(1, len(good) // _MAX_POINTS)
    points = [
        Point(each.sent - began, 1e3 * (each.first - each.sent), "var(--c0)", f"{each.prompt_len} tokens in", dim=True)
        for each in good[::stride]
    ]
    first = scatter("ttft", "Time to first token", points, "sent, seconds", "ms")
    width = max(measurement.ended - began, 1e-9) / _WINDOWS
    middles = [(number + 0.5) * width for number in range(_WINDOWS)]
    tokens, flying = _windows(good, began, width)
    rate = curves("rate", "Output tokens", [Curve("tokens/s", middles, tokens, 2)], "seconds", "tokens/s")
    load = curves("load", "In flight", [Curve("in flight", middles, flying, 1)], "seconds", "requests", counts=True)
    return [
        section("Output tokens per second", rate),
        section("Requests in flight", load),
        section("Time to first token", first, "each point is a request"),
    ]


def _windows(good: Sequence[Sample], began: float, width: float) -> tuple[list[float], list[float]]:
    """(tokens per second, mean requests in flight) by window of time."""
    tokens, flying = [0.0] * _WINDOWS, [0.0] * _WINDOWS
    for sample in good:
        share = sample.output_tokens / max(1, len(sample.stamps))  # a piece may hold several tokens
        for stamp in sample.stamps:
            tokens[min(_WINDOWS - 1, max(0, int((stamp - began) / width)))] += share / width
        start, end = (sample.sent - began) / width, (sample.ended - began) / width
        for number in range(max(0, int(start)), min(_WINDOWS, int(end) + 1)):
            flying[number] += max(0.0, min(end, number + 1) - max(start, number))
    return tokens, flying


def write_throughput_report(path: Path, model: str, report: ThroughputReport) -> None:
    r = report
    title = f"{model}: {r.output_tok_s:,.1f} output tokens/s"
    lengths = f"{r.input_tokens:,} tokens in, {r.output_tokens:,} out"
    subtitle = f"{r.num_prompts:,} requests at once, {lengths}, {r.elapsed_s:,.1f} s"
    shown = [
        Tile(f"{r.output_tok_s:,.1f}/s", "output tokens"),
        Tile(f"{r.total_tok_s:,.1f}/s", "tokens, prompts included"),
        Tile(f"{r.requests_s:,.2f}/s", "requests"),
        Tile(f"{r.prefix_hit_rate:.0%}", "of prompt tokens from the prefix cache"),
        Tile(f"{r.kv_use:.0%}", "of the KV pages in use, mean"),
        Tile(f"{r.kv_waste:.1%}", "of the slots in held pages empty"),
    ]
    rows = [[name.replace("_", " "), value] for name, value in asdict(r).items()]
    body = [tiles(shown), grid([section("All figures", table(["figure", "value"], rows), wide=True)])]
    write_page(path, render_page(title, subtitle, body), "--report")
