"""What the simulation remembers: one record per request, gaps between tokens, a downsampled series over time.

Owns no decisions. Filled by the cluster, read by the report.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from tokenmill.plan.simulate.replica import Replica, StepOutcome
from tokenmill.plan.simulate.workload import Arrival

_MAX_SAMPLES = 512


@dataclass(slots=True)
class RequestRecord:
    arrival: Arrival
    sent: float  # ms; in a closed loop not the trace's time
    first: float = -1.0
    last: float = -1.0
    tokens: int = 0
    cached: int = 0
    replica: int = -1

    @property
    def ttft_ms(self) -> float:
        return self.first - self.sent

    @property
    def e2e_ms(self) -> float:
        return self.last - self.sent

    @property
    def tpot_ms(self) -> float:
        """Mean time between tokens; 0 for a single token."""
        return (self.last - self.first) / (self.tokens - 1) if self.tokens > 1 else 0.0


@dataclass(frozen=True, slots=True)
class Sample:
    ms: float
    running: int
    waiting: int
    kv_use: float  # mean over replicas
    replicas: int


@dataclass(slots=True)
class Records:
    finished: list[RequestRecord] = field(default_factory=list)
    refused: int = 0  # longer than the context
    samples: list[Sample] = field(default_factory=list)
    gaps: array[float] = field(default_factory=lambda: array("d"))  # ms between tokens of a request
    gap_counts: array[int] = field(default_factory=lambda: array("q"))  # how many requests had this gap
    live: dict[str, RequestRecord] = field(default_factory=dict)
    _interval: float = 0.0
    _next_sample: float = 0.0

    def take(self, outcome: StepOutcome, now: float) -> list[RequestRecord]:
        """Note the tokens of a step; the records of those that have their last one."""
        if outcome.times:
            steps = len(outcome.times)
            self.gaps.extend(outcome.times)
            self.gap_counts.extend([len(outcome.requests)] * steps)
            for request in outcome.requests:
                record = self.live[request.request_id]
                record.last = now
                record.tokens += steps
            return []
        ended = []
        gaps, counts = self.gaps, self.gap_counts
        for event in outcome.events:
            record = self.live[event.request_id]
            if record.tokens:
                gaps.append(now - record.last)
                counts.append(1)
            else:
                record.first = now
                record.cached = event.num_cached_tokens
            record.last = now
            record.tokens += 1
            if event.finish_reason is not None:
                ended.append(record)
        return ended

    def sample(self, now: float, replicas: list[Replica]) -> None:
        """Remember the state of the cluster, if the last sample is long enough ago. Thins itself out."""
        if now < self._next_sample:
            return
        running = waiting = 0
        kv_use = 0.0
        for replica in replicas:
            running += replica.scheduler.num_running
            waiting += replica.scheduler.num_waiting
            kv_use += replica.kv_use
        self.samples.append(Sample(now, running, waiting, kv_use / max(1, len(replicas)), len(replicas)))
        if len(self.samples) >= _MAX_SAMPLES:
            self.samples = self.samples[::2]
            self._interval = 2 * self._interval or now / _MAX_SAMPLES * 2
        self._next_sample = now + self._interval
