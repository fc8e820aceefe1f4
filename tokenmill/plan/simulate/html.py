"""The HTML report of a simulation: percentiles as tiles, KV use, queue and replicas over time, TTFT by arrival.

Takes plain values (`Simulation.to_json()` and `simulation_series()`), so it knows nothing of the simulator.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenmill.report import charts
from tokenmill.report.page import Tile, grid, render_page, section, table, tiles, write_page

_FOOTER = "The engine's own scheduler and KV manager; the time of each step is predicted."
_PIXELS = 500


def write_simulation_report(
    path: Path | str, title: str, result: Mapping[str, Any], series: Mapping[str, Sequence[float]]
) -> None:
    goodput = result.get("goodput")
    verdict = ("simulated", True)
    if goodput:
        verdict = (f"{goodput['share']:.1%} of requests keep the promises", goodput["share"] >= 0.9)
    subtitle = (
        f"{result.get('requests', 0):,} requests in {result.get('duration_s', 0):,.0f} s, "
        f"{result.get('refused', 0):,} refused, {result.get('preemptions', 0):,} preemptions"
    )
    sections = [*_over_time(series), _ttft(series), _percentiles(result), _replicas(result)]
    body = [tiles(_headline(result)), grid(sections)]
    write_page(path, render_page(title, subtitle, body, badge=verdict, footer=_FOOTER))


def _headline(result: Mapping[str, Any]) -> list[Tile]:
    found = [
        Tile(f"{result['ttft_ms']['p50']:,.0f} ms", f"TTFT, median (P99 {result['ttft_ms']['p99']:,.0f})"),
        Tile(f"{result['itl_ms']['p50']:,.1f} ms", f"between tokens, median (P99 {result['itl_ms']['p99']:,.1f})"),
        Tile(f"{result['throughput_tok_s']:,.0f}/s", "output tokens"),
        Tile(f"{result['cache_hit_rate']:.0%}", "of prompt tokens from the prefix cache"),
    ]
    if "kv_use" in result:
        found.append(
            Tile(f"{result['kv_use']['peak']:.0%}", f"KV use at the peak, {result['kv_use']['mean']:.0%} on average")
        )
    if "queue" in result:
        found.append(
            Tile(f"{result['queue']['peak']:,}", f"waiting at the peak, {result['queue']['mean']:,.1f} on average")
        )
    return found


def _thin(series: Mapping[str, Sequence[float]], x: str, y: str) -> tuple[list[float], list[float]]:
    """At most one value per pixel: the largest of its stretch, so that peaks stay."""
    xs, ys = list(series.get(x, ())), list(series.get(y, ()))
    stride = max(1, -(-len(xs) // _PIXELS))
    starts = range(0, len(xs), stride)
    return [xs[i] for i in starts], [max(ys[i : i + stride]) for i in starts]


def _over_time(series: Mapping[str, Sequence[float]]) -> list[str]:
    if not series.get("seconds"):
        return []
    x, kv = _thin(series, "seconds", "kv_use")
    drawn = charts.curves("kv", "KV use over time", [charts.Curve("KV use", x, [100 * v for v in kv], 2)], "seconds",
                          "% of the KV cache", top=100 / 1.1)  # fmt: skip
    lines = [
        charts.Curve(label, *_thin(series, "seconds", key), color)
        for key, label, color in (("running", "running", 0), ("waiting", "waiting", 1))
        if series.get(key)
    ]
    queue = charts.curves("queue", "Requests over time", lines, "seconds", "requests", counts=True)
    found = [
        section("KV cache", drawn, "share of pages held"),
        section("Queue", queue, "requests computed and waiting"),
    ]
    if len(set(series.get("replicas", ()))) > 1:
        count = charts.Curve("replicas", *_thin(series, "seconds", "replicas"), 3)
        found.append(
            section(
                "Replicas", charts.curves("replicas", "Replicas over time", [count], "seconds", "replicas", counts=True)
            )
        )
    return found


def _ttft(series: Mapping[str, Sequence[float]]) -> str:
    if not series.get("arrival_seconds"):
        return ""
    curve = charts.Curve("TTFT", *_thin(series, "arrival_seconds", "ttft_ms"), 0)
    drawn = charts.curves("ttft", "TTFT by arrival", [curve], "arrival, seconds", "ms", logarithmic=(False, True))
    return section("Time to first token, by arrival", drawn, "the slowest of each stretch")


def _percentiles(result: Mapping[str, Any]) -> str:
    names = (("TTFT", "ttft_ms"), ("ITL", "itl_ms"), ("TPOT", "tpot_ms"), ("end to end", "e2e_ms"))
    rows = [
        [label, *(float(result[key][each]) for each in ("p50", "p90", "p99"))] for label, key in names if key in result
    ]
    return section("Percentiles, ms", table(["", "P50", "P90", "P99"], rows))


def _replicas(result: Mapping[str, Any]) -> str:
    found = result.get("replicas") or ()
    rows = [
        [each["replica"], each["pool"], each["requests"], f"{each['busy']:.0%}", each["preemptions"],
         f"{each['cache_hit_rate']:.0%}"]
        for each in found
    ]  # fmt: skip
    columns = ["replica", "pool", "requests", "busy", "preemptions", "cache hits"]
    return section("Replicas", table(columns, rows), wide=len(rows) > 6) if rows else ""
