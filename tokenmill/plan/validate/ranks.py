"""Rank correlation, for scores of predictions whose order matters more than their size."""

from __future__ import annotations

from collections.abc import Sequence


def spearman(first: Sequence[float], second: Sequence[float]) -> float:
    """Rank correlation; equal values share their mean rank."""
    if len(first) < 2:
        return 0.0
    a, b = _ranks(first), _ranks(second)
    mean = (len(a) + 1) / 2
    covariance = sum((x - mean) * (y - mean) for x, y in zip(a, b, strict=True))
    scale = (sum((x - mean) ** 2 for x in a) * sum((y - mean) ** 2 for y in b)) ** 0.5
    return covariance / scale if scale else 0.0


def _ranks(values: Sequence[float]) -> list[float]:
    order = sorted(range(len(values)), key=values.__getitem__)
    ranks = [0.0] * len(values)
    start = 0
    while start < len(order):
        end = start
        while end + 1 < len(order) and values[order[end + 1]] == values[order[start]]:
            end += 1
        for place in range(start, end + 1):
            ranks[order[place]] = (start + end) / 2 + 1
        start = end + 1
    return ranks
