"""When requests are sent: seconds after the start, for an open loop. A closed loop has no schedule of its own."""

from __future__ import annotations

import math
from itertools import accumulate
from random import Random

from tokenmill.bench.serve_item import Item
from tokenmill.bench.serve_job import ServeJob


def arrival_offsets(job: ServeJob, items: list[Item]) -> list[float] | None:
    """None: a closed loop, the next request is sent when one ends (or all at once without a limit)."""
    if job.replays:
        return [item.timestamp for item in items]
    if math.isinf(job.request_rate):
        return None
    return gamma_offsets(len(items), job.request_rate, job.burstiness, job.seed)


def gamma_offsets(count: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """Intervals of a gamma law with mean 1/rate; scaled so that `count` requests take exactly count/rate seconds."""
    random = Random(seed)
    if math.isinf(burstiness):
        gaps = [1.0 / rate] * count
    else:
        gaps = [random.gammavariate(burstiness, 1.0 / (rate * burstiness)) for _ in range(count)]
    total = sum(gaps)
    scale = count / rate / total if total else 0.0
    return list(accumulate(gap * scale for gap in gaps))
