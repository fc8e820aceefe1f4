"""The two baselines with the saving against each, the variants the unquantized one was chosen from, and the rivals."""

from __future__ import annotations

from tokenmill.optimize.results import CandidateResult, Outcome, saving
from tokenmill.optimize.wording import baseline_words, saving_words, source_words, today_words, winner_words
from tokenmill.report.page import folded, paragraphs, section, table


def baseline_sections(outcome: Outcome) -> list[str]:
    note = f"{source_words(outcome)}. {outcome.source_note}".strip()
    return [section("Against what is saved", _savings(outcome) + _variants(outcome), note, wide=True)]


def _savings(outcome: Outcome) -> str:
    rows = [
        ["as served today", today_words(outcome), *_figures(outcome.today), saving_words(outcome.saving_today)],
        [
            "unquantized, fastest path",
            baseline_words(outcome),
            *_figures(outcome.baseline),
            saving_words(outcome.saving),
        ],
    ]
    if outcome.chosen is not None:
        rows.append(["chosen", outcome.chosen.name, *_figures(outcome.chosen), ""])
    else:
        rows[0][-1] = rows[1][-1] = ""
    head = ("", "weights and settings", "$ / million output", "output tok/s", "saved by the chosen (95 %)")
    return table(head, rows, len(rows) - 1 if outcome.chosen else -1)


def _figures(result: CandidateResult | None) -> list[str]:
    if result is None:
        return ["", ""]
    price, rate = result.dollars_per_million_output, result.output_tok_s
    return [f"${price:.3g}" if price is not None else "", f"{rate:,.1f}" if rate is not None else ""]


def _variants(outcome: Outcome) -> str:
    """Which unquantized weights and settings competed to be the baseline."""
    rows = [
        [
            each.name + (" (the baseline)" if each is outcome.baseline else ""),
            each.verdict,
            _figures(each)[1],
            f"{each.artefact.nbytes / 1e6:,.0f}" if each.artefact else "",
            each.reason,
        ]
        for each in outcome.baseline_variants
    ]
    marked = next((i for i, each in enumerate(outcome.baseline_variants) if each is outcome.baseline), -1)
    shown = table(("variant", "verdict", "tok/s", "MB", "why"), rows, marked)
    return folded(f"{len(rows)} unquantized variants were measured", shown) if rows else ""


def rival_section(outcome: Outcome) -> str:
    if not outcome.rivals:
        return ""
    head = (
        "engine", "weights", "verdict", "$ / million output", "against the chosen", "tok/s", "TTFT p95 ms",
        "ITL p95 ms", "KL mean", "why",
    )  # fmt: skip
    contestants = [*([outcome.chosen] if outcome.chosen else []), *outcome.rivals]
    rows = [_rival_cells(each, outcome) for each in contestants]
    marked = next((number for number, each in enumerate(contestants) if each is outcome.winner), -1)
    content = paragraphs([f"{winner_words(outcome).capitalize()}."]) + table(head, rows, marked)
    return section("Other engines on this machine", content, "the same arrivals, over HTTP", wide=True)


def _rival_cells(each: CandidateResult, outcome: Outcome) -> list[str]:
    latency, quality = each.latency, each.quality or each.divergence
    gap = saving(each, outcome.chosen, bool(outcome.objectives)) if each is not outcome.chosen else None
    return [
        f"{each.name} (ours)" if each is outcome.chosen else each.name,
        each.weights,
        each.verdict,
        *_figures(each)[:1],
        f"{-gap.share:+.0%}" if gap else "",
        _figures(each)[1],
        f"{latency.ttft_ms.p95:.3g}" if latency else "",
        f"{latency.itl_ms.p95:.3g}" if latency else "",
        f"{quality.kld_mean:.4f}" if quality else "",
        each.reason,
    ]
