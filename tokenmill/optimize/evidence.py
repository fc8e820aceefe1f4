"""From runs to decisions: cost of a token relative to the baseline, ties, who advances, who wins.

Ratios are taken within a cycle (baseline and candidate ran within seconds of each other), so a machine that slows down
for a minute slows both. Medians, with a bootstrap over cycles. Pure functions on records. Called by the loop.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

import numpy as np

from tokenmill.evaluate.statistics import bootstrap_interval
from tokenmill.optimize.results import Run, Speed

TIE_MARGIN = 0.02  # costs that differ by less count as equal
_NEAR_CUT = 1.05  # uncertainty of one short run: candidates this near the cut advance


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


def survivors(costs: Mapping[str, float], at_least: int = 2) -> list[str]:
    """Successive halving: the cheaper half, at least `at_least`, and all within the noise of the cut."""
    ordered = sorted(costs, key=lambda name: (costs[name], name))
    if not ordered:
        return []
    keep = max(at_least, -(-len(ordered) // 2))
    cut = costs[ordered[min(keep, len(ordered)) - 1]]
    return [name for name in ordered if costs[name] <= cut * _NEAR_CUT]


def choose(runs: Mapping[str, Sequence[Run]], divergence: Mapping[str, float]) -> tuple[str, list[str]]:
    """(winner, those statistically tied with the cheapest, winner included) of contenders that ran in the same cycles.

    Among the tied the better quality wins, then the name: the same data always gives the same choice. Quality is the
    mean divergence from the baseline: unlike the perplexity ratio it cannot come out better by luck.
    """
    cheapest = min(runs, key=lambda name: (-median(run.total_tok_s for run in runs[name]), name))
    tied = [name for name in runs if name == cheapest or is_tied(runs[cheapest], runs[name])]
    winner = min(tied, key=lambda name: (divergence[name], name))
    return winner, sorted(tied)


def is_tied(cheapest: Sequence[Run], other: Sequence[Run]) -> bool:
    """Whether `other` may cost no more than the cheapest, up to the margin, by these runs."""
    low, _ = bootstrap_interval(cost_ratios(cheapest, other), statistic=np.median)
    return low <= 1 + TIE_MARGIN
