"""One engine and several: times that can be added up by hand, and what must hold for any load."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from tests.unit.plan.simulate.build import TenPerStep, cluster, load, shape
from tokenmill.errors import UserError
from tokenmill.hardware.kv_layout import LayerKV, build_layout
from tokenmill.plan.simulate.autoscaler import Autoscaler, Autoscaling
from tokenmill.plan.simulate.cluster import Cluster, PoolSettings
from tokenmill.plan.simulate.engine_shape import EngineShape
from tokenmill.plan.simulate.workload import Arrival, Workload
from tokenmill.route.policies import POLICIES


def test_a_lone_request_takes_its_steps() -> None:
    done = cluster(load((5.0, 100, 3)))
    (record,) = done.records.finished
    assert record.ttft_ms == pytest.approx(110)  # 10 + 100 tokens
    assert record.e2e_ms == pytest.approx(110 + 2 * 11, abs=0.01)
    assert (record.sent, record.tokens) == (5.0, 3)


def test_a_long_prompt_is_computed_in_chunks() -> None:
    (record,) = cluster(load((0.0, 1000, 1)), shape(batch_tokens=512)).records.finished
    assert record.ttft_ms == pytest.approx(1000 + 2 * 10)


def test_what_comes_during_a_step_waits_for_its_end() -> None:
    first, second = cluster(load((0.0, 100, 1), (50.0, 20, 1))).records.finished
    assert first.ttft_ms == pytest.approx(110)
    assert second.ttft_ms == pytest.approx(110 - 50 + 30)


def test_requests_of_one_moment_share_a_step() -> None:
    first, second = cluster(load((0.0, 100, 1), (0.0, 20, 1))).records.finished
    assert first.ttft_ms == second.ttft_ms == pytest.approx(130)


def test_a_closed_loop_keeps_its_users_busy() -> None:
    done = cluster(load(*[(0.0, 50, 4)] * 6, users=2))
    sent = sorted(record.sent for record in done.records.finished)
    ends = sorted(record.last for record in done.records.finished)
    assert sent[:2] == [0.0, 0.0]
    assert sent[2:] == ends[:4]  # each next one is sent when one ends


def test_shared_blocks_are_found_in_the_cache() -> None:
    """Two prompts of three blocks share the first two: 1024 tokens, and only the rest is computed again."""
    done = cluster(load((0.0, 1536, 2, (7, 8, 9)), (5000.0, 1536, 2, (7, 8, 10))))
    first, second = done.records.finished
    assert (first.cached, second.cached) == (0, 1024)
    assert second.ttft_ms == pytest.approx(512 + 10)
    off = cluster(load((0.0, 1536, 2, (7, 8, 9)), (5000.0, 1536, 2, (7, 8, 10))), prefix_caching=False)
    assert [record.cached for record in off.records.finished] == [0, 0]


def test_without_room_the_last_is_preempted_and_still_finishes() -> None:
    tight = shape(pages=20, context=320)  # 320 tokens; two requests grow to 200 each
    done = cluster(load((0.0, 100, 100), (0.0, 100, 100)), tight)
    assert done.replicas[0].num_preemptions > 0
    assert [record.tokens for record in done.records.finished] == [100, 100]
    roomy = cluster(load((0.0, 100, 100), (0.0, 100, 100)))
    assert roomy.replicas[0].num_preemptions == 0
    assert roomy.now < done.now


def test_what_is_longer_than_the_context_is_refused_and_counted() -> None:
    done = cluster(load((0.0, 90, 10), (0.0, 90, 11)), shape(context=100))
    assert done.records.refused == 1
    assert len(done.records.finished) == 1


def random_load(seed: int, requests: int = 120, rate_ms: float = 40.0) -> Workload:
    random = Random(seed)
    rows, ms = [], 0.0
    for number in range(requests):
        blocks = (random.randrange(3),) if random.random() < 0.3 else ()
        prompt = random.randint(513, 700) if blocks else random.randint(1, 300)
        rows.append(Arrival(number, ms, prompt, random.randint(1, 60), blocks))
        ms += random.expovariate(1 / rate_ms) if random.random() < 0.8 else 0.0
    return Workload("random", lambda: iter(rows))


WINDOWED = build_layout([LayerKV("full", 1, 8), *[LayerKV("sliding", 1, 8, 70)] * 3], 16)


@pytest.mark.parametrize("pages", [60, 90, 2000])
@pytest.mark.parametrize("max_running", [5, 64])
@pytest.mark.parametrize("windows", [False, True])
def test_strides_are_exactly_single_steps(pages: int, max_running: int, windows: bool) -> None:
    engine = shape(pages, max_running=max_running, context=800)
    if windows:
        engine = EngineShape(WINDOWED, pages * 4, 512, max_running, 800)
    one, many = (cluster(random_load(pages), engine, strides=strides) for strides in (False, True))

    def seen(done: Cluster) -> list[tuple[float, ...]]:
        records = sorted(done.records.finished, key=lambda record: record.arrival.number)
        return [(record.first, record.last, record.tokens, record.cached) for record in records]

    assert seen(one) == seen(many)
    left, right = one.replicas[0], many.replicas[0]
    assert (left.num_steps, left.num_preemptions) == (right.num_steps, right.num_preemptions)
    assert left.kv.stats.num_prefix_hit_tokens == right.kv.stats.num_prefix_hit_tokens
    assert left.kv.stats.num_evictions == right.kv.stats.num_evictions
    assert left.kv._pool.refs == right.kv._pool.refs
    assert left.busy_ms == pytest.approx(right.busy_ms)
    right.kv.check()


def test_strides_save_scheduling() -> None:
    done = cluster(load((0.0, 100, 400)))
    assert done.replicas[0].num_steps == 400
    assert done.replicas[0].core.stats.num_steps < 10


@pytest.mark.parametrize("router", POLICIES.names())
@pytest.mark.parametrize("users", [0, 7])
@pytest.mark.parametrize("split", [False, True])
def test_every_request_ends_with_all_its_tokens(router: str, users: int, split: bool) -> None:
    workload = replace(random_load(3, 60), users=users)
    decode = PoolSettings(shape(200, context=800), TenPerStep(), 2) if split else None
    done = cluster(workload, shape(120, context=800), 3, router=router, decode=decode, transfer_ms=lambda n: 0.1 * n)
    records = {record.arrival.number: record for record in done.records.finished}
    assert not done.records.live
    assert len(records) == len(done.records.finished) == 60
    for arrival in workload.arrivals():
        assert records[arrival.number].tokens == arrival.output_tokens
        assert records[arrival.number].last >= records[arrival.number].first > records[arrival.number].sent - 1e-9
    gaps = sum(done.records.gap_counts)
    assert gaps == sum(record.tokens - 1 for record in records.values())
    for replica in done.replicas:
        replica.kv.check()
        assert (replica.outstanding, replica.outstanding_tokens) == (0, 0)


def test_round_robin_takes_turns_and_least_loaded_avoids_the_busy() -> None:
    rows = load((0.0, 400, 60), (1.0, 10, 1), (2.0, 10, 1), (3.0, 10, 1))
    turns = cluster(rows, replicas=2, router="round_robin")
    assert _homes(turns) == [0, 1, 0, 1]
    loaded = cluster(
        load((0.0, 400, 60), (1.0, 10, 1), (100.0, 10, 1), (200.0, 10, 1)), replicas=2, router="least_loaded"
    )
    assert _homes(loaded) == [0, 1, 1, 1]


def test_prefix_aware_returns_to_the_cache() -> None:
    rows = load((0.0, 1024, 2, (1, 2)), (1.0, 1024, 2, (3, 4)), (9000.0, 1024, 2, (1, 5)), (9001.0, 1024, 2, (3, 6)))
    assert _homes(cluster(rows, replicas=2, router="prefix_aware")) == [0, 1, 0, 1]
    swapped = load((0.0, 1024, 2, (1, 2)), (1.0, 1024, 2, (3, 4)), (9000.0, 1024, 2, (3, 5)), (9001.0, 1024, 2, (1, 6)))
    aware = cluster(swapped, replicas=2, router="prefix_aware")
    assert _homes(aware) == [0, 1, 1, 0]
    assert sum(record.cached for record in aware.records.finished) == 2 * 512


def _homes(done: Cluster) -> list[int]:
    return [record.replica for record in sorted(done.records.finished, key=lambda record: record.arrival.number)]


def test_a_split_engine_computes_the_prompt_once() -> None:
    """The prefill replica gives the first token; after the transfer the other only decodes."""
    decode = PoolSettings(shape(), TenPerStep(), 1)
    done = cluster(load((0.0, 100, 3)), decode=decode, transfer_ms=lambda tokens: 2.0 * tokens)
    (record,) = done.records.finished
    assert record.first == pytest.approx(110)
    assert record.last == pytest.approx(110 + 200 + 2 * 11, abs=0.01)
    prefill, decoder = done.replicas
    assert (prefill.pool, decoder.pool) == ("prefill", "decode")
    assert decoder.busy_ms == pytest.approx(22, abs=0.01)
    assert decoder.input_ms == 0.0


def test_a_transferred_prompt_that_is_pushed_out_is_computed_again() -> None:
    decode = PoolSettings(shape(20, context=320), TenPerStep(), 1)
    done = cluster(load((0.0, 100, 100), (0.0, 100, 100)), shape(context=320), decode=decode)
    assert done.replicas[1].num_preemptions > 0
    assert done.replicas[1].input_ms > 0
    assert [record.tokens for record in done.records.finished] == [100, 100]


def test_transfers_from_one_replica_follow_each_other() -> None:
    decode = PoolSettings(shape(), TenPerStep(), 1)
    done = cluster(load((0.0, 100, 2), (0.0, 100, 2)), decode=decode, transfer_ms=lambda _tokens: 1000.0)
    first, second = done.records.finished
    assert first.first == second.first == pytest.approx(210)
    assert first.last == pytest.approx(210 + 1000 + 11, abs=0.01)
    assert second.last == pytest.approx(210 + 2000 + 11, abs=0.01)


def test_the_autoscaler_grows_at_once_and_shrinks_when_it_stayed_quiet() -> None:
    scaler = Autoscaler(Autoscaling(1, 8, target_queue=4, down_window_s=60, tick_s=15))
    assert scaler.desired(0, 1, 1, queue=12, kv_use=0.1) == 3
    assert scaler.desired(15, 1, 3, queue=12, kv_use=0.1) == 3  # two are starting: no more for the same queue
    assert scaler.desired(30, 3, 3, queue=0, kv_use=0.1) == 3  # wanted three less than a minute ago
    assert scaler.desired(74, 3, 3, queue=0, kv_use=0.1) == 3
    assert scaler.desired(91, 3, 3, queue=0, kv_use=0.1) == 1
    assert scaler.desired(200, 2, 2, queue=0, kv_use=0.8) == 2  # on target
    assert scaler.desired(300, 8, 8, queue=900, kv_use=1.0) == 8


def test_an_up_window_waits_until_the_need_lasts() -> None:
    scaler = Autoscaler(Autoscaling(1, 8, target_queue=4, up_window_s=20, tick_s=15))
    assert scaler.desired(0, 1, 1, queue=0, kv_use=0.0) == 1
    assert scaler.desired(15, 1, 1, queue=16, kv_use=0.0) == 1
    assert scaler.desired(30, 1, 1, queue=16, kv_use=0.0) == 4


def test_a_cluster_scales_up_after_the_cold_start_and_down_again() -> None:
    burst = [(0.0, 400, 50)] * 60 + [(7000.0 + 100.0 * i, 100, 9) for i in range(30)]
    burst += [(60_000.0 + 1000.0 * i, 10, 2) for i in range(150)]
    scaling = Autoscaling(1, 3, target_queue=2, cold_start_s=5, down_window_s=30, tick_s=1)
    done = cluster(load(*burst), shape(max_running=4), router="least_loaded", autoscaling=scaling)
    assert len(done.records.finished) == len(burst)
    late = done.replicas[1]
    assert len(done.replicas) == 3
    assert late.since == pytest.approx(1000)  # paid from the decision at the first tick
    taken = [record for record in done.records.finished if record.replica == 1]
    assert min(record.sent for record in taken) >= 6000  # and served after the cold start
    stopped = [replica for replica in done.replicas if replica.until is not None and replica.until < done.now]
    assert len(stopped) == 2
    fixed = cluster(load(*burst), shape(max_running=4))
    assert len(fixed.replicas) == 1


@pytest.mark.parametrize(
    "options", [{"min_replicas": 0}, {"min_replicas": 5, "max_replicas": 4}, {"target_queue": 0}, {"cold_start_s": -1}]
)
def test_impossible_autoscaling_is_refused(options: dict[str, float]) -> None:
    with pytest.raises(UserError):
        Autoscaling(**options)  # type: ignore[arg-type]


def test_an_objective_between_tokens_is_kept_by_shorter_chunks() -> None:
    """A sequence decodes while long prompts come: with the objective no gap exceeds it, without it all do."""
    rows = [(0.0, 20, 400), *((1000.0 + 200 * number, 2000, 2) for number in range(5))]
    free = cluster(load(*rows), shape(batch_tokens=512))
    kept = cluster(load(*rows), shape(batch_tokens=512, itl=60.0))
    assert max(free.records.gaps) > 500
    assert max(kept.records.gaps) <= 60
    assert len(kept.records.finished) == len(rows)
