"""From runs to decisions: cost of a token relative to others, with its error; what a short text already refuses.

Ratios are taken within a cycle (both ran within seconds of each other), so a machine that slows down for a minute slows
both. Pure functions on records. Called by the loop.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from tokenmill.evaluate.gate import default_max_kld
from tokenmill.evaluate.statistics import bootstrap_interval
from tokenmill.optimize.results import Latency, Quality, Run, Speed

SURE = 3.3  # standard errors beyond which a difference is taken as real: decisions are many and made as data come in
_USUAL_NOISE = 0.04  # of the logarithm of a ratio of two runs, before any was repeated
_LEAST_NOISE = 0.005
_PRIOR_REPEATS = 4  # that the usual noise counts as: two repeats that agree by luck prove nothing
_OUTLIER = 5.0  # robust standard deviations from the median
_SHORT_KLD_MARGIN = 1.5  # a mean divergence this many times the limit rules a candidate out
_SAME_GOODPUT = 0.05  # goodputs this near are limited by the arrivals, not by the candidates


@dataclass(frozen=True, slots=True)
class Limits:
    """What a candidate may lose. `kld`: mean divergence; `task_loss`: accuracy of any task."""

    quality_loss: float = 0.01
    kld: float | None = None
    task_loss: float = 0.02


@dataclass(frozen=True, slots=True)
class CostEstimate:
    """Logarithm of a cost ratio and its standard error."""

    log_cost: float
    error: float

    @property
    def low(self) -> float:
        return self.log_cost - SURE * self.error

    @property
    def high(self) -> float:
        return self.log_cost + SURE * self.error

    def minus(self, other: CostEstimate) -> CostEstimate:
        return CostEstimate(self.log_cost - other.log_cost, math.hypot(self.error, other.error))

    def plus(self, other: CostEstimate) -> CostEstimate:
        return CostEstimate(self.log_cost + other.log_cost, math.hypot(self.error, other.error))


def cost_ratios(baseline: Sequence[Run], candidate: Sequence[Run]) -> np.ndarray:
    """Per cycle: cost of a token over the baseline's, which is the inverse of the throughputs."""
    assert len(baseline) == len(candidate) > 0, "runs that are not paired"
    return np.array([b.total_tok_s / c.total_tok_s for b, c in zip(baseline, candidate, strict=True)])


def compare_speed(baseline: Sequence[Run], candidate: Sequence[Run]) -> Speed:
    ratios = cost_ratios(baseline, candidate)
    low, high = bootstrap_interval(ratios, statistic=np.median)
    return Speed(
        cost_ratio=float(np.median(ratios)),
        low=low,
        high=high,
        runs=len(ratios),
        output_tok_s=median(run.output_tok_s for run in candidate),
        total_tok_s=median(run.total_tok_s for run in candidate),
        ttft_ms=median(run.ttft_ms for run in candidate),
        tpot_ms=median(run.tpot_ms for run in candidate),
        memory_bytes=candidate[0].memory_bytes,
    )


def estimate_cost(ratios: Sequence[float], noise: float) -> CostEstimate:
    """From the ratios of some cycles; `noise` is that of one."""
    kept = _without_outliers(np.log(ratios))
    return CostEstimate(float(kept.mean()), noise / math.sqrt(len(kept)))


def ratio_noise(series: Iterable[Sequence[float]]) -> float:
    """Standard deviation of the logarithm of one ratio, pooled over candidates that were timed more than once."""
    squares, freedom = 0.0, 0
    for ratios in series:
        if len(ratios) > 1:
            kept = _without_outliers(np.log(ratios))
            squares += float(kept.var()) * len(kept)
            freedom += len(kept) - 1
    return max(_LEAST_NOISE, math.sqrt((squares + _PRIOR_REPEATS * _USUAL_NOISE**2) / (freedom + _PRIOR_REPEATS)))


def _without_outliers(values: np.ndarray) -> np.ndarray:
    if len(values) < 5:
        return values
    distance = np.abs(values - np.median(values))
    spread = 1.4826 * float(np.median(distance))
    return values[distance <= _OUTLIER * spread] if spread else values


def with_goodput(speed: Speed, baseline: Latency | None, own: Latency | None) -> Speed:
    """The cost of a token within the objectives, where goodputs differ; else the replay did not load the device, and
    throughput decides."""
    if baseline is None or own is None or own.goodput_tok_s <= 0 or baseline.goodput_tok_s <= 0:
        return speed
    ratio = baseline.goodput_tok_s / own.goodput_tok_s
    if abs(math.log(ratio)) <= _SAME_GOODPUT:
        return speed
    scale = ratio / speed.cost_ratio
    return Speed(
        cost_ratio=ratio,
        low=speed.low * scale,
        high=speed.high * scale,
        runs=speed.runs,
        output_tok_s=own.goodput_tok_s,
        total_tok_s=speed.total_tok_s,
        ttft_ms=own.ttft_ms.p50,
        tpot_ms=own.itl_ms.p50,
        memory_bytes=speed.memory_bytes,
    )


def short_text_kld_limit(limits: Limits) -> float:
    return _SHORT_KLD_MARGIN * (default_max_kld(limits.quality_loss) if limits.kld is None else limits.kld)


def short_text_refusal(quality: Quality, limits: Limits) -> str:
    """Why the short text already rules the candidate out; empty if it does not.

    On text that the model itself might have written, the mean divergence is the logarithm of the perplexity ratio, with
    far less noise than the ratio itself.
    """
    limit = limits.quality_loss
    if quality.nan_count:
        return f"{quality.nan_count} of {quality.tokens} tokens have logits that are NaN or infinite"
    if quality.loss_low > limit:
        return f"perplexity grows by {quality.loss:.2%} (at least {quality.loss_low:.2%}) on the short text"
    most = short_text_kld_limit(limits)
    if quality.kld_mean > most:
        return f"mean divergence {quality.kld_mean:.4f} on the short text, more than {most:.3g}"
    return ""
