"""report.html: one file without outside resources, for a manager's minute and an engineer's hour.

Headline, Pareto plot, every candidate with its verdict, predicted against measured, error of each layer, memory, and
the commands that repeat it. Only arranges what the outcome holds (and report.css). Called by outputs.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from importlib import resources
from typing import Any

from tokenmill import __version__
from tokenmill.optimize.evidence import pareto
from tokenmill.optimize.plots import Point, bars, scatter
from tokenmill.optimize.results import CHOSEN, FAILED, HARMED, PASSED, TIED, CandidateResult, Outcome

_LAYERS_SHOWN = 40
_DEAREST_SHOWN = 1.5  # times the baseline's cost


def render_report(outcome: Outcome) -> str:
    title = f"{outcome.model}: {_headline(outcome)}"
    style = (resources.files("tokenmill.optimize") / "report.css").read_text(encoding="utf-8")
    body = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="dim">{escape(outcome.machine)}; {escape(outcome.workload_words)}; ${outcome.price:.3f} an hour '
        f"({escape(outcome.price_basis)}). {_state(outcome)}</p>",
        _cards(outcome),
        *(f"<p>{escape(text)}</p>" for text in (outcome.reason, outcome.source_note) if text),
        _section("Cost and quality", _pareto_plot(outcome)),
        _section("Candidates", _table(outcome)),
        _section("Baseline: the fastest unquantized way", _baseline_table(outcome)),
        _section("Predicted against measured", _prediction_plot(outcome)),
        _section("On other hardware (planner's projection, not measured)", _projections(outcome)),
        _section("Error of each layer of the chosen model", _layers(outcome)),
        _section("Serve it", _pre(f"# {name}\n{line}" for name, line in outcome.launch_lines.items())),
        _section("Repeat it", _pre(outcome.commands)),
        f'<p class="dim">tokenmill {__version__}, {outcome.seconds:.0f} s. Costs are medians of ratios to baseline '
        "runs that alternated with the candidate's, intervals are 95 %. Loss is the ratio of perplexities minus one on "
        f"{escape(outcome.quality_text)}; a candidate passes if it is within the limit with 95 % confidence.</p>",
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{style}</style></head><body>{''.join(body)}</body></html>\n"
    )


def _headline(outcome: Outcome) -> str:
    if outcome.chosen is None or outcome.quality_loss is None:
        return f"nothing chosen ({outcome.state})" if outcome.state != "complete" else "nothing beats the baseline"
    return f"{outcome.cost_reduction:.0%} cheaper, {outcome.quality_loss:+.2%} perplexity"


def _state(outcome: Outcome) -> str:
    if outcome.state == "complete":
        return ""
    return f'<b class="bad">This run is {escape(outcome.state)}</b>; run the same command again to go on.'


def _cards(outcome: Outcome) -> str:
    chosen, base = outcome.chosen, outcome.baseline
    if chosen is None or chosen.speed is None or chosen.quality is None or base is None or base.speed is None:
        return ""
    speed, quality = chosen.speed, chosen.quality
    tone = "good" if outcome.target_met else "bad"
    size = chosen.artefact.nbytes if chosen.artefact else 0
    before = base.artefact.nbytes if base.artefact else 0
    cards = [
        ("Cost of a token", f'<b class="{tone}">-{outcome.cost_reduction:.0%}</b>', f"{1 - speed.high:.0%} to "
         f"{1 - speed.low:.0%}; wanted {-outcome.target_cost:.0%}"),
        ("Million output tokens", f"<b>${chosen.dollars_per_million_output or 0:.2f}</b>",
         f"before ${base.dollars_per_million_output or 0:.2f}"),
        ("Quality lost", f"<b>{quality.loss:+.2%}</b>", f"{quality.loss_low:+.2%} to {quality.loss_high:+.2%}; at most "
         f"{outcome.max_quality_loss:.1%}"),
        ("Time to first token", f"<b>{speed.ttft_ms:.0f} ms</b>", f"before {base.speed.ttft_ms:.0f} ms"),
        ("Time per token", f"<b>{speed.tpot_ms:.1f} ms</b>", f"before {base.speed.tpot_ms:.1f} ms"),
        (
            "Memory",
            f"<b>{speed.memory_bytes / 1e6:,.0f} MB</b>",
            f"before {base.speed.memory_bytes / 1e6:,.0f} MB; weights {size / 1e6:,.0f}, before {before / 1e6:,.0f} MB",
        ),
    ]  # fmt: skip
    shown = (f'<div class="card">{name}{value}<small>{escape(note)}</small></div>' for name, value, note in cards)
    return f'<p>Chosen: <b id="chosen">{escape(chosen.name)}</b></p><div class="cards">{"".join(shown)}</div>'


def _pareto_plot(outcome: Outcome) -> str:
    points, marks = {}, []
    for each in outcome.candidates:
        quality = each.quality or each.divergence
        if each.speed is None or quality is None or not quality.loss < 1 or each.speed.cost_ratio > _DEAREST_SHOWN:
            continue  # far off: in the table only
        points[each.name] = (each.speed.cost_ratio, quality.loss)
        marks.append(
            Point(
                each.speed.cost_ratio,
                quality.loss,
                each.name,
                _kind(each),
                (each.speed.low, each.speed.high),
                (quality.loss_low, quality.loss_high),
            )
        )
    if not marks:
        return "<p>No candidate was measured yet.</p>"
    marks.append(Point(1.0, 0.0, "baseline", "baseline"))
    front = [points[name] for name in pareto(points)]
    plot = scatter(
        marks,
        "cost of a token, baseline = 100 %",
        "quality loss (perplexity)",
        percent=True,
        limit_y=outcome.max_quality_loss,
        path=front,
    )
    return f'<div id="pareto">{plot}</div><p class="dim">Dashed: the limit. Line: nobody is cheaper and better.</p>'


def _prediction_plot(outcome: Outcome) -> str:
    marks = [
        Point(each.prediction.speedup, 1 / each.speed.cost_ratio, each.name, _kind(each))
        for each in outcome.candidates
        if each.prediction and each.speed
    ]
    if not marks:
        return ""
    plot = scatter(marks, "predicted speed over the baseline", "measured", diagonal=True)
    return f'<div id="predicted">{plot}</div>'


def _kind(result: CandidateResult) -> str:
    return {CHOSEN: "chosen", TIED: "passed", PASSED: "passed", HARMED: "harmed"}.get(result.verdict, "other")


def _table(outcome: Outcome) -> str:
    order = {name: number for number, name in enumerate((CHOSEN, TIED, PASSED, "slower", HARMED, FAILED))}
    rows = sorted(outcome.candidates, key=lambda each: (order.get(each.verdict, 9), each.name))
    head = (
        "candidate", "KV", "batch", "verdict", "cost", "predicted", "loss", "KL mean", "same top", "tok/s", "TTFT",
        "TPOT", "file MB", "memory MB", "why",
    )  # fmt: skip
    return _rows(head, [_cells(each) for each in rows], [each.verdict for each in rows])


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
    head = ("variant", "verdict", "tok/s", "MB", "why")
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
    return _rows(head, rows, ["chosen" if each is outcome.baseline else "" for each in outcome.baseline_variants])


def _layers(outcome: Outcome) -> str:
    layers: Sequence[dict[str, Any]] = (
        outcome.chosen.artefact.layers if outcome.chosen and outcome.chosen.artefact else ()
    )
    worst = sorted((each for each in layers if each["relative_error"] > 0), key=lambda each: -each["relative_error"])
    if not worst:
        return ""
    shown = [
        (each["name"], each["relative_error"], f"{each['relative_error']:.4f} {each['type_name']}") for each in worst
    ]
    note = (
        f'<p class="dim">|W - W\'| / |W|; the worst {_LAYERS_SHOWN} of {len(worst)}.</p>'
        if len(worst) > _LAYERS_SHOWN
        else ""
    )
    return f'<div id="layers">{bars(shown[:_LAYERS_SHOWN])}</div>{note}'


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
    return _rows(head, rows, [""] * len(rows)) if rows else ""


def _rows(head: Sequence[str], rows: Sequence[Sequence[str]], classes: Sequence[str]) -> str:
    if not rows:
        return ""
    top = "".join(f"<th>{escape(name)}</th>" for name in head)
    body = "".join(
        f'<tr class="{escape(kind)}">' + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>"
        for row, kind in zip(rows, classes, strict=True)
    )
    return f'<div class="scroll"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def _section(title: str, content: str) -> str:
    return f"<h2>{escape(title)}</h2>{content}" if content else ""


def _pre(lines: Iterable[str]) -> str:
    text = "\n".join(lines)
    return f"<pre>{escape(text)}</pre>" if text else ""
