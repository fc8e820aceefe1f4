"""Measured runs of real engines under Poisson arrivals, and the planning call's answer to each.

Owns the table plan/validate/data/poisson_runs.csv (written by benchmarks/poisson_runs.py, one line per run with date
and command) and its score. A run on a machine of ours names the calibration that was taken with it. Called by
`tokenmill plan --validate-poisson` and score_table.py.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from statistics import fmean
from typing import Any

from tokenmill.errors import UserError
from tokenmill.hardware.catalog import Device, find_device
from tokenmill.hardware.weight_formats import find_format
from tokenmill.plan.cost.closed_loop import Load
from tokenmill.plan.cost.performance import estimate
from tokenmill.plan.cost.this_machine import load_calibration
from tokenmill.plan.question.deployment import Deployment
from tokenmill.plan.question.engines import default_limits
from tokenmill.plan.question.model_names import describe_for_planning

COLUMNS = (
    *("engine", "engine_version", "device", "calibration", "model", "dtype", "rate", "input_tokens", "output_tokens"),
    *("concurrency", "output_tok_s", "ttft_p50_ms", "ttft_p95_ms", "itl_p50_ms", "itl_p95_ms", "date", "command"),
)


@dataclass(frozen=True, slots=True)
class ScoredRun:
    engine: str
    device: str
    model: str
    kind: str  # dense or moe
    rate: float
    ttft_ratio: float  # measured over predicted
    itl_ratio: float
    throughput_ratio: float


def runs_path() -> Path:
    return Path(str(resources.files("tokenmill.plan.validate") / "data" / "poisson_runs.csv"))


def score_runs(path: Path | None = None) -> list[ScoredRun]:
    path = path or runs_path()
    try:
        with path.open(encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            missing = [name for name in COLUMNS if name not in (reader.fieldnames or ())]
            if missing:
                raise UserError(f"{path} lacks the columns {', '.join(missing)}", "see benchmarks/poisson_runs.py")
            rows = list(reader)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error}", "run benchmarks/poisson_runs.py") from None
    found = []
    for line, row in enumerate(rows, start=2):
        try:
            found.append(_scored(row, path.parent))
        except ValueError as error:
            raise UserError(f"{path}, line {line}: {error}", "correct the number") from None
    return found


def summarize_runs(runs: list[ScoredRun]) -> dict[str, Any]:
    """Mean absolute errors of predicted over measured, over all runs and by engine and device."""
    groups: dict[str, list[ScoredRun]] = {"all runs": runs} if runs else {}
    for run in runs:
        groups.setdefault(f"{run.engine} on {run.device}", []).append(run)
    return {
        name: {
            "runs": len(group),
            "ttft_mape": fmean(abs(1 / run.ttft_ratio - 1) for run in group),
            "itl_mape": fmean(abs(1 / run.itl_ratio - 1) for run in group),
            "throughput_mape": fmean(abs(1 / run.throughput_ratio - 1) for run in group),
        }
        for name, group in groups.items()
    }


def _scored(row: dict[str, str], folder: Path) -> ScoredRun:
    model, device = describe_for_planning(row["model"]), _device(row, folder)
    limits = default_limits(row["engine"], device.kind)
    weights = find_format(row["dtype"])
    deployment = Deployment(
        model=model,
        device=device,
        weights=weights,
        engine=row["engine"],
        batch_tokens=limits.tokens,
        max_sequences=limits.sequences,
    )
    users = max(1, round(float(row["concurrency"])))
    found = estimate(deployment, Load(int(row["input_tokens"]), int(row["output_tokens"]), users))
    return ScoredRun(
        engine=row["engine"],
        device=row["device"],
        model=model.name,
        kind="moe" if model.is_moe else "dense",
        rate=float(row["rate"]),
        ttft_ratio=float(row["ttft_p50_ms"]) / found.ttft.value,
        itl_ratio=float(row["itl_p50_ms"]) / found.tpot.value,
        throughput_ratio=float(row["output_tok_s"]) / found.output_rate.value,
    )


def _device(row: dict[str, str], folder: Path) -> Device:
    if not row["calibration"]:
        return find_device(row["device"])
    calibration = load_calibration(folder / row["calibration"])
    if calibration is None:
        raise UserError(f"{row['calibration']} is not a calibration", "run benchmarks/poisson_runs.py again")
    return calibration.device()
