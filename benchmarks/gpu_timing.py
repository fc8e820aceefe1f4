"""Time of calls on a GPU inside a captured graph, and how far numbers are from others. Used by the benchmarks of single
layers.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def median_us(calls: list[Callable[[], object]], replays: int = 9) -> float:
    """Microseconds per call inside a captured graph."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    rounds = max(1, 12 // len(calls))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for call in calls:
                call()
    graph.replay()
    times = []
    for _ in range(replays):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / rounds / len(calls) * 1e3)
    return sorted(times)[replays // 2]


def error(got: Tensor, wanted: Tensor) -> float:
    return float((got.double() - wanted.double()).norm() / wanted.double().norm())
