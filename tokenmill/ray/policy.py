"""How many replicas Ray Serve should run: the simulator's autoscaler, fed by what the replicas report.

Ray Serve's own rule counts ongoing requests, which says little of a language model: sixty short ones may fit beside
each other where four long ones fill the KV cache. Ray's controller makes one instance and calls it every fraction of a
second; a decision is made once per tick. Knows nothing of engines; replica.py reports.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenmill.plan.simulate.autoscaler import Autoscaler, Autoscaling

WAITING = "waiting_requests"
KV_USE = "kv_use"
_PATIENCE = 30.0  # seconds without a report after which a replica counts as silent


class QueueAndKvPolicy:
    """Keyword arguments: fields of `Autoscaling`."""

    def __init__(self, **settings: Any) -> None:
        self._autoscaler = Autoscaler(Autoscaling(**settings))
        self._patience = max(_PATIENCE, 3 * self._autoscaler.settings.tick_s)
        self._next = 0.0
        self._heard: dict[Any, tuple[float, float]] = {}  # replica -> (its clock, ours) of its last report

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """`context`: ray.serve.config.AutoscalingContext. Returns replicas, and a state that we do not need."""
        now: float = context.current_time
        present: int = context.target_num_replicas
        if now < self._next:
            return present, {}
        reported = context.raw_metrics or {}
        waiting = self._latest(reported.get(WAITING, {}), now)
        if not waiting:  # nobody has reported yet: they start
            return present, {}
        self._next = now + self._autoscaler.settings.tick_s
        kv_use = [series[-1].value for name, series in reported.get(KV_USE, {}).items() if name in waiting and series]
        queue = sum(waiting.values()) + (context.total_queued_requests or 0.0)
        wanted = self._autoscaler.desired(now, len(waiting), present, queue, sum(kv_use) / max(1, len(kv_use)))
        if len(waiting) < len(context.running_replicas):  # who is silent may have too much to do
            wanted = max(wanted, present)
        return wanted, {}

    def _latest(self, reported: Mapping[Any, Any], now: float) -> dict[Any, float]:
        """The last value of each replica that still reports. Ray's own mean counts the silent ones as idle. Ages are
        taken by our clock alone: that of another node may differ."""
        found = {}
        heard = {}
        for replica, series in reported.items():
            if not series:
                continue
            last = series[-1]
            before = self._heard.get(replica)
            heard[replica] = before if before is not None and before[0] == last.timestamp else (last.timestamp, now)
            if now - heard[replica][1] <= self._patience:
                found[replica] = last.value
        self._heard = heard
        return found
