"""The policy that Ray Serve calls decides as the simulator's autoscaler does, from the same numbers."""

from __future__ import annotations

from dataclasses import asdict
from types import SimpleNamespace

from tokenmill.plan.simulate.autoscaler import Autoscaler, Autoscaling
from tokenmill.ray.policy import KV_USE, WAITING, QueueAndKvPolicy


def context(
    now: float, target: int, waiting: list[float], kv: list[float], queued: float = 0.0, sent: float | None = None
) -> SimpleNamespace:
    def series(values: list[float]) -> dict[int, list[SimpleNamespace]]:
        when = now if sent is None else sent
        return {each: [SimpleNamespace(timestamp=when, value=value)] for each, value in enumerate(values)}

    return SimpleNamespace(
        current_time=now,
        target_num_replicas=target,
        running_replicas=list(range(len(waiting))),
        raw_metrics={WAITING: series(waiting), KV_USE: series(kv)},
        total_queued_requests=queued,
    )


def test_it_is_the_simulators() -> None:
    settings = Autoscaling(max_replicas=5, tick_s=10, down_window_s=40)
    policy, autoscaler = QueueAndKvPolicy(**asdict(settings)), Autoscaler(settings)
    load = [([0.0], [0.1]), ([9.0], [0.2]), ([9.0, 3.0], [0.9, 0.9]), ([0.0] * 3, [0.1] * 3), ([0.0] * 3, [0.1] * 3)]
    target = expected = 1
    seen = []
    for step, (waiting, kv) in enumerate(load * 3):
        now = 10.0 * step
        target, _ = policy(context(now, target, waiting, kv))
        expected = autoscaler.desired(now, len(waiting), expected, sum(waiting), sum(kv) / len(kv))
        assert target == expected
        seen.append(target)
    assert max(seen) > 1
    assert min(seen[5:]) >= 1


def test_it_decides_once_per_tick() -> None:
    policy = QueueAndKvPolicy(max_replicas=4, tick_s=10)
    assert policy(context(0.0, 1, [8.0], [0.0])) == (2, {})
    assert policy(context(5.0, 2, [80.0], [0.0])) == (2, {})
    assert policy(context(10.0, 2, [80.0], [0.0])) == (4, {})


def test_full_pages_count_where_nobody_waits() -> None:
    policy = QueueAndKvPolicy(max_replicas=4, target_kv_use=0.5)
    assert policy(context(0.0, 2, [0.0, 0.0], [1.0, 0.8])) == (4, {})


def test_requests_that_wait_before_a_replica_count() -> None:
    assert QueueAndKvPolicy(max_replicas=4)(context(0.0, 1, [0.0], [0.0], queued=8.0)) == (2, {})


def test_nothing_is_decided_before_a_replica_reports() -> None:
    assert QueueAndKvPolicy(max_replicas=4)(context(0.0, 1, [], [])) == (1, {})
    silent = context(0.0, 1, [], [])
    silent.raw_metrics = None
    assert QueueAndKvPolicy(max_replicas=4)(silent) == (1, {})


def test_a_silent_replica_is_not_an_idle_one() -> None:
    policy = QueueAndKvPolicy(max_replicas=4, tick_s=10, down_window_s=0)
    assert policy(context(0.0, 2, [4.0, 4.0], [0.5, 0.5], sent=-7.0)) == (2, {})
    assert policy(context(20.0, 2, [4.0, 4.0], [0.5, 0.5], sent=-7.0)) == (2, {})  # the last that was heard
    assert policy(context(60.0, 2, [0.0, 0.0], [0.0, 0.0], sent=-7.0)) == (2, {})  # nobody is heard
    one = context(70.0, 2, [0.0], [0.0])
    one.running_replicas = [0, 1]
    assert policy(one) == (2, {})
    assert policy(context(80.0, 2, [0.0, 0.0], [0.0, 0.0])) == (1, {})
