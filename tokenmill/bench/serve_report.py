"""From samples to numbers, under the field names of vLLM's benchmark, and ours where it has none.

Failed requests are counted and listed, and affect no other number. TTFT: send to first piece. TPOT: (last - first) /
(tokens - 1). ITL: gap between pieces, each gap one value. E2EL: send to end. `_scheduled` fields count from the
intended send time instead. The steady window is where at least 90 % of the peak number of requests were in flight.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import Counter
from datetime import datetime
from typing import Any

import numpy as np

from tokenmill.bench.serve import Measurement
from tokenmill.bench.serve_client import Sample
from tokenmill.bench.serve_job import METRICS

_PLATEAU = 0.9


def build_report(measurement: Measurement) -> dict[str, Any]:
    job, samples = measurement.job, measurement.samples
    good = [sample for sample in samples if sample.ok]
    duration = measurement.ended - measurement.began
    input_tokens = sum(sample.prompt_len for sample in good)
    output_tokens = sum(sample.output_tokens for sample in good)
    met = _num_within(good, job.limits())
    report: dict[str, Any] = {
        "date": datetime.now().strftime("%Y%m%d-%H%M%S"),
        "backend": job.backend,
        "endpoint_type": job.backend,
        "label": job.label or job.backend,
        "model_id": measurement.model,
        "num_prompts": len(samples),
        "dataset_name": job.dataset_name,
        "request_rate": "trace" if job.replays else "inf" if math.isinf(job.request_rate) else job.request_rate,
        "burstiness": job.burstiness,
        "max_concurrency": job.max_concurrency or None,
        "duration": duration,
        "completed": len(good),
        "failed": len(samples) - len(good),
        "total_input_tokens": input_tokens,
        "total_output_tokens": output_tokens,
        "total_cached_tokens": sum(sample.cached_tokens for sample in good),
        "request_throughput": len(good) / duration,
        "request_goodput": met / duration if met is not None else None,
        "output_throughput": output_tokens / duration,
        "total_token_throughput": (input_tokens + output_tokens) / duration,
        "max_output_tokens_per_s": _peak_rate(good, measurement.began),
        "max_concurrent_requests": _peak_in_flight(samples),
    }
    for name, values in _latencies(good).items():
        report |= _statistics(name, values, job.percentiles())
    if measurement.open_loop:
        late = [1000 * (sample.sent - sample.intended) for sample in good]
        report |= _statistics("ttft_scheduled", [1000 * (each.first - each.intended) for each in good], [99.0])
        report |= _statistics("e2el_scheduled", [1000 * (each.ended - each.intended) for each in good], [99.0])
        report |= {"mean_send_delay_ms": _mean(late), "max_send_delay_ms": max(late, default=None)}
    report["steady_state"] = _steady_state(samples)
    report["failures"] = dict(Counter(sample.error.split("\n")[0][:200] for sample in samples if not sample.ok))
    report["client_cpu_s"] = measurement.client_cpu
    report["client_cpu_us_per_token"] = 1e6 * measurement.client_cpu / output_tokens if output_tokens else None
    return report


def details(measurement: Measurement) -> dict[str, Any]:
    """Per request, in the order sent; seconds."""
    samples = measurement.samples
    return {
        "input_lens": [sample.prompt_len for sample in samples],
        "output_lens": [sample.output_tokens for sample in samples],
        "start_times": [sample.sent - measurement.began for sample in samples],
        "ttfts": [sample.first - sample.sent if sample.ok else 0.0 for sample in samples],
        "itls": [np.diff(sample.stamps).tolist() for sample in samples],
        "generated_texts": ["".join(sample.pieces) for sample in samples],
        "errors": [sample.error for sample in samples],
    }


def _latencies(good: list[Sample]) -> dict[str, list[float]]:
    """Milliseconds by metric."""
    gaps = [np.diff(sample.stamps) for sample in good]
    seconds = {
        "ttft": [sample.first - sample.sent for sample in good],
        "tpot": [_tpot(sample) for sample in good if sample.output_tokens > 1],
        "itl": np.concatenate(gaps).tolist() if gaps else [],
        "e2el": [sample.ended - sample.sent for sample in good],
    }
    return {name: [1000 * each for each in seconds[name]] for name in METRICS}


def _tpot(sample: Sample) -> float:
    return (sample.stamps[-1] - sample.first) / (sample.output_tokens - 1) if sample.stamps else 0.0


def _statistics(name: str, values: list[float], percentiles: list[float]) -> dict[str, float | None]:
    """None (null in JSON) without values, not zero."""
    shown: dict[str, float | None] = {
        f"mean_{name}_ms": _mean(values),
        f"median_{name}_ms": float(np.median(values)) if values else None,
        f"std_{name}_ms": float(np.std(values)) if values else None,
    }
    for each in percentiles:
        shown[f"p{each:g}_{name}_ms"] = float(np.percentile(values, each)) if values else None
    return shown


def _mean(values: list[float]) -> float | None:
    return float(np.mean(values)) if values else None


def _num_within(good: list[Sample], limits: dict[str, float]) -> int | None:
    """Requests that kept every limit (ms). `itl`: 99 % of the request's gaps."""
    if not limits:
        return None

    def measured(sample: Sample, name: str) -> float:
        match name:
            case "ttft":
                return sample.first - sample.sent
            case "tpot":
                return _tpot(sample) if sample.output_tokens > 1 else 0.0
            case "itl":
                return float(np.percentile(np.diff(sample.stamps), 99)) if len(sample.stamps) > 1 else 0.0
            case _:
                return sample.ended - sample.sent

    return sum(all(1000 * measured(each, name) <= limit for name, limit in limits.items()) for each in good)


def _in_flight(samples: list[Sample]) -> list[tuple[float, int]]:
    """(time, requests in flight from then on)."""
    changes = sorted([(each.sent, 1) for each in samples] + [(each.ended, -1) for each in samples])
    level, shown = 0, []
    for moment, change in changes:
        level += change
        shown.append((moment, level))
    return shown


def _peak_in_flight(samples: list[Sample]) -> int:
    return max((level for _, level in _in_flight(samples)), default=0)


def _peak_rate(good: list[Sample], began: float) -> float:
    """Most tokens in one whole second; a piece counts for its share of the request's tokens."""
    seconds: Counter[int] = Counter()
    for sample in good:
        share = sample.output_tokens / len(sample.stamps) if sample.stamps else 0.0
        for stamp in sample.stamps:
            seconds[int(stamp - began)] += share  # type: ignore[assignment]
    return float(max(seconds.values(), default=0.0))


def _steady_state(samples: list[Sample]) -> dict[str, Any] | None:
    """Rates between the first and the last moment of the plateau; None if there is no plateau."""
    good = [sample for sample in samples if sample.ok]
    levels = _in_flight(good)
    threshold = _PLATEAU * max((level for _, level in levels), default=0)
    busy = [number for number, (_, level) in enumerate(levels) if level >= threshold]
    if not busy or busy[-1] + 1 >= len(levels):
        return None
    start, end = levels[busy[0]][0], levels[busy[-1] + 1][0]
    if end <= start:
        return None
    tokens = sum(_share_between(sample, start, end) for sample in good)
    began = [sample for sample in good if start <= sample.sent < end]
    return {
        "start_s": start - levels[0][0],
        "seconds": end - start,
        "output_throughput": tokens / (end - start),
        "request_throughput": sum(start <= each.ended < end for each in good) / (end - start),
        "requests_started": len(began),
        "mean_ttft_ms": _mean([1000 * (each.first - each.sent) for each in began]),
    }


def _share_between(sample: Sample, start: float, end: float) -> float:
    if not sample.stamps:
        return 0.0
    inside = bisect_right(sample.stamps, end) - bisect_left(sample.stamps, start)
    return sample.output_tokens * inside / len(sample.stamps)
