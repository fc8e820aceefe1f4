"""The KV manager over its tiers: what leaves comes back when it is worth it, and a request learns what it got."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest

from tests.unit.engine.building import FULL, MIXED, compute, make_request, make_scheduler, step, tables_of
from tokenmill.engine.kv.budget.enforcer import BudgetEnforcer
from tokenmill.engine.kv.manager import KVManager
from tokenmill.engine.kv.policy.lru import LeastRecentlyUsed
from tokenmill.engine.kv.tier.base import PageTier
from tokenmill.engine.kv.tier.costs import IMPORT, LoadCosts
from tokenmill.engine.kv.tier.host import HostTier
from tokenmill.engine.kv.tier.stack import TierStack
from tokenmill.engine.scheduler import Scheduler
from tokenmill.errors import UserError
from tokenmill.hardware.kv_layout import LayerKV, build_layout
from tokenmill.model.kvstore.transfer import PagesOnHost
from tokenmill.types import CacheControl, Request, SamplingParams

_PAGE = 64


class Memory:
    """Pages of bytes."""

    def __init__(self, num_pages: int) -> None:
        self.pages = [bytes([number]) * _PAGE for number in range(num_pages)]

    def export_pages(self, pages: Sequence[int]) -> PagesOnHost:
        return PagesOnHost([memoryview(bytearray(self.pages[page])) for page in pages])

    def import_pages(self, pages: Sequence[int], data: Sequence[memoryview]) -> None:
        for page, content in zip(pages, data, strict=True):
            self.pages[page] = bytes(content)


def make(
    tier: PageTier | None = None, num_pages: int = 8, layers: list[LayerKV] = FULL, access: Memory | None = None
) -> tuple[KVManager, Memory, TierStack]:
    memory = access or Memory(num_pages)
    stack = TierStack([tier or HostTier(1 << 20)], memory, b"r" * 16, _PAGE)
    return KVManager(build_layout(layers, 4), num_pages, True, LeastRecentlyUsed(), stack), memory, stack


def fill(kv: KVManager, prompt: list[int]) -> Request:
    request = make_request(prompt)
    assert kv.prefetch(request, wait=10.0)
    compute(kv, request)
    kv.release(request)
    kv.check()
    return request


@pytest.mark.parametrize("layers", [FULL, MIXED], ids=["full", "mixed"])
def test_what_was_evicted_comes_back_with_its_content(layers: list[LayerKV]) -> None:
    kv, memory, stack = make(num_pages=8 * len(layers), layers=layers)
    first = make_request(list(range(21)))
    compute(kv, first)
    before = [memory.pages[page] for page in tables_of(kv, first)[0][:5]]
    kv.release(first)
    fill(kv, list(range(100, 131)))  # takes every page
    assert kv.match(make_request(list(range(21)))).num_tokens == 0
    assert stack.flush(10.0)
    again = make_request(list(range(21)))
    assert kv.prefetch(again, wait=10.0)
    assert kv.match(again).num_tokens == 20
    compute(kv, again)
    assert [memory.pages[page] for page in tables_of(kv, again)[0][:5]] == before
    assert (again.cache.reason, again.cache.tier, again.cache.num_loaded_tokens) == ("hit", "host", 20)
    kv.close()


def test_a_second_engine_finds_what_the_first_saved() -> None:
    tier = HostTier(1 << 20)
    kv, _, _ = make(tier)
    fill(kv, list(range(21)))
    assert not kv.save(wait=10.0)
    assert tier.stats.entries == 5
    other, _, _ = make(tier, access=Memory(8))
    request = fill(other, [*range(17), 99, 98, 97, 96, 95])
    assert request.cache.num_loaded_tokens == 16
    assert request.cache.reason == "partial"
    assert fill(other, [55] * 9).cache.reason == "cold"
    assert fill(other, [5, 6]).cache.reason == "short"
    kv.close()
    other.close()


def test_a_tier_gives_pages_only_to_their_salt() -> None:
    tier = HostTier(1 << 20)
    kv, _, _ = make(tier)
    saved = make_request(list(range(21)), cache_salt=b"a" * 16)
    compute(kv, saved)
    kv.release(saved)
    assert not kv.save(wait=10.0)
    assert kv.match(make_request(list(range(21)))).num_tokens == 0
    other, _, _ = make(tier)  # after a restart
    for salt, found in ((b"", 0), (b"b" * 16, 0), (b"a" * 16, 20)):
        request = make_request(list(range(21)), cache_salt=salt)
        assert other.prefetch(request, wait=10.0)
        assert other.match(request).num_tokens == found
        other.check()
    kv.close()
    other.close()


def test_closing_saves_what_is_cached() -> None:
    tier = HostTier(1 << 20)
    kv, _, _ = make(tier)
    fill(kv, list(range(21)))
    kv.close()
    assert tier.stats.entries == 5
    assert kv.match(make_request(list(range(21)))).num_tokens == 20  # and nothing is forgotten
    fill(kv, list(range(100, 131)))  # nor missed


class SlowTier(HostTier):
    """Waits for a sign before it gives a page."""

    def __init__(self) -> None:
        super().__init__(1 << 20)
        self.go = threading.Event()

    def get(self, key: bytes) -> memoryview | None:
        assert self.go.wait(30)
        return super().get(key)


def one_runs_and_a_prefix_is_in_the_tier() -> tuple[SlowTier, KVManager, Scheduler]:
    tier = SlowTier()
    saved, _, _ = make(tier)
    fill(saved, list(range(21)))
    saved.close()
    kv, _, _ = make(tier, num_pages=32)
    scheduler = make_scheduler(kv)
    scheduler.add(make_request([90, 91, 92], "runs", max_tokens=20))
    return tier, kv, scheduler


def test_a_load_holds_nobody_else_up() -> None:
    """While pages are on their way those who run go on; the one that waits starts when they are there."""
    tier, kv, scheduler = one_runs_and_a_prefix_is_in_the_tier()
    assert step(scheduler)[0] == {"runs": 3}
    waiting = make_request(list(range(21)), "waits", max_tokens=2, arrival=1)
    scheduler.add(waiting)
    for _ in range(3):
        assert step(scheduler)[0] == {"runs": 1}
    tier.go.set()
    for _ in range(100_000):
        rows, _ = step(scheduler)
        if "waits" in rows:
            break
        if not scheduler.num_running:
            scheduler.add(make_request([90, 91, 92], "runs", max_tokens=20))
    assert rows["waits"] == 1
    assert (waiting.num_cached_tokens, waiting.cache.num_loaded_tokens) == (20, 20)
    kv.close()


def test_cancelling_while_pages_are_on_their_way() -> None:
    tier, kv, scheduler = one_runs_and_a_prefix_is_in_the_tier()
    step(scheduler)
    scheduler.add(make_request(list(range(21)), "waits", arrival=1))
    step(scheduler)
    assert scheduler.cancel("waits")
    tier.go.set()
    step(scheduler)
    kv.check()
    kv.close()


def test_loading_is_weighed_against_computing() -> None:
    costs = LoadCosts()
    assert costs.worth_loading(100, {"disk": 10_000})  # nothing is known: try
    costs.record_load("disk", 1000, 1.0)
    assert costs.bandwidth("disk") == pytest.approx(1000)
    assert costs.worth_loading(100, {"disk": 10_000})  # computing is not known
    costs.record_step(100, 1.0)
    assert not costs.worth_loading(100, {"disk": 10_000})  # ten seconds against one
    assert costs.worth_loading(100, {"disk": 900})
    assert costs.worth_loading(100, {"host": 10_000})
    costs.record_load(IMPORT, 1000, 1.0)
    assert not costs.worth_loading(100, {"host": 10_000})
    verdicts = [costs.worth_loading(100, {"disk": 10_000}) for _ in range(40)]
    assert 1 <= sum(verdicts) <= 3  # now and then it is tried again
    for _ in range(30):
        costs.record_load("disk", 10**9, 1.0)
        costs.record_load(IMPORT, 10**9, 1.0)
    assert costs.worth_loading(100, {"disk": 10_000})


def test_a_tier_that_is_slower_is_left_alone() -> None:
    tier = HostTier(1 << 20)
    saved, _, _ = make(tier)
    fill(saved, list(range(21)))
    saved.close()
    kv, _, stack = make(tier)
    stack.costs.record_load("host", 1, 1.0)
    stack.costs.record_step(1000, 0.001)
    request = fill(kv, list(range(21)))
    assert (request.cache.reason, request.cache.num_loaded_tokens) == ("slower", 0)
    assert tier.stats.hits == 0
    kv.close()


def test_pages_that_do_not_fit_beside_those_who_run() -> None:
    tier = HostTier(1 << 20)
    saved, _, _ = make(tier)
    fill(saved, list(range(21)))
    saved.close()
    kv, _, _ = make(tier, num_pages=8)
    runs = make_request([90] * 19)
    compute(kv, runs)  # five pages, three left, one of them promised to growth
    request = make_request(list(range(21)))
    assert kv.prefetch(request, wait=10.0)
    kv.check()
    assert kv.match(request).num_tokens == 8
    kv.release(runs)
    compute(kv, request)
    assert (request.cache.reason, request.cache.num_loaded_tokens) == ("no_room", 8)
    kv.close()


def test_host_memory_keeps_what_was_used_last() -> None:
    tier = HostTier(3 * _PAGE)
    for number in range(3):
        tier.put(bytes([number]), memoryview(bytearray(_PAGE)))
    assert tier.get(b"\0") is not None
    tier.put(b"\3", memoryview(bytearray(_PAGE)))
    assert tier.has([b"\0", b"\1", b"\2", b"\3"]) == [True, False, True, True]
    tier.put(b"\4", memoryview(bytearray(4 * _PAGE)))
    assert tier.stats.bytes == 3 * _PAGE


@pytest.mark.parametrize(
    ("cache", "layers", "problem"),
    [
        (CacheControl(policy="streaming_llm", budget=12), FULL, "at least 16"),
        (CacheControl(policy="paged_eviction", budget=64), FULL, "scores"),
        (CacheControl(policy="h2o", budget=64), FULL, "scores"),
        (CacheControl(policy="streaming_llm", budget=24), MIXED, "at least 24"),
        (CacheControl(policy="streaming_llm", budget=64), [LayerKV("sliding", 1, 8, 6)], "no effect"),
    ],
    ids=str,
)
def test_budgets_that_an_engine_cannot_keep(cache: CacheControl, layers: list[LayerKV], problem: str) -> None:
    budgets = BudgetEnforcer(build_layout(layers, 4))
    if problem == "at least 24":
        budgets.check(SamplingParams(cache=cache))  # the least that a window of 6 leaves
        cache = CacheControl(policy=cache.policy, budget=cache.budget - 1)
    with pytest.raises(UserError, match=problem):
        budgets.check(SamplingParams(cache=cache))


@pytest.mark.parametrize(
    "fields",
    [{"policy": "h2o"}, {"budget": 5}, {"policy": "lru", "budget": 5}, {"policy": "full", "budget": 5}, {"budget": -1}],
    ids=str,
)
def test_budgets_out_of_range_are_refused(fields: dict[str, object]) -> None:
    with pytest.raises(UserError, match="kv_"):
        CacheControl(**fields)  # type: ignore[arg-type]
