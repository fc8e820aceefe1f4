"""Latency objectives as the user states them: which metric, which percentile, which limit. Pure values.

Owns the notation (`--ttft p95=500ms`) and its words; replay.py owns what is measured against them. Called by the
command line, the loop and the report.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from tokenmill.errors import UserError

METRICS = ("ttft", "itl", "e2e")
_DEFAULT_PERCENTILE = 95.0
_UNITS_MS = {"us": 1e-3, "ms": 1.0, "s": 1e3, "m": 6e4}
_NOTATION = re.compile(
    r"\s*(?:p(?P<percentile>\d+(?:\.\d+)?)\s*=\s*)?(?P<value>\d*\.?\d+)\s*(?P<unit>us|ms|s|m)\s*", re.I
)


@dataclass(frozen=True, slots=True)
class Objective:
    """`percentile` percent of the requests (of the gaps between tokens, for `itl`) stay within `limit_ms`."""

    metric: str  # "ttft" | "itl" | "e2e"
    percentile: float
    limit_ms: float

    @property
    def words(self) -> str:
        return f"{self.metric} p{self.percentile:g}={milliseconds(self.limit_ms)}"


@dataclass(frozen=True, slots=True)
class Objectives:
    """All of them must be met. Empty: throughput decides."""

    items: tuple[Objective, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.items)

    @property
    def words(self) -> str:
        """As the user would state them, such as "ttft p95=500ms, itl p95=40ms"; empty without any."""
        return ", ".join(each.words for each in self.items)

    @property
    def bound_the_queue(self) -> bool:
        """Whether a server that meets them cannot let requests wait for longer and longer."""
        return any(each.metric != "itl" for each in self.items)

    @property
    def longest_wait_s(self) -> float:
        """That they allow before the first token; 0: they do not say."""
        return max((each.limit_ms / 1000 for each in self.items if each.metric == "ttft"), default=0.0)

    @property
    def shortest_gap_s(self) -> float:
        """That they ask for between tokens; 0: they do not say."""
        return min((each.limit_ms / 1000 for each in self.items if each.metric == "itl"), default=0.0)

    @staticmethod
    def parse(ttft: Sequence[str], itl: Sequence[str], e2e: Sequence[str] = ()) -> Objectives:
        """From the values of the flags: "p95=500ms", "0.5s" or "40ms" (the 95th percentile)."""
        stated = [(name, text) for name, texts in zip(METRICS, (ttft, itl, e2e), strict=True) for text in texts]
        items = tuple(dict.fromkeys(_parse(name, text) for name, text in stated))
        seen: set[tuple[str, float]] = set()
        for each in items:
            if (each.metric, each.percentile) in seen:
                raise UserError(f"--{each.metric} p{each.percentile:g} is given twice", "keep one of them")
            seen.add((each.metric, each.percentile))
        return Objectives(items)


def milliseconds(value: float) -> str:
    """A duration for people: 40ms, 1.5s."""
    return f"{value / 1000:g}s" if value >= 1000 else f"{value:g}ms"


def _parse(metric: str, text: str) -> Objective:
    match = _NOTATION.fullmatch(text)
    if match is None:
        raise UserError(f"--{metric} '{text}' is not a limit", f"write it like --{metric} p95=500ms or --{metric} 0.5s")
    percentile = float(match[1] or _DEFAULT_PERCENTILE)
    limit = float(match[2]) * _UNITS_MS[match[3].lower()]
    if not 0 < percentile <= 100:
        raise UserError(f"--{metric} '{text}' asks for percentile {percentile:g}", "give more than 0, at most 100")
    if not 0 < limit < math.inf:
        raise UserError(f"--{metric} '{text}' allows no time", "give more than 0 ms")
    return Objective(metric, percentile, limit)
