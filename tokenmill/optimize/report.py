"""report.html: the verdict first, then the evidence.

Headline, Pareto plot, every candidate with its verdict, predicted against measured, error of each layer, memory, and
the commands that repeat it. Only lays out the outcome. Called by outputs.py; charts and the page come from report/.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from tokenmill.optimize.results import CHOSEN, FAILED, HARMED, PASSED, TIED, CandidateResult, Outcome
from tokenmill.report.charts import Bar, Point, bars, legend, scatter
from tokenmill.report.page import Tile, code_block, grid, paragraphs, render_page, section, table, tiles
from tokenmill.report.pareto import pareto_front

_LAYERS_SHOWN = 40
_DEAREST_SHOWN = 1.5  # times the baseline's cost
_COLORS = {CHOSEN: "var(--good)", TIED: "var(--c0)", PASSED: "var(--c0)", HARMED: "var(--bad)"}
_OTHER_COLOR, _BASELINE_COLOR = "var(--c5)", "var(--ink)"


def render_report(outcome: Outcome) -> str:
    subtitle = (
        f"{outcome.machine}; {outcome.workload_words}; ${outcome.price:.3f} an hour ({outcome.price_basis}). "
        f"{_state(outcome)}"
    )
    launch = code_block(f"# {name}\n{line}" for name, line in outcome.launch_lines.items())
    footer = (
        f"{outcome.seconds:.0f} s. Costs are medians of ratios to baseline runs that alternated with the candidate's, "
        "intervals are 95 %. Loss is the ratio of perplexities minus one on "
        f"{outcome.quality_text}; a candidate passes if it is within the limit with 95 % confidence."
    )
    sections = [
        section("Why", paragraphs((outcome.reason, outcome.source_note)), wide=True),
        _pareto_plot(outcome),
        _prediction_plot(outcome),
        section("Candidates", _table(outcome), wide=True),
        section("Baseline: the fastest unquantized variant", _baseline_table(outcome), wide=True),
        section("On other hardware", _projections(outcome), "projected by the planner, not measured", wide=True),
        _layers(outcome),
        section("Serve it", launch, wide=True),
        section("Repeat it", code_block(outcome.commands), wide=True),
    ]
    body = [_chosen(outcome), grid(sections)]
    title = f"{outcome.model}: {_headline(outcome)}"
    return render_page(title, subtitle, body, badge=_verdict(outcome), footer=footer)


def _headline(outcome: Outcome) -> str:
    if outcome.chosen is None or outcome.quality_loss is None:
        return f"nothing chosen ({outcome.state})" if outcome.state != "complete" else "nothing beats the baseline"
    return f"{outcome.cost_reduction:.0%} cheaper, {outcome.quality_loss:+.2%} perplexity"


def _verdict(outcome: Outcome) -> tuple[str, bool]:
    if outcome.state != "complete":
        return f"this run is {outcome.state}", False
    return ("target met", True) if outcome.target_met else ("target not met", False)


def _state(outcome: Outcome) -> str:
    return "" if outcome.state == "complete" else f"This run is {outcome.state}; repeat the command to continue it."


def _chosen(outcome: Outcome) -> str:
    chosen, base = outcome.chosen, outcome.baseline
    if chosen is None or chosen.speed is None or chosen.quality is None or base is None or base.speed is None:
        return ""
    speed, quality = chosen.speed, chosen.quality
    size = chosen.artefact.nbytes if chosen.artefact else 0
    before = base.artefact.nbytes if base.artefact else 0
    shown = [
        Tile(
            f"-{outcome.cost_reduction:.0%}",
            f"cost of a token ({1 - speed.high:.0%} to {1 - speed.low:.0%}); wanted {-outcome.target_cost:.0%}",
            "good" if outcome.target_met else "bad",
        ),
        Tile(
            f"${chosen.dollars_per_million_output or 0:.2f}",
            f"per million output tokens, before ${base.dollars_per_million_output or 0:.2f}",
        ),
        Tile(
            f"{quality.loss:+.2%}",
            f"quality lost ({quality.loss_low:+.2%} to {quality.loss_high:+.2%}); at most "
            f"{outcome.max_quality_loss:.1%}",
        ),
        Tile(f"{speed.ttft_ms:.0f} ms", f"time to first token, before {base.speed.ttft_ms:.0f} ms"),
        Tile(f"{speed.tpot_ms:.1f} ms", f"time per token, before {base.speed.tpot_ms:.1f} ms"),
        Tile(
            f"{speed.memory_bytes / 1e6:,.0f} MB",
            f"memory, before {base.speed.memory_bytes / 1e6:,.0f}; weights {size / 1e6:,.0f}, before "
            f"{before / 1e6:,.0f} MB",
        ),
    ]
    return f'<p>Chosen: <b id="chosen">{escape(chosen.name)}</b></p>{tiles(shown)}'


def _pareto_plot(outcome: Outcome) -> str:
    coordinates, points = {}, []
    for each in outcome.candidates:
        quality = each.quality or each.divergence
        if each.speed is None or quality is None or not quality.loss < 1 or each.speed.cost_ratio > _DEAREST_SHOWN:
            continue  # off the chart: in the table only
        coordinates[each.name] = (each.speed.cost_ratio, quality.loss)
        points.append(
            Point(
                each.speed.cost_ratio,
                quality.loss,
                _color(each),
                f"{each.name}: {each.speed.cost_ratio:.0%} of the cost, {quality.loss:+.2%}",
                each.name,
                ring=each.verdict == CHOSEN,
                x_range=(each.speed.low, each.speed.high),
                y_range=(quality.loss_low, quality.loss_high),
            )
        )
    if not points:
        return section("Cost and quality", paragraphs(["No candidate was measured yet."]), wide=True)
    points.append(Point(1.0, 0.0, _BASELINE_COLOR, "baseline", "baseline"))
    plot = scatter(
        "pareto",
        "Cost and quality",
        points,
        "cost of a token, baseline = 100 %",
        "quality loss (perplexity)",
        percent=True,
        limits=[(outcome.max_quality_loss, f"limit {outcome.max_quality_loss:.1%}")],
        front=pareto_front(coordinates.values(), lambda pair: pair),
    )
    key = legend(
        [(_COLORS[CHOSEN], "chosen"), (_COLORS[PASSED], "passed"), (_COLORS[HARMED], "harmed"), (_OTHER_COLOR, "other")]
    )
    return section("Cost and quality", plot + key, "line: Pareto front; ringed: chosen")


def _prediction_plot(outcome: Outcome) -> str:
    points = [
        Point(each.prediction.speedup, 1 / each.speed.cost_ratio, _color(each), each.name, each.name)
        for each in outcome.candidates
        if each.prediction and each.speed
    ]
    if not points:
        return ""
    plot = scatter(
        "predicted", "Predicted against measured", points, "predicted speed over the baseline", "measured",
        diagonal=True,
    )  # fmt: skip
    return section("Predicted against measured", plot, "dashed: prediction = measurement")


def _color(result: CandidateResult) -> str:
    return _COLORS.get(result.verdict, _OTHER_COLOR)


def _table(outcome: Outcome) -> str:
    order = {name: number for number, name in enumerate((CHOSEN, TIED, PASSED, "slower", HARMED, FAILED))}
    rows = sorted(outcome.candidates, key=lambda each: (order.get(each.verdict, 9), each.name))
    head = (
        "candidate", "KV", "batch", "verdict", "cost", "predicted", "loss", "KL mean", "same top", "tok/s", "TTFT",
        "TPOT", "file MB", "memory MB", "why",
    )  # fmt: skip
    marked = next((number for number, each in enumerate(rows) if each.verdict == CHOSEN), -1)
    return table(head, [_cells(each) for each in rows], marked)


def _cells(each: CandidateResult) -> list[str]:
    speed, quality = each.speed, each.quality or each.divergence
    return [
        each.name,
        each.kv,
        str(each.batch_tokens),
        each.verdict,
        f"{speed.cost_ratio:.0%} ({speed.low:.0%}-{speed.high:.0%}, n={speed.runs})" if speed else "",
        f"{1 / each.prediction.speedup:.0%}" if each.prediction else "",
        f"{quality.loss:+.2%} ({quality.tokens} tokens)" if quality else "",
        f"{quality.kld_mean:.4f}" if quality else "",
        f"{quality.top1_agreement:.1%}" if quality else "",
        f"{speed.output_tok_s:.1f}" if speed else "",
        f"{speed.ttft_ms:.0f} ms" if speed else "",
        f"{speed.tpot_ms:.1f} ms" if speed else "",
        f"{each.artefact.nbytes / 1e6:,.0f}" if each.artefact else "",
        f"{speed.memory_bytes / 1e6:,.0f}" if speed else "",
        each.reason,
    ]


def _baseline_table(outcome: Outcome) -> str:
    rows = [
        [
            each.name + (" (the baseline)" if each is outcome.baseline else ""),
            each.verdict,
            f"{each.speed.output_tok_s:.1f}" if each.speed else "",
            f"{each.artefact.nbytes / 1e6:,.0f}" if each.artefact else "",
            each.reason,
        ]
        for each in outcome.baseline_variants
    ]
    marked = next((i for i, each in enumerate(outcome.baseline_variants) if each is outcome.baseline), -1)
    return table(("variant", "verdict", "tok/s", "MB", "why"), rows, marked)


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
