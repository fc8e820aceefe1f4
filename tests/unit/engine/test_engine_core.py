"""The step, its statistics, and the promise that none of it needs torch."""

from __future__ import annotations

import subprocess
import sys

from tests.unit.engine.building import CountingRunner, make_kv, make_request, make_scheduler
from tokenmill.engine.core import EngineCore


def make_core(**options) -> EngineCore:
    return EngineCore(make_scheduler(**options), CountingRunner())


def test_steps_bring_events_until_the_work_is_done() -> None:
    core = make_core()
    core.add(make_request(5, "a", max_tokens=3))
    events = []
    while core.has_work:
        events += core.step()
    assert [event.token_ids for event in events] == [[100], [101], [102]]
    assert [event.finish_reason for event in events] == [None, None, "length"]
    assert core.step() == []
    assert core.stats.num_steps == 3


def test_cancel() -> None:
    core = make_core()
    core.add(make_request(5, "a"))
    core.step()
    assert core.cancel("a")
    assert not core.has_work
    assert core.step() == []


def test_statistics() -> None:
    core = make_core(kv=make_kv(num_pages=16))
    core.add(make_request(10, "a", max_tokens=2, arrival=0))
    core.step()
    core.add(make_request(10, "b", max_tokens=1, arrival=1))
    core.step()
    stats = core.stats
    assert (stats.num_steps, stats.num_tokens_computed, stats.num_tokens_sampled) == (2, 10 + 1 + 2, 3)
    assert (stats.num_finished, stats.num_running, stats.num_waiting, stats.num_preemptions) == (2, 0, 0, 0)
    assert (stats.num_prefix_query_tokens, stats.num_prefix_hit_tokens) == (20, 8)
    assert stats.prefix_hit_rate == 0.4
    assert stats.mean_kv_usage == (3 / 16) / 2  # after the first step a held three pages, after the second none
    assert stats.mean_kv_waste == (2 / 12) / 2
    assert stats.mean_kv_padding == 0
    assert (stats.peak_running, stats.peak_tokens) == (1, 10)


def test_the_engine_imports_no_torch() -> None:
    code = (
        "import sys, tokenmill.engine.core, tokenmill.engine.order.priority, tokenmill.engine.kv.policy.lru;"
        "sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
