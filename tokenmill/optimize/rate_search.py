"""The highest rate at which a server keeps the objectives: what a token costs is the price over the goodput there.

Short replays of the same arrivals at other speeds; growing steps find where the objectives begin to be missed,
bisection narrows it. Deterministic for a server that is, and bounded in time. Called by the laboratory.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace

from tokenmill.optimize.arrivals import Arrivals
from tokenmill.optimize.objectives import Objectives
from tokenmill.optimize.replay import replay
from tokenmill.optimize.results import Latency, Sustained

Probe = Callable[[Arrivals, float], Latency]  # arrivals, seconds that it may take at most

_MAX_PROBES = 12
_MIN_SCALE, _MAX_SCALE = 2.0**-10, 2.0**10
_TOLERANCE = 1.06  # the ratio of the lowest rate that fails to the highest that holds, at the end
_FIRST_STEP, _MAX_STEP = 1.25, 4.0  # small, because searches start near the answer; squared while that is not enough
_MIN_PROBE_S = 2.0
_PROBES = 8  # that a search has time for, if answers are short
_WAITS, _ANSWERS = 5.0, 3.0  # a probe lasts as many of the longest waits allowed, and of the usual answers
_LIKELY_SHARE = 0.6  # of the throughput that latency objectives leave
_OVERRUN = 3.0  # a probe may last this many times its arrivals before it counts as missed


def find_rate(
    server: str | Probe,
    arrivals: Arrivals,
    objectives: Objectives,
    *,
    seconds: float,
    model: str = "",
    api_key: str = "",
    start: float = 1.0,
    answer_s: float = 0.0,
    clock: Callable[[], float] = time.monotonic,
) -> tuple[float, float, Latency]:
    """(scale over the rate of the arrivals, lowest scale that missed the objectives, latency at the first); scale 0,
    and the latency at the lowest rate tried, if the objectives are missed at every one. `server`: its URL, or a
    function that replays. `seconds`: for the whole search, about eight replays of equal length. Each sends other
    tokens: none is served from what an earlier one left cached. `start`: the first scale, best near the answer.
    `answer_s`: what a request takes; a replay that is not much longer ends before the server is full."""
    deadline = clock() + seconds
    needed = max(_WAITS * objectives.longest_wait_s, _ANSWERS * answer_s)
    usual = seconds / _PROBES
    length = max(_MIN_PROBE_S, min(arrivals.duration_s or usual, usual), min(needed, 2 * usual))
    probe = server if callable(server) else _http_probe(server, objectives, model, api_key)
    tried: list[tuple[float, Latency]] = []

    def holds(scale: float) -> bool:
        sent = arrivals.at_rate(scale).lasting(length).variation(1000 * len(tried))
        latency = probe(sent, max(_MIN_PROBE_S, min(_OVERRUN * length, deadline - clock())))
        tried.append((scale, latency))
        return latency.objective_met

    def may_go_on() -> bool:
        return len(tried) < _MAX_PROBES and (clock() + length <= deadline)

    low, high = _bracket(holds, may_go_on, min(_MAX_SCALE, max(_MIN_SCALE, start)))
    while low and high < math.inf and high / low > _TOLERANCE and may_go_on():
        middle = math.sqrt(low * high)
        if holds(middle):
            low = middle
        else:
            high = middle
    reported = low or min(scale for scale, _ in tried)
    return low, high, next(latency for scale, latency in tried if scale == reported)


def sustain(
    url: str,
    arrivals: Arrivals,
    objectives: Objectives,
    *,
    seconds: float,
    model: str = "",
    api_key: str = "",
    start: float = 1.0,
    answer_s: float = 0.0,
) -> Sustained:
    """What a server sustains, with how well that is known; nothing where it misses the objectives at every rate."""
    low, high, latency = find_rate(
        url, arrivals, objectives, seconds=seconds, model=model, api_key=api_key, start=start, answer_s=answer_s
    )
    if not low:
        return Sustained(replace(latency, goodput_tok_s=0.0), 0.0, latency.goodput_tok_s)
    return Sustained(latency, latency.goodput_tok_s, latency.goodput_tok_s * high / low)


def likely_scale(output_tok_s: float, arrivals: Arrivals) -> float:
    """Where to start the search for an engine that generates this much with all requests waiting."""
    tokens = sum(arrivals.output_lens) / len(arrivals)
    return _LIKELY_SHARE * output_tok_s / tokens / arrivals.requests_s


def _bracket(holds: Callable[[float], bool], may_go_on: Callable[[], bool], start: float) -> tuple[float, float]:
    """(highest rate that holds, lowest that does not): 0 and infinity where there is none."""
    scale, step = start, _FIRST_STEP
    first = last = holds(scale)
    while last == first and may_go_on() and _MIN_SCALE < scale < _MAX_SCALE:
        before, scale = scale, scale * step if first else scale / step
        last, step = holds(scale), min(_MAX_STEP, step * step)
    if last != first:
        return (before, scale) if first else (scale, before)
    return (scale, math.inf) if first else (0.0, scale)


def _http_probe(url: str, objectives: Objectives, model: str, api_key: str) -> Probe:
    is_warm = False

    def probe(arrivals: Arrivals, limit: float) -> Latency:
        nonlocal is_warm
        was_warm, is_warm = is_warm, True
        return replay(url, arrivals, objectives, model=model, api_key=api_key, time_limit_s=limit, is_warm=was_warm)

    return probe
