"""Eviction policies: what goes first, what promises change about it, and that ends of prefixes go before beginnings."""

from __future__ import annotations

import random

import pytest

from tests.unit.engine.building import compute, make_kv, make_request
from tokenmill.engine.kv.policy import POLICIES
from tokenmill.engine.kv.policy.lfu import CEILING, LeastFrequentlyUsed
from tokenmill.engine.kv.policy.lru import LeastRecentlyUsed
from tokenmill.engine.kv.policy.retention import FOREVER, RetentionPolicy
from tokenmill.engine.stats import EngineStats
from tokenmill.errors import UserError
from tokenmill.types import CacheControl


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_lfu_evicts_the_least_used_and_of_equals_the_oldest() -> None:
    policy = LeastFrequentlyUsed()
    for page, uses in ((1, 2), (2, 1), (3, 1), (4, 0)):
        for _ in range(uses):
            policy.use(page)
        policy.add(page)
    order = []
    while (page := policy.victim()) is not None:
        policy.remove(page)
        policy.forget(page)
        order.append(page)
    assert order == [4, 2, 3, 1]
    assert len(policy) == 0


def test_lfu_forgets_with_the_page() -> None:
    policy = LeastFrequentlyUsed()
    for _ in range(5):
        policy.use(1)
    policy.forget(1)
    policy.add(1)
    policy.use(2)
    policy.add(2)
    assert policy.victim() == 1


def test_lfu_fame_fades() -> None:
    policy = LeastFrequentlyUsed()
    for _ in range(CEILING - 1):
        policy.use(1)
    policy.add(1)
    for _ in range(CEILING - 10):
        policy.use(2)
    policy.add(2)
    for _ in range(CEILING):
        policy.use(3)  # reaches the ceiling: all counts are halved
    policy.add(3)
    assert policy.victim() == 2
    assert list(policy) == [2, 1, 3]
    for _ in range(CEILING // 2 - 1):
        policy.remove(2)
        policy.use(2)
        policy.add(2)
    assert policy.victim() in (1, 3)


@pytest.mark.parametrize("name", list(POLICIES))
def test_every_policy_against_a_plain_model(name: str) -> None:
    """Random calls as the pool makes them: members, length and victim stay consistent."""
    draw, policy = random.Random(7), POLICIES.get(name)()
    inside: set[int] = set()
    for _ in range(3000):
        page = draw.randrange(20)
        if page in inside:
            policy.remove(page)
            inside.remove(page)
            if draw.random() < 0.5:
                policy.forget(page)
        else:
            policy.use(page)
            policy.add(page)
            inside.add(page)
        assert set(policy) == inside
        assert len(policy) == len(inside)
        victim = policy.victim()
        assert victim == next(iter(policy), None)


def test_kept_pages_go_last_and_only_for_a_time() -> None:
    clock, stats = Clock(), EngineStats()
    policy = RetentionPolicy(LeastRecentlyUsed(), stats, clock)
    policy.retain(1, 60.0)
    policy.retain(2, FOREVER)
    for page in (1, 2, 3):
        policy.add(page)
    assert policy.victim() == 3
    assert policy.num_retained == 2
    policy.remove(3)
    policy.forget(3)
    assert stats.num_promises_broken == 0
    clock.now += 61.0
    assert policy.victim() == 1  # its time is over
    assert policy.num_retained == 1
    policy.remove(1)
    policy.forget(1)
    assert policy.victim() == 2  # nothing else is left
    policy.remove(2)
    policy.forget(2)
    assert stats.num_promises_broken == 1
    assert policy.victim() is None


def test_using_a_kept_page_renews_the_promise() -> None:
    clock, stats = Clock(), EngineStats()
    policy = RetentionPolicy(LeastRecentlyUsed(), stats, clock)
    policy.retain(1, 60.0)
    policy.add(1)
    policy.add(5)
    clock.now += 50.0
    policy.remove(1)
    policy.retain(1, 60.0)
    policy.add(1)
    clock.now += 50.0
    assert policy.victim() == 5
    clock.now += 11.0
    assert list(policy) == [5, 1] or policy.num_retained == 0


def test_a_request_keeps_its_prompt_in_the_cache() -> None:
    """Twelve pages: the promised prompt survives traffic that would have evicted it, the rest of the cache does not."""
    kv = make_kv(num_pages=12)
    kept = make_request(list(range(9)), cache=CacheControl(ttl=300))
    compute(kv, kept)
    kv.release(kept)
    plain = make_request(list(range(100, 109)))
    compute(kv, plain)
    kv.release(plain)
    other = make_request(list(range(200, 240)))  # ten pages
    compute(kv, other)
    kv.release(other)
    kv.check()
    assert kv.match(make_request(list(range(9)))).num_tokens == 8
    assert kv.match(make_request(list(range(100, 109)))).num_tokens == 0
    big = make_request(list(range(300, 348)))  # all twelve: a promise never blocks a request
    compute(kv, big)
    assert kv.stats.num_promises_broken == 2


def test_the_output_is_not_promised() -> None:
    kv = make_kv(num_pages=12)
    request = make_request(list(range(8)), cache=CacheControl(pin=True), max_tokens=9)
    compute(kv, request)
    request.token_ids += range(50, 59)
    compute(kv, request, 9)
    kv.release(request)
    assert kv.measure().num_pages_retained == 2
    assert kv.measure().num_pages_cached == 4


@pytest.mark.parametrize("fields", [{"ttl": 0.5}, {"ttl": 86_401.0}, {"ttl": -3.0}, {"ttl": float("nan")}], ids=str)
def test_a_ttl_out_of_range_is_refused(fields: dict[str, float]) -> None:
    with pytest.raises(UserError, match="ttl"):
        CacheControl(**fields)  # type: ignore[arg-type]


def test_a_tenant_keeps_no_more_pages_than_its_quota() -> None:
    """Twelve pages of which a tenant may keep a quarter: three."""
    kv = make_kv(num_pages=12)

    def keep(start: int, tenant: str, pin: bool = True) -> str:
        control = CacheControl(pin=pin, ttl=0 if pin else 300)
        request = make_request(
            list(range(start, start + 8)), f"{start}", cache=control, tenant=tenant, max_pinned_share=0.25
        )
        compute(kv, request)
        kv.release(request)
        kv.check()
        return request.cache.retention

    assert keep(0, "a") == "granted"
    assert keep(0, "a") == "granted"  # the same pages again
    assert keep(100, "a") == "over_quota"
    assert keep(100, "a", pin=False) == "over_quota"
    assert keep(200, "b") == "granted"  # another's quota is its own
    assert kv.measure().num_pages_retained == 4
    kv.clear()
    assert keep(100, "a") == "granted"


def test_a_promise_counts_until_its_time_is_over() -> None:
    clock = Clock()
    policy = RetentionPolicy(LeastRecentlyUsed(), EngineStats(), clock)
    assert policy.promise([1, 2], 60.0, "a", 2)
    assert not policy.promise([3], 60.0, "a", 2)
    assert policy.promise([3], 60.0, "b", 2)
    for page in (1, 2, 3):
        policy.add(page)
    clock.now += 61.0
    assert policy.promise([4, 5], 60.0, "a", 2)
    policy.add(4)
    policy.remove(4)
    policy.forget(4)  # evicted
    assert policy.promise([6], FOREVER, "a", 2)


def test_the_tenant_with_the_longer_promise_pays_for_a_shared_page() -> None:
    clock = Clock()
    policy = RetentionPolicy(LeastRecentlyUsed(), EngineStats(), clock)
    assert policy.promise([1], 60.0, "a", 1)
    assert policy.promise([1], FOREVER, "b", 1)
    assert policy.promise([2], 60.0, "a", 1)
    assert not policy.promise([3], 60.0, "b", 1)
