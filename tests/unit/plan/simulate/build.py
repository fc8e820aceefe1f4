"""Small engines and loads whose numbers can be checked by hand, for the tests in this folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tokenmill.hardware.kv_layout import LayerKV, build_layout
from tokenmill.plan.simulate.cluster import Cluster, ClusterSettings, PoolSettings
from tokenmill.plan.simulate.engine_shape import EngineShape
from tokenmill.plan.simulate.workload import Arrival, Workload


@dataclass(frozen=True)
class TenPerStep:
    """10 ms a step, 1 ms for each prompt token and each decode, a little for context."""

    def step_ms(self, prefill: Sequence[tuple[int, int]], decode: tuple[int, float]) -> float:
        count, context = decode
        if not count and not prefill:
            return 0.0
        return 10.0 + sum(new for new, _ in prefill) + count + context * 1e-6


def shape(
    pages: int = 1000, batch_tokens: int = 512, max_running: int = 64, context: int = 8000, itl: float = 0.0
) -> EngineShape:
    layout = build_layout([LayerKV("full", 1, 8)], 16)
    return EngineShape(layout, pages, batch_tokens, max_running, context, itl=itl)


def load(*rows: tuple[float, int, int] | tuple[float, int, int, tuple[int, ...]], users: int = 0) -> Workload:
    """Rows of (ms, prompt, output[, blocks])."""
    arrivals = [Arrival(number, *row) for number, row in enumerate(rows)]
    return Workload("test", lambda: iter(arrivals), users)


def cluster(workload: Workload, engine: EngineShape | None = None, replicas: int = 1, **settings: object) -> Cluster:
    pool = PoolSettings(engine or shape(), TenPerStep(), replicas)
    built = Cluster(ClusterSettings(serve=pool, **settings), workload)  # type: ignore[arg-type]
    built.run()
    return built
