"""The JSON of `tokenmill optimize --json`: names, savings against both baselines, quality, latency, files.

The fields are a contract with scripts (docs/optimize.md); results.json holds everything. Called by the command line.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from tokenmill.optimize.results import CandidateResult, Latency, Outcome, Saving
from tokenmill.optimize.wording import not_shown

REPORT, RESULTS = "report.html", "results.json"


def summary(outcome: Outcome, out: Path) -> dict[str, Any]:
    chosen, base, today = outcome.chosen, outcome.baseline, outcome.today
    speed, quality = (chosen.speed, chosen.quality) if chosen else (None, None)
    winner = outcome.winner
    return {
        "chosen": chosen.name if chosen else "baseline",
        "cost_reduction": outcome.cost_reduction,
        **_bounds("cost_reduction", outcome.saving),
        "cost_reduction_today": outcome.cost_reduction_today,
        **_bounds("cost_reduction_today", outcome.saving_today),
        "baseline": base.name if base else None,
        "today": today.name if today else None,
        "source_quantized": outcome.source_quantized,
        "made_up": outcome.made_up,
        "quality_loss": None if outcome.quality_off else outcome.quality_loss if chosen else 0.0,
        "quality_loss_high": quality.loss_high if quality else None,
        "kld_mean": quality.kld_mean if quality else None,
        "tasks": [asdict(task) for task in chosen.tasks] if chosen else [],
        "checks": [asdict(check) for check in chosen.checks] if chosen else [],
        "latency": _latency(chosen),
        "baseline_latency": _latency(base),
        "today_latency": _latency(today),
        "objectives": outcome.objectives,
        "objective_met": outcome.objective_met,
        "target_met": outcome.target_met,
        "tied": outcome.tied,
        "unproven": outcome.unproven,
        "cost_margin": outcome.margin,
        "winner": None if winner is None else {"name": winner.name, "engine": winner.engine},
        "rivals": [
            {
                "name": each.name,
                "engine": each.engine,
                "verdict": each.verdict,
                "reason": each.reason,
                "dollars_per_million_output": each.dollars_per_million_output,
            }
            for each in outcome.rivals
        ],
        "reason": outcome.reason,
        "not_shown": not_shown(outcome),
        "state": outcome.state,
        "dollars_per_million_output": chosen.dollars_per_million_output if chosen else None,
        "baseline_dollars_per_million_output": base.dollars_per_million_output if base else None,
        "today_dollars_per_million_output": today.dollars_per_million_output if today else None,
        "output_tok_s": speed.output_tok_s if speed else None,
        "baseline_output_tok_s": base.speed.output_tok_s if base and base.speed else None,
        "seconds": outcome.seconds,
        "results": str(out / RESULTS),
        "report": str(out / REPORT),
        "serve": outcome.launch_lines.get("tokenmill", ""),
    }


def _bounds(name: str, saving: Saving | None) -> dict[str, float | None]:
    return {f"{name}_low": saving.low if saving else None, f"{name}_high": saving.high if saving else None}


def _latency(result: CandidateResult | None) -> dict[str, Any] | None:
    """Percentiles and goodput; the curves are in results.json."""
    latency: Latency | None = result.latency if result else None
    if latency is None:
        return None
    return {key: value for key, value in asdict(latency).items() if not key.endswith("_curve_ms")}
