"""What was tried and why it lost: cost against divergence, predicted against measured, every candidate's reason."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from tokenmill.optimize.results import CHOSEN, FAILED, HARMED, PASSED, SLOWER, TIED, UNLIKELY, CandidateResult, Outcome
from tokenmill.report.charts import Bar, Point, bars, legend, scatter
from tokenmill.report.page import paragraphs, section, table
from tokenmill.report.pareto import pareto_front

_LAYERS_SHOWN = 40
_MOST_EXPENSIVE_SHOWN = 1.5  # times the baseline's cost
_MOST_DIVERGENT_SHOWN = 0.5  # nats; beyond, a model answers something else
_COLORS = {CHOSEN: "var(--good)", TIED: "var(--c0)", PASSED: "var(--c0)", HARMED: "var(--bad)"}
_OTHER_COLOR, _BASELINE_COLOR = "var(--c5)", "var(--ink)"
_ORDER = {name: number for number, name in enumerate((CHOSEN, TIED, PASSED, SLOWER, HARMED, FAILED, UNLIKELY))}


def candidate_sections(outcome: Outcome) -> list[str]:
    return [
        _pareto_plot(outcome),
        _prediction_plot(outcome),
        section("What was tried, and why it lost", _table(outcome), wide=True),
        section("On other hardware", _projections(outcome), "projected by the planner, not measured", wide=True),
        _layers(outcome),
    ]


def prediction_error(result: CandidateResult) -> float | None:
    """Predicted over measured cost, minus one."""
    if result.prediction is None or result.speed is None or result.prediction.speedup <= 0:
        return None
    return 1 / result.prediction.speedup / result.speed.cost_ratio - 1


def _pareto_plot(outcome: Outcome) -> str:
    title = "Cost and divergence"
    places, points, outside = {}, [], 0
    for each in outcome.candidates:
        quality = each.quality or each.divergence
        if each.speed is None or quality is None:
            continue
        if not quality.kld_mean <= _MOST_DIVERGENT_SHOWN or each.speed.cost_ratio > _MOST_EXPENSIVE_SHOWN:
            outside += 1
            continue
        places[each.name] = (each.speed.cost_ratio, quality.kld_mean)
        points.append(
            Point(
                each.speed.cost_ratio,
                quality.kld_mean,
                _color(each),
                f"{each.name}: {each.speed.cost_ratio:.0%} of the cost, divergence {quality.kld_mean:.4f}",
                each.name,
                ring=each.verdict == CHOSEN,
                x_range=(each.speed.low, each.speed.high),
            )
        )
    if not points:
        if outcome.quality_off:
            return ""
        return section(title, paragraphs(["No candidate was measured yet."]), wide=True)
    points.append(Point(1.0, 0.0, _BASELINE_COLOR, "unquantized", "unquantized"))
    limits = [(outcome.max_kld, f"limit {outcome.max_kld:g}")] if outcome.max_kld is not None else []
    plot = scatter(
        "pareto", title, points, "cost of a token, unquantized = 100 %", "mean KL divergence, nats",
        percent=(True, False), limits=limits, front=pareto_front(places.values(), lambda pair: pair),
    )  # fmt: skip
    key = legend(
        [(_COLORS[CHOSEN], "chosen"), (_COLORS[PASSED], "passed"), (_COLORS[HARMED], "harmed"), (_OTHER_COLOR, "other")]
    )
    off = f"; {outside} off the chart, in the table below" if outside else ""
    return section(title, plot + key, f"line: Pareto front; ringed: chosen{off}")


def _prediction_plot(outcome: Outcome) -> str:
    measured = [(each, error) for each in outcome.candidates if (error := prediction_error(each)) is not None]
    points = [
        Point(1 / each.prediction.speedup, each.speed.cost_ratio, _color(each), f"{each.name}: {error:+.0%}", each.name)
        for each, error in measured
        if each.prediction and each.speed
    ]
    if not points:
        return ""
    title = "Predicted against measured"
    plot = scatter(
        "predicted", title, points, "predicted cost, unquantized = 100 %", "measured",
        diagonal=True, percent=(True, True),
    )  # fmt: skip
    typical = median(abs(error) for _, error in measured)
    return section(title, plot, f"dashed: prediction = measurement; median error {typical:.0%} of {len(points)}")


def _color(result: CandidateResult) -> str:
    return _COLORS.get(result.verdict, _OTHER_COLOR)


def _table(outcome: Outcome) -> str:
    rows = sorted(outcome.candidates, key=lambda each: (_ORDER.get(each.verdict, 9), _cost(each), each.name))
    head = (
        "candidate", "verdict", "why", "cost by throughput (95 %)", "predicted", "error", "loss", "KL mean",
        "same top", "tok/s", "TTFT ms", "TPOT ms", "KV", "batch", "file MB", "memory MB",
    )  # fmt: skip
    marked = next((number for number, each in enumerate(rows) if each.verdict == CHOSEN), -1)
    return table(head, [_cells(each) for each in rows], marked)


def _cost(result: CandidateResult) -> float:
    return result.speed.cost_ratio if result.speed else float("inf")


def _cells(each: CandidateResult) -> list[str]:
    speed, quality, error = each.speed, each.quality or each.divergence, prediction_error(each)
    return [
        each.name,
        each.verdict,
        each.reason,
        f"{speed.cost_ratio:.0%} ({speed.low:.0%} to {speed.high:.0%}, n={speed.runs})" if speed else "",
        f"{1 / each.prediction.speedup:.0%}" if each.prediction and each.prediction.speedup > 0 else "",
        f"{error:+.0%}" if error is not None else "",
        f"{quality.loss:+.2%} ({quality.tokens:,} tokens)" if quality else "",
        f"{quality.kld_mean:.4f}" if quality else "",
        f"{quality.top1_agreement:.1%}" if quality else "",
        f"{speed.output_tok_s:,.1f}" if speed else "",
        f"{speed.ttft_ms:.3g}" if speed else "",
        f"{speed.tpot_ms:.3g}" if speed else "",
        each.kv,
        str(each.batch_tokens),
        f"{each.artefact.nbytes / 1e6:,.0f}" if each.artefact else "",
        f"{speed.memory_bytes / 1e6:,.0f}" if speed else "",
    ]


def _layers(outcome: Outcome) -> str:
    layers: Sequence[dict[str, Any]] = (
        outcome.chosen.artefact.layers if outcome.chosen and outcome.chosen.artefact else ()
    )
    worst = sorted((each for each in layers if each["relative_error"] > 0), key=lambda each: -each["relative_error"])
    if not worst:
        return ""
    shown = [
        Bar(each["name"], each["relative_error"], text=f"{each['relative_error']:.4f} {each['type_name']}")
        for each in worst[:_LAYERS_SHOWN]
    ]
    note = "|W - W'| / |W|" + (f"; the worst {_LAYERS_SHOWN} of {len(worst)}" if len(worst) > _LAYERS_SHOWN else "")
    title = "Error of each layer of the chosen model"
    return section(title, bars("layers", title, shown), note, wide=True)


def _projections(outcome: Outcome) -> str:
    head = ("device", "weights", "$ / million before", "after", "saving", "output tok/s (range)", "note")
    rows = []
    for each in outcome.projections:
        rate = each.get("output_tok_s") or {}
        saving = each.get("cost_reduction")
        rows.append(
            [
                str(each["gpu"]),
                str(each["weights"]),
                str(each.get("baseline_per_million", "")),
                str(each.get("per_million", "")),
                f"{saving:.0%}" if saving is not None else "",
                f"{rate['value']:,.0f} ({rate['low']:,.0f}-{rate['high']:,.0f})" if rate else "",
                str(each.get("note", "")),
            ]
        )
    return table(head, rows)
