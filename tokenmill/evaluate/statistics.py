"""Error bars and paired comparisons: standard errors, percentiles, the bootstrap, McNemar's test.

Pure functions on arrays; seeded, so that a report can be repeated. Called by every evaluator.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np

_RESAMPLES_AT_ONCE = 1 << 22  # indices drawn at a time


@dataclass(frozen=True, slots=True)
class Estimate:
    value: float
    stderr: float

    def upper(self, confidence: float) -> float:
        """One-sided: with this confidence the true value is below."""
        return self.value + NormalDist().inv_cdf(confidence) * self.stderr

    def lower(self, confidence: float) -> float:
        """One-sided: with this confidence the true value is above."""
        return self.value - NormalDist().inv_cdf(confidence) * self.stderr

    def interval(self, confidence: float = 0.95) -> tuple[float, float]:
        half = NormalDist().inv_cdf(0.5 + confidence / 2) * self.stderr
        return self.value - half, self.value + half


def mean(values: Sequence[float] | np.ndarray) -> Estimate:
    """The mean and its standard error, from the variance with n - 1."""
    array = np.asarray(values, dtype=np.float64)
    if array.size == 0:
        return Estimate(math.nan, math.nan)
    return Estimate(float(array.mean()), float(array.std(ddof=1) / math.sqrt(array.size)) if array.size > 1 else 0.0)


def exponential_of_mean(values: np.ndarray) -> Estimate:
    """exp of the mean, by the delta method: perplexity from losses, a ratio of perplexities from their differences."""
    average = mean(values)
    with np.errstate(over="ignore"):
        value = float(np.exp(average.value))
    return Estimate(value, value * average.stderr)


@dataclass(frozen=True, slots=True)
class PairedDifference:
    """Second minus first on the same items."""

    difference: float
    low: float  # of the bootstrap interval
    high: float
    confidence: float
    p_value: float | None  # McNemar, exact; None where items are not right or wrong
    n: int


def compare_paired(
    first: Sequence[float] | np.ndarray,
    second: Sequence[float] | np.ndarray,
    confidence: float = 0.95,
    resamples: int = 10_000,
    seed: int = 0,
) -> PairedDifference:
    """Percentile bootstrap over items of the mean difference second - first."""
    a, b = np.asarray(first, dtype=np.float64), np.asarray(second, dtype=np.float64)
    assert a.shape == b.shape, "results that are not paired"
    low, high = bootstrap_interval(b - a, confidence, resamples, seed)
    binary = bool(np.isin(a, (0.0, 1.0)).all() and np.isin(b, (0.0, 1.0)).all())
    p_value = mcnemar_exact(int(((a == 1) & (b == 0)).sum()), int(((a == 0) & (b == 1)).sum())) if binary else None
    return PairedDifference(float((b - a).mean()), low, high, confidence, p_value, len(a))


def bootstrap_interval(
    values: np.ndarray,
    confidence: float = 0.95,
    resamples: int = 10_000,
    seed: int = 0,
    statistic: Callable[..., Any] = np.mean,
) -> tuple[float, float]:
    """Percentile interval of the mean (or another `statistic` that takes an `axis`), resampling items."""
    assert len(values) > 0
    generator = np.random.default_rng(seed)
    means = np.empty(resamples)
    step = max(1, _RESAMPLES_AT_ONCE // len(values))
    for begin in range(0, resamples, step):
        count = min(step, resamples - begin)
        drawn = values[generator.integers(0, len(values), (count, len(values)))]
        means[begin : begin + count] = statistic(drawn, axis=1)
    low, high = np.quantile(means, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)


def mcnemar_exact(only_first: int, only_second: int) -> float:
    """Two-sided p that two methods are right equally often, from the items on which exactly one of them is."""
    discordant = only_first + only_second
    if discordant == 0:
        return 1.0
    fewer = min(only_first, only_second)
    tail = sum(math.comb(discordant, k) for k in range(fewer + 1))
    return min(1.0, 2 * tail / 2**discordant)
