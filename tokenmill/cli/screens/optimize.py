"""The screen of `tokenmill optimize`: what is saved, what is lost, whether the target is met, and how to serve it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tokenmill.cli.render.screen import Bar, Cell, Lines, Result, Screen, Section, Table, Tone, Value, left, right
from tokenmill.cli.render.units import change, counted, dollars, duration, percent, plain_number, tokens_per_second

if TYPE_CHECKING:
    from tokenmill.optimize.results import CandidateResult

_CANDIDATES = 10
_UNTRIED = "untried"
_VERDICTS: dict[str, Tone] = {"chosen": "good", "tied": "good", "harmed": "bad", "failed": "bad"}


def optimize_screen(result: Result, candidates: Sequence[CandidateResult]) -> Screen:
    sections: list[Section] = [_money(result)]
    if candidates:
        sections.append(_candidates(candidates))
    if result["serve"]:
        sections.append(Lines("Serve it", [result["serve"]]))
    notes = [Cell(result["reason"])] if result["reason"] else []
    tied = [name for name in result["tied"] if name != result["chosen"]]
    if tied:
        notes.append(Cell(f"as good within the error of measurement: {', '.join(tied)}"))
    untried = sum(each.verdict == _UNTRIED for each in candidates)
    if untried:
        notes.append(Cell(f"{counted(untried, 'candidate')} not tried: no time was left", "warning"))
    if result["state"] != "complete":
        notes.append(Cell(f"the search is not finished: {result['state']}; run the same command to go on", "warning"))
    notes.append(Cell(f"report: {result['report']} ({duration(result['seconds'])} of measuring)"))
    return Screen(_headline(result), "good" if result["target_met"] else "warning", sections, notes)


def _headline(result: Result) -> str:
    target = "target met" if result["target_met"] else "target missed"
    if result["chosen"] == "baseline":
        return f"Nothing cheaper keeps the quality: stay with the baseline ({target})"
    low, high = result["cost_reduction_low"], result["cost_reduction_high"]
    span = f" ({percent(low)} to {percent(high)})" if low is not None else ""
    return (
        f"{result['chosen']}: {percent(result['cost_reduction'])} cheaper{span}, "
        f"quality loss {percent(result['quality_loss'], 2)}: {target}"
    )


def _money(result: Result) -> Table:
    price, base = result["dollars_per_million_output"], result["baseline_dollars_per_million_output"]
    rows: list[tuple[Value, ...]] = [
        ("baseline", result["baseline"] or "-", dollars(base), tokens_per_second(result["baseline_output_tok_s"]),
         Bar(1.0) if base else ""),
    ]  # fmt: skip
    if result["chosen"] != "baseline":
        share = price / base if price is not None and base else 1.0
        rows.append(
            ("chosen", result["chosen"], dollars(price), tokens_per_second(result["output_tok_s"]), Bar(share, "good"))
        )
    columns = (left(""), left("weights and settings"), right("$/M output"), right("speed"), left("cost"))
    return Table("Cost", columns, rows)


def _candidates(candidates: Sequence[CandidateResult]) -> Table:
    rows = []
    for each in [each for each in candidates if each.verdict != _UNTRIED][:_CANDIDATES]:
        speed, quality = each.speed, each.quality or each.divergence
        rows.append(
            (
                each.name,
                Cell(each.verdict, _VERDICTS.get(each.verdict, "dim")),
                change(speed.cost_ratio - 1, 0) if speed else "-",
                change(quality.loss, 2) if quality else "-",
                plain_number(speed.ttft_ms) if speed else "-",
                Cell(each.reason, "dim"),
            )
        )
    columns = (left("candidate"), left("verdict"), right("cost"), right("perplexity"), right("TTFT ms"), left("reason"))
    return Table("Candidates", columns, rows)
