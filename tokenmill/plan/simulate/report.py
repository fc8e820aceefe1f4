"""From records to numbers: percentiles, throughput, goodput, KV and queue, GPU-seconds by what they were spent on.

Pure arithmetic over a finished simulation. `to_json` has the keys that scripts rely on, `simulation_series` what a plot
needs. Called by the job, the CLI and the cost model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from tokenmill.plan.simulate.records import Records, RequestRecord, Sample
from tokenmill.plan.simulate.replica import Replica

_RANKS = (50, 90, 95, 99)


@dataclass(frozen=True, slots=True)
class Percentiles:
    mean: float
    p50: float
    p90: float
    p95: float
    p99: float


@dataclass(frozen=True, slots=True)
class Goodput:
    """Requests within every limit. A request's ITL is its mean time between tokens."""

    ttft_limit_ms: float  # 0: no limit
    itl_limit_ms: float
    requests: int
    share: float  # of all, refused ones included
    requests_s: float
    output_tok_s: float


@dataclass(frozen=True, slots=True)
class GpuSeconds:
    """`uncached_input`: what prompts added to their steps; `output`: the other busy time; `idle`: paid for only."""

    uncached_input: float
    output: float
    idle: float
    total: float


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    replica: int
    pool: str
    requests: int
    steps: int
    busy: float  # share of its paid time
    preemptions: int
    cache_hit_rate: float
    from_s: float
    to_s: float


@dataclass(frozen=True, slots=True)
class Simulation:
    """Times in ms as a client sees them: the front end's share is included."""

    ttft: Percentiles
    itl: Percentiles
    tpot: Percentiles
    e2e: Percentiles
    requests: int
    refused: int
    duration_s: float
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    preemptions: int
    kv_use_mean: float
    kv_use_peak: float
    queue_mean: float
    queue_peak: int
    goodput: Goodput | None
    gpu_seconds: GpuSeconds
    replicas: tuple[ReplicaReport, ...]
    samples: tuple[Sample, ...]
    ttfts: tuple[tuple[float, float], ...]  # (seconds, ms) in order of arrival, downsampled

    @property
    def throughput_tok_s(self) -> float:
        return self.output_tokens / self.duration_s

    @property
    def cache_hit_rate(self) -> float:
        """Of the prompt tokens of finished requests, the share that came from the prefix cache."""
        return self.cached_tokens / max(1, self.input_tokens)

    def to_json(self) -> dict[str, Any]:
        return {
            "ttft_ms": asdict(self.ttft),
            "itl_ms": asdict(self.itl),
            "tpot_ms": asdict(self.tpot),
            "e2e_ms": asdict(self.e2e),
            "throughput_tok_s": self.throughput_tok_s,
            "total_tok_s": (self.input_tokens + self.output_tokens) / self.duration_s,
            "requests_s": self.requests / self.duration_s,
            "requests": self.requests,
            "refused": self.refused,
            "duration_s": self.duration_s,
            "preemptions": self.preemptions,
            "cache_hit_rate": self.cache_hit_rate,
            "input_tokens": self.input_tokens,
            "cached_tokens": self.cached_tokens,
            "output_tokens": self.output_tokens,
            "kv_use": {"mean": self.kv_use_mean, "peak": self.kv_use_peak},
            "queue": {"mean": self.queue_mean, "peak": self.queue_peak},
            "goodput": asdict(self.goodput) if self.goodput else None,
            "gpu_seconds": asdict(self.gpu_seconds),
            "replicas": [asdict(each) for each in self.replicas],
        }


def simulation_series(simulation: Simulation) -> dict[str, Any]:
    """Columns for plots: the state of the cluster over time, TTFT by arrival."""
    samples = simulation.samples
    return {
        "seconds": [each.ms / 1e3 for each in samples],
        "running": [each.running for each in samples],
        "waiting": [each.waiting for each in samples],
        "kv_use": [each.kv_use for each in samples],
        "replicas": [each.replicas for each in samples],
        "arrival_seconds": [seconds for seconds, _ in simulation.ttfts],
        "ttft_ms": [ms for _, ms in simulation.ttfts],
    }


@dataclass(frozen=True, slots=True)
class OutsideEngine:
    """What a request spends outside the engine's loop: a fixed time, and some steps of the running batch."""

    request_ms: float
    queue_steps: float = 0.0

    def __call__(self, record: RequestRecord) -> float:
        return self.request_ms + self.queue_steps * record.tpot_ms


def summarize(
    records: Records, replicas: Sequence[Replica], outside: OutsideEngine, devices: float, ttft: float, itl: float
) -> Simulation:
    """`devices`: of one engine loop. `ttft` and `itl`: limits in ms, 0 for none."""
    done = records.finished
    end = max(record.last for record in done)
    first = min(record.sent for record in done)
    seconds = max(end - first, 1e-9) / 1e3
    ttfts = [record.ttft_ms + outside(record) for record in done]
    thin = max(1, len(done) // 1000)
    by_arrival = sorted(done, key=lambda record: record.sent)[::thin]
    samples = [sample for sample in records.samples if sample.ms <= end] or records.samples[:1]
    return Simulation(
        ttft=percentiles(ttfts),
        itl=_weighted_percentiles(records.gaps, records.gap_counts),
        tpot=percentiles([record.tpot_ms for record in done if record.tokens > 1]),
        e2e=percentiles([record.e2e_ms + outside(record) for record in done]),
        requests=len(done),
        refused=records.refused,
        duration_s=seconds,
        input_tokens=sum(record.arrival.prompt_tokens for record in done),
        cached_tokens=sum(record.cached for record in done),
        output_tokens=sum(record.tokens for record in done),
        preemptions=sum(replica.num_preemptions for replica in replicas),
        kv_use_mean=float(np.mean([sample.kv_use for sample in samples])),
        kv_use_peak=max(sample.kv_use for sample in samples),
        queue_mean=float(np.mean([sample.waiting for sample in samples])),
        queue_peak=max(sample.waiting for sample in samples),
        goodput=_goodput(records, outside, seconds, ttft, itl) if ttft or itl else None,
        gpu_seconds=_gpu_seconds(replicas, end, devices),
        replicas=tuple(_replica(replica, end) for replica in replicas),
        samples=tuple(samples),
        ttfts=tuple((record.sent / 1e3, record.ttft_ms + outside(record)) for record in by_arrival),
    )


def percentiles(values: Sequence[float]) -> Percentiles:
    if not values:
        return Percentiles(0.0, 0.0, 0.0, 0.0, 0.0)
    found = np.percentile(np.asarray(values), _RANKS)
    return Percentiles(float(np.mean(values)), *(float(each) for each in found))


def _weighted_percentiles(values: Sequence[float], counts: Sequence[int]) -> Percentiles:
    """Of values that occurred several times each (nearest rank)."""
    if not len(values):
        return Percentiles(0.0, 0.0, 0.0, 0.0, 0.0)
    value, weight = np.asarray(values), np.asarray(counts)
    order = np.argsort(value)
    cumulative = np.cumsum(weight[order])
    ranks = np.searchsorted(cumulative, np.array(_RANKS) / 100 * cumulative[-1])
    found = value[order][np.minimum(ranks, len(value) - 1)]
    return Percentiles(float(np.average(value, weights=weight)), *(float(each) for each in found))


def _goodput(records: Records, outside: OutsideEngine, seconds: float, ttft: float, itl: float) -> Goodput:
    def kept(record: RequestRecord) -> bool:
        return (not ttft or record.ttft_ms + outside(record) <= ttft) and (not itl or record.tpot_ms <= itl)

    good = [record for record in records.finished if kept(record)]
    return Goodput(
        ttft_limit_ms=ttft,
        itl_limit_ms=itl,
        requests=len(good),
        share=len(good) / (len(records.finished) + records.refused),
        requests_s=len(good) / seconds,
        output_tok_s=sum(record.tokens for record in good) / seconds,
    )


def _paid_ms(replica: Replica, end: float) -> float:
    return max(0.0, min(end, end if replica.until is None else replica.until) - replica.since)


def _gpu_seconds(replicas: Sequence[Replica], end: float, devices: float) -> GpuSeconds:
    scale = devices / 1e3
    paid = sum(_paid_ms(replica, end) for replica in replicas) * scale
    busy = sum(replica.busy_ms for replica in replicas) * scale
    prompts = sum(replica.input_ms for replica in replicas) * scale
    return GpuSeconds(prompts, busy - prompts, max(0.0, paid - busy), max(paid, busy))


def _replica(replica: Replica, end: float) -> ReplicaReport:
    paid = _paid_ms(replica, end)
    return ReplicaReport(
        replica=replica.number,
        pool=replica.pool,
        requests=replica.num_requests,
        steps=replica.num_steps,
        busy=min(1.0, replica.busy_ms / paid) if paid else 0.0,
        preemptions=replica.num_preemptions,
        cache_hit_rate=replica.kv.stats.prefix_hit_rate,
        from_s=replica.since / 1e3,
        to_s=(replica.since + paid) / 1e3,
    )
