"""The order of the report: headline, tiles, both baselines, latency, quality, what was tried, how to start it.

The sections are made by the other modules of this folder. Knows nothing of files.
"""

from __future__ import annotations

from html import escape

from tokenmill.optimize.report.baselines import baseline_sections, rival_section
from tokenmill.optimize.report.candidates import candidate_sections
from tokenmill.optimize.report.deployment import deployment_sections
from tokenmill.optimize.report.latency import latency_section
from tokenmill.optimize.report.quality import quality_section
from tokenmill.optimize.results import Outcome, Saving
from tokenmill.optimize.wording import headline, interval, loss_words, not_shown, share
from tokenmill.report.page import Tile, bullets, grid, paragraphs, render_page, section, tiles


def render_report(outcome: Outcome) -> str:
    sections = [
        section("Why", paragraphs((outcome.reason,)), wide=True),
        *baseline_sections(outcome),
        latency_section(outcome),
        quality_section(outcome),
        rival_section(outcome),
        *candidate_sections(outcome),
        section("What this does not show", bullets(not_shown(outcome)), wide=True),
        *deployment_sections(outcome),
    ]
    subtitle = f"{outcome.machine}; {outcome.workload_words}; ${outcome.price:.3f} an hour, {outcome.price_basis}"
    footer = (
        "Costs are medians of ratios to baseline runs that alternated with the candidate's; intervals are 95 %. Loss "
        "is the ratio of perplexities minus one; a candidate passes if it is within the limit with 95 % confidence."
    )
    body = [_chosen(outcome), grid(sections)]
    return render_page(f"{outcome.model}: {headline(outcome)}", subtitle, body, badge=_badge(outcome), footer=footer)


def _badge(outcome: Outcome) -> tuple[str, bool]:
    if outcome.state != "complete":
        return f"this run is {outcome.state}", False
    target = f"target of {-outcome.target_cost:.0%} {'met' if outcome.target_met else 'not met'}"
    if outcome.objective_met is None:
        return target, outcome.target_met
    latency = "latency objectives met" if outcome.objective_met else "latency objectives missed"
    return f"{target}, {latency}", outcome.target_met and outcome.objective_met


def _chosen(outcome: Outcome) -> str:
    chosen = outcome.chosen
    if chosen is None:
        return ""
    engine = "" if outcome.winner in (None, chosen) else " (another engine is cheaper on this machine, see below)"
    shown = [*_saving_tiles(outcome), *_price_tiles(outcome), *_quality_tiles(outcome), *_latency_tiles(outcome)]
    return f'<p>Chosen: <b id="chosen">{escape(chosen.name)}</b>{escape(engine)}</p>{tiles(shown)}'


def _saving_tiles(outcome: Outcome) -> list[Tile]:
    pairs = ((outcome.saving_today, "as served today"), (outcome.saving, "the unquantized weights"))
    return [_saving_tile(saving, name) for saving, name in pairs if saving is not None]


def _saving_tile(saving: Saving, reference: str) -> Tile:
    word = "saved against" if saving.share >= 0 else "more than"
    tone = "good" if saving.share > 0 else "bad"
    return Tile(share(abs(saving.share)), f"{word} {reference} ({interval(saving)})", tone)


def _price_tiles(outcome: Outcome) -> list[Tile]:
    """Price and memory of the chosen candidate, beside the baseline's."""
    chosen, base = outcome.chosen, outcome.baseline
    found = []
    if chosen and chosen.dollars_per_million_output is not None:
        before = base.dollars_per_million_output if base else None
        beside = f", unquantized ${before:.3g}" if before is not None else ""
        within = " within the objectives" if outcome.objectives else ""
        found.append(Tile(f"${chosen.dollars_per_million_output:.3g}", f"per million output tokens{within}{beside}"))
    if chosen and chosen.speed and base and base.speed and chosen.speed.memory_bytes:
        before_mb, after_mb = base.speed.memory_bytes / 1e6, chosen.speed.memory_bytes / 1e6
        found.append(Tile(f"{after_mb:,.0f} MB", f"memory, unquantized {before_mb:,.0f} MB"))
    return found


def _quality_tiles(outcome: Outcome) -> list[Tile]:
    if outcome.quality_off:
        return [Tile("not measured", "quality (--quality off)", "bad")]
    quality = outcome.chosen.quality if outcome.chosen else None
    if quality is None:
        return []
    return [Tile(f"{quality.loss:+.2%}", f"perplexity {loss_words(quality)}; limit {outcome.max_quality_loss:.1%}")]


def _latency_tiles(outcome: Outcome) -> list[Tile]:
    chosen, base = outcome.chosen, outcome.baseline
    if chosen is None or base is None:
        return []
    if chosen.latency is not None:
        mine, theirs = chosen.latency, base.latency
        found = []
        for name, p95, before in (
            ("time to first token, p95", mine.ttft_ms.p95, theirs.ttft_ms.p95 if theirs else None),
            ("time between tokens, p95", mine.itl_ms.p95, theirs.itl_ms.p95 if theirs else None),
        ):
            beside = f"; unquantized {before:.3g} ms" if before is not None else ""
            found.append(Tile(f"{p95:.3g} ms", f"{name}{beside}", "good" if mine.objective_met else "bad"))
        return found
    if chosen.speed is None or base.speed is None:
        return []
    return [
        Tile(f"{chosen.speed.ttft_ms:.3g} ms", f"time to first token, median; unquantized {base.speed.ttft_ms:.3g} ms"),
        Tile(f"{chosen.speed.tpot_ms:.3g} ms", f"time per token, median; unquantized {base.speed.tpot_ms:.3g} ms"),
    ]
