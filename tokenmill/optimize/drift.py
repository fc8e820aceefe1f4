"""Whether traffic has changed: one window of a traffic log against another, by lengths, rate, prefixes and cache hits.

Lengths are compared by the population stability index over the deciles of the older window, less what two samples of
one distribution differ by; rates and shares by their change. Windows are small records that JSON holds. Knows nothing
of what follows from a drift; called by watch.py.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from math import log

import numpy as np

from tokenmill.bench.traffic_log import LoggedRequest
from tokenmill.errors import UserError
from tokenmill.serve.traffic_log_format import BLOCK_TOKENS

_BINS = 10
_FLOOR = 0.5  # requests that an empty bin counts as: its logarithm must exist


@dataclass(frozen=True, slots=True)
class Thresholds:
    """From which change on traffic counts as different."""

    stability_index: float = 0.2  # of lengths; the usual reading is 0.1 little, 0.25 much
    rate: float = 0.3  # relative change of requests per second
    share: float = 0.1  # change of the shares of shared and cached prompt tokens
    min_requests: int = 100  # of a window; fewer say nothing


@dataclass(frozen=True, slots=True)
class Window:
    """What is kept of a stretch of traffic."""

    since_unix: float
    until_unix: float
    requests: int
    requests_s: float
    prompt_lengths: tuple[int, ...]  # a sample, sorted
    output_lengths: tuple[int, ...]
    shared_prefix: float  # share of prompt tokens in blocks that an earlier request of the window had too
    cached: float  # share of prompt tokens that came from the prefix cache


@dataclass(frozen=True, slots=True)
class Drift:
    what: str
    score: float
    threshold: float
    words: str

    @property
    def is_large(self) -> bool:
        return self.score > self.threshold


def window_of(requests: Sequence[LoggedRequest], max_lengths: int = 1000) -> Window:
    if not requests:
        raise UserError("there is no traffic in this window", "serve with --traffic-log, or take a longer window")
    since, until = (edge(each.arrival_unix for each in requests) for edge in (min, max))
    prompt_tokens = max(1, sum(each.prompt_tokens for each in requests))
    return Window(
        since_unix=since,
        until_unix=until,
        requests=len(requests),
        requests_s=(len(requests) - 1) / max(1e-3, until - since),
        prompt_lengths=_sample([each.prompt_tokens for each in requests], max_lengths),
        output_lengths=_sample([each.output_tokens for each in requests if each.output_tokens], max_lengths),
        shared_prefix=_shared_tokens(requests) / prompt_tokens,
        cached=sum(each.cached_tokens for each in requests) / prompt_tokens,
    )


def drifts(before: Window, now: Window, thresholds: Thresholds = Thresholds()) -> list[Drift]:
    """Every figure with its change, the largest first. Too small a window shows none."""
    if min(before.requests, now.requests) < thresholds.min_requests:
        return []
    found = [
        _length_drift("prompt length", before.prompt_lengths, now.prompt_lengths, thresholds),
        _length_drift("answer length", before.output_lengths, now.output_lengths, thresholds),
        Drift(
            "rate",
            abs(log(max(1e-9, now.requests_s) / max(1e-9, before.requests_s))),
            log(1 + thresholds.rate) + _rate_noise(before.requests, now.requests),
            f"{before.requests_s:.3g} -> {now.requests_s:.3g} requests/s",
        ),
        _share_drift("shared prefixes", before.shared_prefix, now.shared_prefix, thresholds),
        _share_drift("cache hits", before.cached, now.cached, thresholds),
    ]
    return sorted(found, key=lambda each: each.score / each.threshold, reverse=True)


def stability_index(before: Sequence[int], now: Sequence[int]) -> float:
    """Population stability index over the deciles of `before`: sum of (q - p) ln(q / p)."""
    edges = sorted(set(np.percentile(before, np.linspace(0, 100, _BINS + 1)[1:-1]).tolist()))
    old, new = (_shares(values, edges) for values in (before, now))
    return sum((q - p) * log(q / p) for p, q in zip(old, new, strict=True))


def _shares(values: Sequence[int], edges: Sequence[float]) -> list[float]:
    counts = [0.0] * (len(edges) + 1)
    for value in values:
        counts[bisect_right(edges, value)] += 1
    total = len(values) + _FLOOR * sum(1 for count in counts if not count)
    return [max(count, _FLOOR) / total for count in counts]


def _length_drift(what: str, before: Sequence[int], now: Sequence[int], thresholds: Thresholds) -> Drift:
    if not before or not now:
        return Drift(what, 0.0, thresholds.stability_index, "no answers")
    # Two samples of one distribution differ by this much on average, and rarely by three times as much.
    noise = 3 * (_BINS - 1) * (1 / len(before) + 1 / len(now))
    middle = f"median {np.median(before):.0f} -> {np.median(now):.0f} tokens"
    high = f"p95 {np.percentile(before, 95):.0f} -> {np.percentile(now, 95):.0f}"
    score = stability_index(before, now)
    return Drift(what, score, max(thresholds.stability_index, noise), f"{middle}, {high}")


def _share_drift(what: str, before: float, now: float, thresholds: Thresholds) -> Drift:
    return Drift(what, abs(now - before), thresholds.share, f"{before:.0%} -> {now:.0%} of prompt tokens")


def _rate_noise(before: int, now: int) -> float:
    """Two standard deviations of the logarithm of a ratio of counts."""
    return float(2 * (1 / before + 1 / now) ** 0.5)


def _shared_tokens(requests: Sequence[LoggedRequest]) -> int:
    seen: set[int] = set()
    shared = 0
    for request in sorted(requests, key=lambda each: each.arrival_unix):
        shared += BLOCK_TOKENS * sum(1 for block in request.prefix_hashes if block in seen)
        seen.update(request.prefix_hashes)
    return shared


def _sample(values: Sequence[int], count: int) -> tuple[int, ...]:
    """At most `count` of the sorted values, evenly spread."""
    ordered = sorted(values)
    if len(ordered) <= count:
        return tuple(ordered)
    return tuple(ordered[round(at)] for at in np.linspace(0, len(ordered) - 1, count))
