"""Seconds of GPU work inside a captured graph, as the engine runs its steps: what Python and launches take is left out.

Knows nothing of what is timed. Called by gpu_probe.py and by the kernel probe of `optimize`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

Work = Callable[[], object]
_LAUNCHES = 32
_REPLAYS = 3


def device_seconds(works: Sequence[Work]) -> float:
    """Of one call, where the calls take turns; best of the replays. Copies of the operands keep caches cold."""
    for work in works:
        work()  # compiles and tunes
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for number in range(_LAUNCHES):
            works[number % len(works)]()
    best = float("inf")
    for _ in range(_REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        best = min(best, begin.elapsed_time(end) / _LAUNCHES / 1e3)
    return best
