"""Serving engines by name: which the planner knows, and the batch limits they start with.

The names are those of plan/data/engines.toml; what an engine costs is cost/engine_costs.py's. Knows nothing of time.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from tokenmill.errors import unknown_name
from tokenmill.hardware.catalog import Device
from tokenmill.resolution import DEVICE_DEFAULTS


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """What one step holds at most."""

    tokens: int
    sequences: int


@cache
def engine_tables() -> Mapping[str, dict[str, Any]]:
    """plan/data/engines.toml: constants by engine, by chip generation, and shares of the roofs."""
    text = (resources.files("tokenmill.plan") / "data" / "engines.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def engine_names() -> list[str]:
    return list(engine_tables()["engine"])


def check_engine(engine: str) -> None:
    if engine not in engine_tables()["engine"]:
        raise unknown_name("engine", engine, engine_names())


def default_engine(device: Device) -> str:
    if device.measured_shares:
        return "tokenmill"
    return "vllm" if device.kind in ("gpu", "tpu") else "llama.cpp"


def default_limits(engine: str, kind: str = "gpu") -> BatchLimits:
    """The engine's own defaults on this kind of device; the large GPU engines agree on theirs."""
    if engine == "tokenmill":
        defaults = DEVICE_DEFAULTS["cuda" if kind == "gpu" else "cpu"]
        return BatchLimits(defaults.batch_tokens, defaults.concurrency)
    return BatchLimits(8192, 256)
