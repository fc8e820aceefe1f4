"""The quality to expect before anything is measured: a range per weight format and KV width, wider for small models.

A prior from published tables (plan/data/quality.toml), so never a single number; what decides is a measurement
(`tokenmill eval divergence`, `tokenmill optimize`). Knows nothing of speed or cost.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from tokenmill.plan.question.deployment import Deployment

_SMALL_PARAMETERS = 3e9


@dataclass(frozen=True, slots=True)
class QualityRisk:
    """Percent of a score that may be lost; `high` is what a cautious plan counts with."""

    low: float
    high: float
    reason: str


@cache
def _data() -> dict[str, Any]:
    text = (resources.files("tokenmill.plan") / "data" / "quality.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def quality_risk(deployment: Deployment) -> QualityRisk:
    data = _data()
    stored, chosen = deployment.model.stored_format, deployment.weights.name
    low, high = data["loss"].get(chosen, [0.0, 10.0])
    if chosen == stored:  # already stored in this format: nothing more is lost
        low = high = 0.0
    small = deployment.model.parameters < _SMALL_PARAMETERS
    factor = data["small"] if small else 1.0
    kv_low, kv_high = data["kv"][str(round(8 * deployment.kv_bytes))]
    reason = f"published range for {chosen}" + (", doubled below 3 billion parameters" if small and high else "")
    return QualityRisk(low * factor + kv_low, high * factor + kv_high, reason)
