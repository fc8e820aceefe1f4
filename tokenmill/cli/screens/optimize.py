"""The screen of `tokenmill optimize`: both baselines with the saving against each, latency, quality, rivals, how to
serve it, what is not proven."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tokenmill.cli.render.screen import Cell, Facts, Lines, Screen, Section, Table, Tone, Value, left, right
from tokenmill.cli.render.units import change, counted, dollars, duration, milliseconds, percent, tokens_per_second
from tokenmill.optimize.results import saving
from tokenmill.optimize.wording import (
    NO_OBJECTIVE,
    NO_QUALITY,
    baseline_words,
    counts_words,
    headline,
    loss_words,
    margin_words,
    saving_words,
    source_words,
    task_words,
    today_words,
    unproven_words,
    winner_words,
)

if TYPE_CHECKING:
    from tokenmill.optimize.results import CandidateResult, Latency, Outcome

_CANDIDATES, _RIVALS, _TASKS = 8, 4, 3  # shown; the report has all
_UNTRIED, _UNLIKELY = "untried", "unlikely"
_VERDICTS: dict[str, Tone] = {"chosen": "good", "tied": "good", "harmed": "bad", "failed": "bad"}


def optimize_screen(outcome: Outcome, report: Path) -> Screen:
    sections: list[Section] = [_cost(outcome), _facts(outcome)]
    if outcome.rivals:
        sections.append(_rivals(outcome))
    tried = [each for each in outcome.candidates if each.verdict not in (_UNTRIED, _UNLIKELY)]
    if tried:
        sections.append(_candidates(outcome, sorted(tried, key=_cost_order)[:_CANDIDATES]))
    serve = outcome.launch_lines.get("tokenmill", "")
    if serve:
        sections.append(Lines("Serve it", [serve]))
    return Screen(_headline(outcome), _tone(outcome), sections, _notes(outcome, report))


def _tone(outcome: Outcome) -> Tone:
    return "good" if outcome.target_met and outcome.objective_met is not False else "warning"


def _headline(outcome: Outcome) -> str:
    target = "target met" if outcome.target_met else "target missed"
    if outcome.chosen is None:
        text = headline(outcome)
        return f"{text[0].upper()}{text[1:]}: {target}"
    return f"{outcome.chosen.name}: {headline(outcome)}: {target}"


def _cost(outcome: Outcome) -> Table:
    """Both baselines first, the saving against each, and in the same line what the source was."""
    saved = (outcome.saving_today, outcome.saving) if outcome.chosen else ()
    words = [saving_words(each) for each in saved] or ["", ""]
    rows = [
        _cost_row("today", today_words(outcome), outcome.today, words[0]),
        _cost_row("unquantized", baseline_words(outcome), outcome.baseline, words[1]),
    ]
    if outcome.chosen is not None:
        rows.append(_cost_row("chosen", outcome.chosen.name, outcome.chosen, ""))
    columns = (left(""), left("weights and settings"), right("$/M output"), right("speed"), right("saved (95%)"))
    return Table(f"Cost of a token ({source_words(outcome)})", columns, rows)


def _cost_row(label: str, words: str, result: CandidateResult | None, saved: str) -> tuple[Value, ...]:
    price, rate = (result.dollars_per_million_output, result.output_tok_s) if result else (None, None)
    return label, words, dollars(price), tokens_per_second(rate), saved


def _facts(outcome: Outcome) -> Facts:
    rows: list[tuple[str, Value]] = [("latency", _latency(outcome))]
    baseline = outcome.baseline.latency if outcome.baseline else None
    if outcome.objectives and baseline is not None:
        rows.append(("  unquantized", _latency_words(baseline)))
    chosen = outcome.chosen
    if outcome.quality_off:
        rows.append(("quality", Cell(NO_QUALITY, "warning")))
    elif chosen is not None and chosen.quality is not None:
        quality = chosen.quality
        rows.append(("perplexity", f"{loss_words(quality)}, limit {percent(outcome.max_quality_loss, 1)}"))
        rows.append(
            ("divergence", f"{quality.kld_mean:.4f} nats mean, same top token {percent(quality.top1_agreement, 1)}")
        )
    for task in chosen.tasks[:_TASKS] if chosen else ():
        rows.append((f"task {task.name}", task_words(task)))
    if chosen is not None and chosen.checks:
        passed = sum(not check.refusal for check in chosen.checks)
        rows.append(("checks", f"{passed} of {counted(len(chosen.checks), 'check')} of generated text passed"))
    return Facts("Latency and quality", rows)


def _latency(outcome: Outcome) -> Value:
    if not outcome.objectives:
        return NO_OBJECTIVE
    served = outcome.chosen or outcome.baseline
    if served is None or served.latency is None:
        return Cell(f"{outcome.objectives}: not replayed", "warning")
    met = served.latency.objective_met
    verdict = "met" if met else served.latency.refusal or "missed"
    return Cell(f"{_latency_words(served.latency)}; {outcome.objectives}: {verdict}", "good" if met else "bad")


def _latency_words(latency: Latency) -> str:
    return (
        f"TTFT p95 {milliseconds(latency.ttft_ms.p95)}, ITL p95 {milliseconds(latency.itl_ms.p95)}, "
        f"{percent(latency.attainment)} within"
    )


def _rivals(outcome: Outcome) -> Table:
    rows = [
        (
            each.name,
            Cell(each.verdict, _VERDICTS.get(each.verdict, "dim")),
            dollars(each.dollars_per_million_output),
            milliseconds(each.latency.ttft_ms.p95 if each.latency else None),
            milliseconds(each.latency.itl_ms.p95 if each.latency else None),
            Cell(each.reason, "dim"),
        )
        for each in outcome.rivals[:_RIVALS]
    ]
    columns = (left("engine"), left("verdict"), right("$/M output"), right("TTFT p95"), right("ITL p95"), left("why"))
    return Table("Other engines", columns, rows)


def _candidates(outcome: Outcome, shown: Sequence[CandidateResult]) -> Table:
    rows = []
    for each in shown:
        saved, quality = saving(each, outcome.baseline, bool(outcome.objectives)), each.quality or each.divergence
        rows.append(
            (
                each.name,
                Cell(each.verdict, _VERDICTS.get(each.verdict, "dim")),
                change(-saved.share, 0) if saved else "-",
                change(quality.loss, 2) if quality else "-",
                Cell(each.reason, "dim"),
            )
        )
    columns = (left("candidate"), left("verdict"), right("cost"), right("perplexity"), left("why"))
    return Table(f"Candidates ({counts_words(outcome)})", columns, rows)


def _cost_order(result: CandidateResult) -> float:
    return result.speed.cost_ratio if result.speed else float("inf")


def _notes(outcome: Outcome, report: Path) -> list[Cell]:
    notes = [Cell(outcome.reason)] if outcome.reason else []
    tied = [name for name in outcome.tied if outcome.chosen and name != outcome.chosen.name]
    if tied:
        notes.append(Cell(f"as cheap within the error of measurement: {', '.join(tied)}"))
    if open_to := margin_words(outcome):
        notes.append(Cell(open_to))
    winner = winner_words(outcome)
    if winner:
        notes.append(Cell(winner, "plain" if outcome.winner is outcome.chosen else "warning"))
    unproven = unproven_words(outcome)
    if unproven:
        notes.append(Cell(unproven, "warning"))
    untried = [each for each in outcome.candidates if each.verdict == _UNTRIED and each.name not in outcome.unproven]
    if untried:
        notes.append(Cell(f"{counted(len(untried), 'candidate')} not tried: no time was left", "warning"))
    if outcome.state != "complete":
        notes.append(Cell(f"the search is not finished: {outcome.state}; run the same command to go on", "warning"))
    notes.append(Cell(f"report: {report} ({duration(outcome.seconds)} of measuring)"))
    return notes
