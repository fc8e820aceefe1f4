"""The HTML report of a fine-tuning run: the loss curves, and with a teacher what came back. Called by the job."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenmill.report.charts import Curve, curves
from tokenmill.report.page import Tile, render_page, section, table, tiles, write_page

_POINTS = 200


def write_report(path: Path, report: Mapping[str, Any]) -> None:
    write_page(path, render(report), "--out")


def render(report: Mapping[str, Any]) -> str:
    repair = report["repair"]
    before, after = report["loss_before"], report["loss_after"]
    measured = "divergence" if repair else "loss"
    shown = [
        Tile(f"{before:.3f}", f"held-out {measured} before, nats a token"),
        Tile(f"{after:.3f}", f"held-out {measured} after", "good" if after < before else "bad"),
        Tile(f"{report['parameters'] / 1e6:.2f} M", f"trained parameters, rank {report['rank']}"),
        Tile(f"{report['tokens']:,}", f"tokens in {report['steps']} steps"),
    ]
    body = [tiles(shown), section("Loss", _chart(report, measured), _note(repair), wide=True)]
    if repair:
        body.append(
            section("What came back", _repair(repair), "On held-out text; the teacher is the unquantized model.")
        )
    body.append(section("Run", table(("", ""), _facts(report))))
    badge = ("held-out loss fell" if after < before else "held-out loss did not fall", after < before)
    return render_page(f"Fine-tuning {report['model']}", report["path"], body, badge=badge)


def _chart(report: Mapping[str, Any], measured: str) -> str:
    steps, losses = _thinned(report["losses"])
    held = report["held_out"]
    lines = [
        Curve("training", steps, losses, 0),
        Curve("held out", [step for step, _ in held], [loss for _, loss in held], 1),
    ]
    return curves("loss", f"{measured} by step", lines, "step", f"{measured}, nats a token")


def _thinned(losses: Sequence[float]) -> tuple[list[float], list[float]]:
    """At most _POINTS points, each the mean of its steps."""
    size = max(1, math.ceil(len(losses) / _POINTS))
    pieces = [losses[begin : begin + size] for begin in range(0, len(losses), size)]
    return [number * size + len(each) / 2 for number, each in enumerate(pieces)], [sum(p) / len(p) for p in pieces]


def _note(repair: Mapping[str, Any] | None) -> str:
    return "The loss is the divergence from the teacher." if repair else ""


def _repair(repair: Mapping[str, Any]) -> str:
    rows = [
        ("teacher", math.exp(repair["teacher_loss"]), 0.0, ""),
        ("base", math.exp(repair["base_loss"]), repair["base_divergence"], ""),
        (
            "base with the adapter",
            math.exp(repair["tuned_loss"]),
            repair["tuned_divergence"],
            f"{repair['loss_won_back']:.0%} of the loss, {repair['divergence_won_back']:.0%} of the divergence",
        ),
    ]
    return table(("", "perplexity", "divergence, nats", "won back"), rows)


def _facts(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [
        ("method", report["method"]),
        ("modules", str(report["modules"])),
        ("rows", f"{report['rows']} of {report['length']} tokens"),
        ("held out", f"{report['held_out_tokens']} tokens"),
        ("took", f"{report['seconds']:.0f} s on {report['device']}"),
    ]
