"""What a planning question needs to know of a trace: mean lengths, mean rate and the burstiness of its arrivals.

Reads a trace once; knows nothing of engines. Called by `tokenmill plan --arrivals FILE`.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, pstdev

from tokenmill.errors import UserError
from tokenmill.plan.simulate.traces import Trace


@dataclass(frozen=True, slots=True)
class TraceFacts:
    input_tokens: int
    output_tokens: int
    rate: float  # requests per second; 0: the trace has no times
    burstiness: float  # coefficient of variation of the gaps
    words: str


def trace_facts(path: str, trace: Trace) -> TraceFacts:
    requests = list(trace.arrivals())
    if not requests:
        raise UserError(f"{path} holds no requests", "give a trace with at least one")
    inputs, outputs = fmean(one.prompt_tokens for one in requests), fmean(one.output_tokens for one in requests)
    times = sorted(one.ms / 1e3 for one in requests) if trace.timed else []
    gaps = [later - earlier for earlier, later in pairwise(times)]
    mean = fmean(gaps) if gaps else 0.0
    rate, burstiness = (1 / mean, pstdev(gaps) / mean) if mean > 0 else (0.0, 1.0)
    words = f"{len(requests):,} requests of {path}, {rate:.2f} per second, gaps vary by {burstiness:.2f} of their mean"
    return TraceFacts(round(inputs), max(1, round(outputs)), rate, burstiness, words)
