"""Arrivals against a server over HTTP, in an open loop: latencies, failures, and whether the objectives were met.

Requests are sent at their times whatever the server does, and latency counts from the intended time, so that a server
cannot hide its queue. Knows the OpenAI API (dialects.py), not who serves it. Called by the laboratory and for rivals.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from tokenmill.bench.serve import run_loop
from tokenmill.bench.serve_client import Sample, StreamClient
from tokenmill.optimize.arrivals import Arrivals, ReplayLimits
from tokenmill.optimize.dialects import Dialect, find_dialect, get_dialect
from tokenmill.optimize.local_server import LocalServer
from tokenmill.optimize.objectives import Objective, Objectives, milliseconds
from tokenmill.optimize.results import Latency, Percentiles

__all__ = ["Arrivals", "LocalServer", "ReplayLimits", "judge_samples", "replay"]

_PATH = "/v1/completions"
_WARMUPS = 2
_WARMUP_TOKENS = 8
_MAX_WARMUPS = 34
_WARMUP_SECONDS = 2.0
_WARMUP_VARIATION = 1 << 20  # whose tokens no measured prompt shares
_MAX_FAILED = 0.01  # share of the requests; beyond it, a server is refused whatever its latency
_CURVE_STEPS = 20  # of five percent each
_DEAD_AFTER = 8  # connections refused in a row: the server is gone, the rest need not be tried


def replay(
    url: str,
    arrivals: Arrivals,
    objectives: Objectives,
    *,
    model: str,
    api_key: str = "",
    time_limit_s: float,
    dialect: str = "",
    is_warm: bool = False,
) -> Latency:
    """Send the arrivals and measure. Requests that fail are counted, never raised; what has not ended after
    `time_limit_s` has failed. An empty `model` or `dialect` is found out by asking the server. `is_warm`: it has served
    such requests already."""
    url = url.rstrip("/").removesuffix("/v1")
    found, first_model = find_dialect(url, api_key) if not (model and dialect) else (None, "")
    spoken = get_dialect(dialect) if dialect or found is None else found
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    samples, began = run_loop(
        _send_all(
            lambda: StreamClient(url, _PATH, headers, time_limit_s, keep_text=False),
            spoken,
            model or first_model,
            arrivals,
            time_limit_s,
            is_warm,
        )
    )
    return judge_samples(samples, began, arrivals, objectives)


async def _send_all(
    connect: Callable[[], StreamClient],
    dialect: Dialect,
    model: str,
    arrivals: Arrivals,
    time_limit_s: float,
    is_warm: bool,
) -> tuple[list[Sample], float]:
    """(samples in the order of the arrivals, start of the replay)."""
    bodies = [
        dialect.body(model, prompt, length)
        for prompt, length in zip(arrivals.prompts, arrivals.output_lens, strict=True)
    ]
    deadline = time.perf_counter() + time_limit_s
    if not is_warm:  # with connections of its own: a server may close them before they are used again
        warming = connect()
        await _warm_up(warming, dialect, model, arrivals, deadline)
        warming.close()
    client = connect()
    began = time.perf_counter()
    refused = 0  # connections in a row

    async def one(body: bytes, length: int, intended: float) -> Sample:
        nonlocal refused
        left = deadline - time.perf_counter()
        if left <= 0 or refused >= _DEAD_AFTER:
            error = "the server is gone" if left > 0 else f"not sent within the limit of {time_limit_s:g} s"
            now = time.perf_counter()
            return Sample(intended, now, length, ended=now, error=error)
        sample = await client.send(body, length, intended, timeout=left)
        refused = refused + 1 if sample.error.startswith("cannot connect") else 0
        return sample

    tasks = []
    for body, prompt, offset in zip(bodies, arrivals.prompts, arrivals.times_s, strict=True):
        # Timers of libuv count from the start of a turn of its loop and may fire some milliseconds early.
        while (delay := min(began + offset, deadline) - time.perf_counter()) > 0 and refused < _DEAD_AFTER:
            await asyncio.sleep(delay)
        length = 0 if isinstance(prompt, str) else len(prompt)
        tasks.append(asyncio.create_task(one(body, length, began + offset)))
    samples = list(await asyncio.gather(*tasks))
    client.close()
    return samples, began


async def _warm_up(client: StreamClient, dialect: Dialect, model: str, arrivals: Arrivals, deadline: float) -> None:
    """A server in production is warm: it has compiled its kernels for one request and for many. Two requests one by
    one, then as many together as take little time by what the second took. Failures are left to the replay to find."""
    other = arrivals.variation(_WARMUP_VARIATION)
    pairs = zip(other.prompts, other.output_lens, strict=True)
    bodies = [dialect.body(model, prompt, min(length, _WARMUP_TOKENS)) for prompt, length in pairs][:_MAX_WARMUPS]
    took = 0.0
    for body in bodies[:_WARMUPS]:
        began = time.perf_counter()
        if deadline > began:
            await client.send(body, 0, timeout=deadline - began)
        took = time.perf_counter() - began
    count = int(_WARMUP_SECONDS / max(took, 1e-3))
    left = deadline - time.perf_counter()
    if count > 1 and left > 0:
        await asyncio.gather(*(client.send(body, 0, timeout=left) for body in bodies[_WARMUPS:][:count]))


# --- from samples to a verdict ---


def judge_samples(samples: Sequence[Sample], began: float, arrivals: Arrivals, objectives: Objectives) -> Latency:
    """A failed request has missed every objective and adds to no percentile shown."""
    good = [each for each in samples if each.ok]
    duration = max([each.ended for each in samples], default=began) - began
    failed = len(samples) - len(good)
    refusal = _refusal(samples, good, objectives)
    seconds = _steady_seconds(duration, arrivals, good, has_queue=bool(refusal) or not objectives.bound_the_queue)
    tokens = sum(each.output_tokens for each in good)
    within = sum(_tokens_within(each, objectives) for each in good)
    return Latency(
        requests=len(samples),
        failed=failed,
        offered_requests_s=arrivals.requests_s,
        duration_s=duration,
        ttft_ms=_percentiles([_ttft(each) for each in good]),
        itl_ms=_percentiles([gap for each in good for gap in _gaps(each)]),
        e2e_ms=_percentiles([_e2e(each) for each in good]),
        output_tok_s=tokens / seconds,
        goodput_tok_s=within / seconds,
        attainment=within / tokens * len(good) / len(samples) if tokens else 0.0,
        objective_met=not refusal,
        refusal=refusal,
        ttft_curve_ms=_curve([_ttft(each) for each in good]),
        itl_curve_ms=_curve([gap for each in good for gap in _gaps(each)]),
    )


def _steady_seconds(duration: float, arrivals: Arrivals, good: Sequence[Sample], *, has_queue: bool) -> float:
    """The time that rates are counted over: without the end, where nothing more arrives and the last answers finish.
    Short replays would otherwise show less than the server sustains. Where requests started in time, no queue grew: the
    rate is that of the arrivals. Else the quickest answer is the part of the end that is no sign of a queue."""
    if arrivals.duration_s <= 0:  # all at once: the whole of it is the queue
        return max(duration, 1e-9)
    period = len(arrivals) / arrivals.requests_s if len(arrivals) > 1 else 0.0
    if not has_queue and period:
        return period
    tail = min(_e2e(each) for each in good) / 1000 if period and good else 0.0
    return max(period, duration - tail, 1e-9)


def _refusal(samples: Sequence[Sample], good: Sequence[Sample], objectives: Objectives) -> str:
    if not samples:
        return "there were no requests"
    failed = len(samples) - len(good)
    reasons = []
    if failed > _MAX_FAILED * len(samples):
        common = Counter(each.error.split("\n")[0][:120] for each in samples if not each.ok).most_common(1)[0][0]
        reasons.append(f"{failed} of {len(samples)} requests failed ({common})")
    for each in objectives.items:
        reached = _reached(each, good, failed)
        if reached > each.limit_ms:
            shown = milliseconds(float(f"{reached:.3g}")) if reached < float("inf") else "unbounded (failed requests)"
            reasons.append(
                f"{each.metric} p{each.percentile:g} is {shown}, the objective is {milliseconds(each.limit_ms)}"
            )
    return "; ".join(reasons)


def _reached(objective: Objective, good: Sequence[Sample], failed: int) -> float:
    """The percentile that was reached, in ms; failed requests are infinitely slow. Gaps are pooled over requests."""
    if objective.metric == "itl":
        values = [gap for each in good for gap in _gaps(each)]
        return _percentile(values, objective.percentile) if values else 0.0 if good else float("inf")
    measure = _whole(objective)
    return _percentile([measure(each) for each in good] + [float("inf")] * failed, objective.percentile)


def _tokens_within(sample: Sample, objectives: Objectives) -> float:
    """Output tokens of a request that came in time: none where it began or ended late, and not those behind a gap that
    is longer than any allowed. (Of a request's own percentiles, half would miss an objective that all of them meet.)"""
    late = [each for each in objectives.items if each.metric != "itl" and _whole(each)(sample) > each.limit_ms]
    if late:
        return 0.0
    limits = [each.limit_ms for each in objectives.items if each.metric == "itl"]
    gaps = _gaps(sample)
    too_long = sum(gap > max(limits) for gap in gaps) if limits else 0
    return sample.output_tokens * (1 - too_long / (1 + len(gaps)))


def _whole(objective: Objective) -> Callable[[Sample], float]:
    return _ttft if objective.metric == "ttft" else _e2e


def _percentile(values: Sequence[float], percentile: float) -> float:
    """The smallest value that `percentile` percent do not exceed: defined with infinite values among them."""
    ordered = sorted(values)
    rank = int(np.ceil(percentile / 100 * len(ordered) - 1e-9))
    return ordered[max(0, rank - 1)]


def _ttft(sample: Sample) -> float:
    return 1000 * (sample.first - sample.intended)


def _e2e(sample: Sample) -> float:
    return 1000 * (sample.ended - sample.intended)


def _gaps(sample: Sample) -> list[float]:
    """Milliseconds between pieces, as `bench serve` counts them, however many tokens a piece has."""
    return [1000 * float(gap) for gap in np.diff(sample.stamps)]


def _curve(values: Sequence[float]) -> tuple[float, ...]:
    return tuple(_percentile(values, 5 * step) for step in range(_CURVE_STEPS + 1)) if values else ()


def _percentiles(values: Sequence[float]) -> Percentiles:
    """Zeros without values: the failures say why."""
    if not values:
        return Percentiles(0.0, 0.0, 0.0, 0.0, 0.0)
    mean = sum(values) / len(values)
    return Percentiles(mean, *(_percentile(values, each) for each in (50, 90, 95, 99)))
