"""How far predictions were from measurements, by kind: the factors that every printed interval is made of.

Reads plan/data/scores.json, which `python -m tokenmill.plan.validate FILE --write` makes from the measured rows:
arrivals (lockstep, poisson), metric, engine and kind of model, each with P10 and P90 of measured over predicted.
Computes no times. Called by performance.py.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

_UNMEASURED = 1.5  # widens both sides where nothing like it was measured


@dataclass(frozen=True, slots=True)
class Interval:
    low: float  # factors of the predicted value
    high: float
    basis: str


@cache
def scores() -> dict[str, Any]:
    text = (resources.files("tokenmill.plan") / "data" / "scores.json").read_text(encoding="utf-8")
    found: dict[str, Any] = json.loads(text)
    return found


def interval(arrivals: str, metric: str, engine: str, kind: str, extrapolated: bool = False) -> Interval:
    """`kind`: dense, moe or split. A trace has no rows of its own: the score is that of Poisson arrivals, widened.
    So is a kind of model or an engine that was never measured under these arrivals, and the lock-step score where no
    run under the arrivals asked for was measured at all."""
    scored_as = "poisson" if arrivals == "trace" else arrivals
    if not scores()[scored_as][metric]:
        scored_as = "lockstep"
    table = scores()[scored_as][metric]
    known = [name for name in (f"{engine}-{kind}", f"any-{kind}", "any") if name in table]
    row = table[known[0]]
    low, high = float(row["low"]), float(row["high"])
    basis = f"interval: {scored_as} score of {row['rows']} measured rows ({known[0]})"
    is_foreign = scored_as == "poisson" and not any(name.startswith(f"{engine}-") for name in table)
    unmeasured = [
        *([f"no run under {arrivals} arrivals is measured"] if scored_as != arrivals else []),
        *(["this kind of model is not measured"] if known[0] == "any" else []),
        *([f"{engine} is not measured under these arrivals"] if is_foreign else []),
        *(["this device and engine are not measured"] if extrapolated else []),
    ]
    if unmeasured:
        low, high = low / _UNMEASURED ** len(unmeasured), high * _UNMEASURED ** len(unmeasured)
        basis += f", widened: {'; '.join(unmeasured)}"
    return Interval(min(low, 1.0), max(high, 1.0), basis)
