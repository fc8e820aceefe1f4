"""The table of scores that intervals are made of: plan/data/scores.json, written from measured rows.

P10 and P90 of measured over predicted for each kind of arrivals, metric, engine and kind of model, saturated rows
included. Called by `python -m tokenmill.plan.validate FILE --write`; a test demands that the file is current.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from importlib import resources
from pathlib import Path
from statistics import fmean
from typing import Any

from tokenmill.plan.validate.poisson_runs import ScoredRun
from tokenmill.plan.validate.scores import Scored

_FEWEST = 5  # rows, below which nothing is made of them
Ratios = dict[str, list[float]]


def score_table(scored: Sequence[Scored], runs: Sequence[ScoredRun]) -> dict[str, Any]:
    lockstep = {
        "tpot": _ratios((one.row.deployment.engine, one.kind, 1 / (1 + one.tpot_error)) for one in scored),
        "ttft": _ratios((one.row.deployment.engine, one.kind, 1 / (1 + one.ttft_error)) for one in scored),
    }
    poisson = {
        "tpot": _ratios((run.engine, run.kind, run.itl_ratio) for run in runs),
        "ttft": _ratios((run.engine, run.kind, run.ttft_ratio) for run in runs),
    }
    return {
        "about": "P10 and P90 of measured over predicted; python -m tokenmill.plan.validate FILE --write",
        "lockstep": {metric: _rows(ratios) for metric, ratios in lockstep.items()},
        "poisson": {metric: _rows(ratios) for metric, ratios in poisson.items()},
    }


def _ratios(rows: Iterable[tuple[str, str, float]]) -> Ratios:
    groups: Ratios = {}
    for engine, kind, ratio in rows:
        for name in (f"{engine}-{kind}", f"any-{kind}", "any"):
            groups.setdefault(name, []).append(ratio)
    return groups


def _rows(groups: Ratios) -> dict[str, dict[str, float]]:
    found = {}
    for name, ratios in sorted(groups.items()):
        if len(ratios) < _FEWEST:
            continue
        ratios = sorted(ratios)
        tenth = len(ratios) // 10
        found[name] = {
            "low": round(ratios[tenth], 3),
            "high": round(ratios[-1 - tenth], 3),
            "mean_error": round(fmean(abs(1 / ratio - 1) for ratio in ratios), 3),
            "rows": len(ratios),
        }
    return found


def scores_path() -> Path:
    return Path(str(resources.files("tokenmill.plan") / "data" / "scores.json"))


def write_scores(table: dict[str, Any]) -> Path:
    path = scores_path()
    path.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    return path
