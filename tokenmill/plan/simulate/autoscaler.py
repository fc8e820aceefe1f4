"""The autoscaler: how many replicas there should be, as Kubernetes' HorizontalPodAutoscaler decides it.

desired = ceil(present x metric / target) for queue depth and KV use, whichever is larger; within a tolerance nothing
changes. Within a stabilisation window it grows only to the minimum, and shrinks only to the maximum, of what was
desired. Knows nothing of replicas but their number; the cluster asks at every tick.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from math import ceil

from tokenmill.errors import UserError


@dataclass(frozen=True, slots=True)
class Autoscaling:
    min_replicas: int = 1
    max_replicas: int = 4
    target_queue: float = 4.0  # waiting requests per replica
    target_kv_use: float = 0.8
    cold_start_s: float = 120.0  # from the decision to the first request
    up_window_s: float = 0.0
    down_window_s: float = 300.0
    tick_s: float = 15.0
    tolerance: float = 0.1

    def __post_init__(self) -> None:
        if not 1 <= self.min_replicas <= self.max_replicas:
            raise UserError(
                f"autoscaling from {self.min_replicas} to {self.max_replicas} replicas", "give 1 <= minimum <= maximum"
            )
        for name in ("target_queue", "target_kv_use", "tick_s"):
            if getattr(self, name) <= 0:
                raise UserError(f"{name} is {getattr(self, name):g}", "give a number above 0")
        for name in ("cold_start_s", "up_window_s", "down_window_s"):
            if getattr(self, name) < 0:
                raise UserError(f"{name} is {getattr(self, name):g}", "give 0 or more")


class Autoscaler:
    def __init__(self, settings: Autoscaling) -> None:
        self.settings = settings
        self._wanted: deque[tuple[float, int]] = deque()  # (seconds, replicas)

    def desired(self, now_s: float, ready: int, present: int, queue: float, kv_use: float) -> int:
        """How many replicas there should be. `ready` take requests; `present` also counts those that start;
        `queue` is waiting requests over all ready ones, `kv_use` their mean."""
        s = self.settings
        ratio = max(queue / max(1, ready) / s.target_queue, kv_use / s.target_kv_use)
        wanted = present if abs(ratio - 1) <= s.tolerance else ceil(ready * ratio - 1e-9)
        wanted = max(s.min_replicas, min(s.max_replicas, wanted))
        self._wanted.append((now_s, wanted))
        longest = max(s.up_window_s, s.down_window_s)
        while self._wanted[0][0] < now_s - longest:
            self._wanted.popleft()
        up = min(number for when, number in self._wanted if when >= now_s - s.up_window_s)
        down = max(number for when, number in self._wanted if when >= now_s - s.down_window_s)
        if up > present:
            return up
        return min(present, down)
