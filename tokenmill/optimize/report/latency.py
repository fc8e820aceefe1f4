"""Latency under the same arrivals: percentile curves of what is served today, the baseline and the winner, and a table.

Without a replay (no objectives): the medians of the throughput runs, said to be that.
"""

from __future__ import annotations

import re

from tokenmill.optimize.results import CandidateResult, Latency, Outcome, Percentiles
from tokenmill.optimize.wording import NO_OBJECTIVE
from tokenmill.report.charts import Curve, curves
from tokenmill.report.page import paragraphs, section, table

_LIMIT = re.compile(r"(ttft|itl|e2e)\W+p([\d.]+)\D*?([\d.]+)\s*(ms|s)\b", re.IGNORECASE)
_MEASURES = (("ttft", "Time to first token"), ("itl", "Time between tokens"))
_LOGARITHMIC = 20.0  # the largest over the smallest value from which a linear axis hides the smaller curve


def latency_section(outcome: Outcome) -> str:
    shown = contestants(outcome)
    replayed = [(label, each.latency) for label, each in shown if each.latency is not None]
    if not replayed:
        medians = _medians(shown)
        note = f"{NO_OBJECTIVE}; medians of the throughput runs, all requests waiting" if not outcome.objectives else ""
        return section("Latency", medians, note, wide=True)
    charts = "".join(f"<div>{_chart(outcome, measure, title, replayed)}</div>" for measure, title in _MEASURES)
    refused = [f"{label}: {latency.refusal}." for label, latency in replayed if latency.refusal]
    offered = replayed[0][1]
    content = f'<div class="pair">{charts}</div>{_table(replayed)}{paragraphs(refused)}'
    stated = outcome.objectives or NO_OBJECTIVE
    if any(each.offered_requests_s != offered.offered_requests_s for _, each in replayed):
        rates = ", ".join(f"{label} {each.offered_requests_s:.3g}" for label, each in replayed)
        note = f"{stated}; no rate was given: each at the highest that it sustains, in requests a second: {rates}"
        return section("Latency at the highest rate of each", content, note, wide=True)
    note = f"{stated}; {offered.requests:,} requests at {offered.offered_requests_s:.3g} a second, the same for all"
    return section("Latency under the same arrivals", content, note, wide=True)


def contestants(outcome: Outcome) -> list[tuple[str, CandidateResult]]:
    """What a reader compares, each once: today, unquantized, chosen, and another engine where it is the cheapest."""
    named = [
        ("today", outcome.today),
        ("unquantized", outcome.baseline),
        ("chosen", outcome.chosen),
        ("cheapest rival", outcome.winner),
    ]
    found: list[tuple[str, CandidateResult]] = []
    for label, each in named:
        if each is None or any(each is other for _, other in found):
            continue
        found.append((f"{label}: {each.name}" if each.name != label else label, each))
    return found


def objective_limits(objectives: str, measure: str) -> list[tuple[float, str]]:
    """(milliseconds, label) of the objectives on a measure."""
    found = []
    for name, percentile, value, unit in _LIMIT.findall(objectives):
        if name.lower() == measure:
            limit = float(value) * (1000.0 if unit.lower() == "s" else 1.0)
            found.append((limit, f"p{percentile} limit {limit:g} ms"))
    return found


def _chart(outcome: Outcome, measure: str, title: str, replayed: list[tuple[str, Latency]]) -> str:
    lines = [Curve(label, *_quantiles(latency, measure), color) for color, (label, latency) in enumerate(replayed)]
    values = [value for line in lines for value in line.ys if value > 0]
    logarithmic = bool(values) and max(values) > _LOGARITHMIC * min(values)
    limits = objective_limits(outcome.objectives, measure)
    return curves(
        measure, f"{title} by percentile", lines, "percentile of the requests", f"{title.lower()}, ms",
        logarithmic=(False, logarithmic), limits=limits,
    )  # fmt: skip


def _quantiles(latency: Latency, measure: str) -> tuple[list[float], list[float]]:
    """(percentiles, milliseconds): the whole curve, or the four percentiles where only those were kept."""
    curve = latency.ttft_curve_ms if measure == "ttft" else latency.itl_curve_ms
    if len(curve) > 1:
        return [100.0 * number / (len(curve) - 1) for number in range(len(curve))], list(curve)
    kept = latency.ttft_ms if measure == "ttft" else latency.itl_ms
    return [50.0, 90.0, 95.0, 99.0], [kept.p50, kept.p90, kept.p95, kept.p99]


def _table(replayed: list[tuple[str, Latency]]) -> str:
    head = ["", "TTFT ms p50", "p90", "p95", "p99", "ITL ms p50", "p90", "p95", "p99"]
    head += ["within the objective", "goodput tok/s", "output tok/s", "failed"]
    rows = [
        [
            label,
            *_percentiles(each.ttft_ms),
            *_percentiles(each.itl_ms),
            f"{each.attainment:.1%}",
            f"{each.goodput_tok_s:,.1f}",
            f"{each.output_tok_s:,.1f}",
            str(each.failed),
        ]
        for label, each in replayed
    ]
    return table(head, rows)


def _percentiles(each: Percentiles) -> list[str]:
    return [f"{value:.3g}" if value < 1000 else f"{value:,.0f}" for value in (each.p50, each.p90, each.p95, each.p99)]


def _medians(shown: list[tuple[str, CandidateResult]]) -> str:
    rows = [
        [label, f"{each.speed.ttft_ms:.3g}", f"{each.speed.tpot_ms:.3g}", f"{each.speed.output_tok_s:,.1f}"]
        for label, each in shown
        if each.speed is not None
    ]
    return table(("", "time to first token, ms", "time per token, ms", "output tok/s"), rows)
