"""Tiers that are down, full, slow or hung: the engine thread never waits for them, and they come back by themselves."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import pytest

from tests.unit.engine.building import FULL, make_request, make_scheduler, step
from tokenmill.engine.kv.manager import KVManager
from tokenmill.engine.kv.policy.lru import LeastRecentlyUsed
from tokenmill.engine.kv.tier import guard, stack
from tokenmill.engine.kv.tier.base import PageTier
from tokenmill.engine.kv.tier.guard import GuardedTier, Leaving
from tokenmill.engine.kv.tier.host import HostTier
from tokenmill.engine.kv.tier.stack import TierStack
from tokenmill.hardware.kv_layout import build_layout
from tokenmill.model.kvstore.transfer import PagesOnHost

_PAGE = 64
_PROMPT = list(range(21))  # five full pages of four


@pytest.fixture(autouse=True)
def short_deadlines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "_READ_SECONDS", 0.2)
    monkeypatch.setattr(guard, "_WRITE_SECONDS", 0.2)
    monkeypatch.setattr(guard, "_OPEN_SECONDS", 0.01)
    monkeypatch.setattr(stack, "_OPEN_SECONDS", 0.05)


class Memory:
    def __init__(self) -> None:
        self.batches: list[list[int]] = []  # pages of each export

    def export_pages(self, pages: Sequence[int]) -> PagesOnHost:
        self.batches.append(list(pages))
        return PagesOnHost([memoryview(bytearray(_PAGE)) for _ in pages])

    def import_pages(self, pages: Sequence[int], data: Sequence[memoryview]) -> None: ...


class FaultyTier(HostTier):
    """Hangs or fails where the test says so, until it says otherwise."""

    name = "faulty"

    def __init__(self) -> None:
        super().__init__(1 << 20)
        self.faults: dict[str, Exception | threading.Event] = {}
        self.calls: list[str] = []

    def _act(self, verb: str) -> None:
        self.calls.append(verb)
        fault = self.faults.get(verb)
        if isinstance(fault, threading.Event):
            assert fault.wait(60)
        elif fault is not None:
            raise fault

    def open(self) -> None:
        self._act("open")

    def get(self, key: bytes) -> memoryview | None:
        self._act("get")
        return super().get(key)

    def put(self, key: bytes, data: memoryview) -> None:
        self._act("put")
        super().put(key, data)


class RemoteTier(FaultyTier):
    remote = True

    def has(self, keys: list[bytes]) -> list[bool]:
        self._act("has")
        return super().has(keys)


@pytest.fixture
def guarded() -> Iterator[Callable[..., GuardedTier]]:
    made: list[tuple[GuardedTier, FaultyTier]] = []

    def make(tier: FaultyTier, clock: Callable[[], float] = time.monotonic) -> GuardedTier:
        made.append((GuardedTier(tier, _PAGE, clock), tier))
        return made[-1][0]

    yield make
    for each, tier in made:
        for fault in tier.faults.values():
            if isinstance(fault, threading.Event):
                fault.set()
        each.end()
        each.join(time.monotonic() + 10)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        threading.Event().wait(0.002)


def leaving(size: int = _PAGE) -> Leaving:
    return Leaving(PagesOnHost([memoryview(bytearray(size))]))


def test_a_tier_that_cannot_be_opened_is_off_and_tried_again(
    guarded: Callable[..., GuardedTier], caplog: pytest.LogCaptureFixture
) -> None:
    now = [10.0]
    tier = FaultyTier()
    tier.faults["open"] = OSError(errno.EROFS, "read-only")
    each = guarded(tier, lambda: now[0])
    until(lambda: tier.stats.failures == 1)
    assert not each.wait_open(0.1)
    assert (each.readable, each.writable, tier.stats.up) == (False, False, 0)
    assert each.has([b"k"]) == [False]
    assert each.get([b"k"]) == []
    assert tier.calls == ["open"], "left alone during the pause"
    del tier.faults["open"]
    now[0] += 5.0
    assert each.wait_open(10.0)
    assert (each.readable, each.writable, tier.stats.up) == (True, True, 1)
    assert "cannot open" in caplog.text
    assert "can open again" in caplog.text


def test_a_full_disk_is_still_read(guarded: Callable[..., GuardedTier]) -> None:
    now = [10.0]
    tier = FaultyTier()
    each = guarded(tier, lambda: now[0])
    assert each.wait_open(10.0)
    each.put(b"a", leaving(), 0)
    until(lambda: each.num_queued == 0)
    tier.faults["put"] = OSError(errno.ENOSPC, "no space left")
    each.put(b"b", leaving(), 0)
    until(lambda: each.num_queued == 0)
    assert (each.writable, each.wants(b"c"), each.readable) == (False, False, True)
    assert len(each.get([b"a"])) == 1
    assert tier.stats.up == 0
    del tier.faults["put"]
    now[0] += 1.0
    assert each.wants(b"b")
    each.put(b"b", leaving(), 0)
    until(lambda: each.num_queued == 0)
    assert each.writable
    assert (tier.stats.failures, tier.stats.up) == (1, 1)


def test_a_read_that_hangs_costs_one_deadline(guarded: Callable[..., GuardedTier]) -> None:
    now = [10.0]
    tier = FaultyTier()
    each = guarded(tier, lambda: now[0])
    assert each.wait_open(10.0)
    each.put(b"a", leaving(), 0)
    until(lambda: each.num_queued == 0)
    go = threading.Event()
    tier.faults["get"] = go
    assert each.get([b"a"]) == []
    now[0] += 1000.0  # the pause is over, but the call has not returned
    assert not each.readable
    for _ in range(100):
        assert each.get([b"a"]) == []
    assert tier.calls.count("get") == 1, "one thread hangs, no more"
    go.set()
    until(lambda: each.readable)
    assert len(each.get([b"a"])) == 1


def test_a_write_that_hangs_keeps_no_pages(guarded: Callable[..., GuardedTier]) -> None:
    now = [10.0]
    tier = FaultyTier()
    go = threading.Event()
    tier.faults["put"] = go
    each = guarded(tier, lambda: now[0])
    assert each.wait_open(10.0)
    for number in range(20):
        each.put(bytes([number]), leaving(), 0)
    until(lambda: "put" in tier.calls)
    assert not each.is_idle
    now[0] += 1.0
    assert not each.writable
    assert each.num_queued == 1, "what waits behind it is dropped"
    assert each.is_idle, "nobody waits for it"
    go.set()
    until(lambda: each.num_queued == 0)
    assert each.writable


def make(*tiers: PageTier, num_pages: int = 32) -> tuple[KVManager, TierStack, Memory]:
    memory = Memory()
    tier_stack = TierStack(tiers, memory, b"r" * 16, _PAGE)
    return KVManager(build_layout(FULL, 4), num_pages, True, LeastRecentlyUsed(), tier_stack), tier_stack, memory


@pytest.mark.parametrize("verb", ["open", "has", "get", "put"])
def test_a_hung_tier_blocks_no_step(verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever hangs: requests run to their end, and closing ends."""
    monkeypatch.setattr(guard, "_READ_SECONDS", 1.0)
    monkeypatch.setattr(guard, "_WRITE_SECONDS", 1.0)
    tier, go = RemoteTier(), threading.Event()
    for number in range(6):
        tier._pages[bytes([number])] = memoryview(bytearray(_PAGE))
    tier.faults[verb] = go
    kv, _, _ = make(tier, num_pages=8)
    if verb == "get":  # there is something to load
        tier.has = lambda keys: [True] * len(keys)  # type: ignore[method-assign]
    scheduler = make_scheduler(kv, context_length=32)
    longest = 0.0
    for number in range(4):
        scheduler.add(make_request([number * 40 + place for place in range(21)], f"r{number}", max_tokens=3))
    deadline = time.monotonic() + 20
    while scheduler.has_work:
        began = time.monotonic()
        step(scheduler)
        longest = max(longest, time.monotonic() - began)
        assert time.monotonic() < deadline
    kv.check()
    assert longest < 0.7, "a step waited for the tier"
    began = time.monotonic()
    kv.close(0.5)
    assert time.monotonic() - began < 5.0
    go.set()


def test_who_waits_for_a_tier_is_passed_over_and_keeps_its_place() -> None:
    tier, go = RemoteTier(), threading.Event()
    kv, tiers, _ = make(tier)
    tier.faults["has"] = go
    scheduler = make_scheduler(kv, max_running=2)
    for name, prompt in (("loads", _PROMPT), ("also loads", _PROMPT[4:]), ("short", [90, 91]), ("brief", [92])):
        scheduler.add(make_request(prompt, name, max_tokens=2, arrival=len(tier.calls)))
    rows, _ = step(scheduler)
    assert list(rows) == ["short", "brief"]
    assert scheduler.num_waiting == 2
    tier.faults.clear()
    go.set()
    until(lambda: all(load.done.is_set() for _, load in kv.sources._restorer._waiting.values()))  # type: ignore[union-attr]
    started: list[str] = []
    while len(started) < 2:
        started += [name for name in step(scheduler)[0] if name.endswith("loads") and name not in started]
    assert started == ["loads", "also loads"]
    assert not kv.is_loading
    tiers.close(1.0)


def test_an_engine_with_nothing_but_loads_still_takes_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that has to wait for a tier is short and empty; cancelling works meanwhile."""
    monkeypatch.setattr(guard, "_READ_SECONDS", 5.0)
    tier, go = RemoteTier(), threading.Event()
    kv, tiers, _ = make(tier)
    tier.faults["has"] = go
    scheduler = make_scheduler(kv)
    scheduler.add(make_request(_PROMPT, "loads"))
    began = time.monotonic()
    assert not scheduler.schedule().scheduled
    assert time.monotonic() - began < 2.0
    assert kv.is_loading
    assert scheduler.cancel("loads")
    assert not scheduler.has_work
    assert not kv.is_loading
    go.set()
    tiers.close(1.0)


def test_requests_that_begin_alike_share_a_load_and_too_many_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenmill.engine.kv.restore._MAX_LOADS", 2)
    monkeypatch.setattr(guard, "_READ_SECONDS", 20.0)
    tier, go = RemoteTier(), threading.Event()
    kv, tiers, _ = make(tier)
    saved = make_request(_PROMPT, "saved")
    assert kv.prefetch(saved, 10.0)
    for place in range(5):
        name = kv.sources._restorer._wanted_prefix(saved, 5).keys[place][0]  # type: ignore[union-attr]
        tier._pages[name] = memoryview(bytearray(_PAGE))
    kv.release(saved)
    tier.calls.clear()
    tier.faults["has"] = go
    alike = [make_request([*_PROMPT, number], f"alike {number}") for number in range(5)]
    other, beyond = make_request([7] * 9, "other"), make_request([8] * 9, "beyond")
    for request in (*alike, other):
        assert not kv.prefetch(request)
    assert kv.prefetch(beyond), "computed, not waited for"
    tier.faults.clear()
    go.set()
    for request in (*alike, other):
        until(lambda request=request: kv.prefetch(request, 0.01))  # type: ignore[misc]
        assert kv.match(request).num_tokens == (20 if request in alike else 0)
    assert tier.calls.count("get") == 5, "the shared pages were read once"
    tiers.close(1.0)


def test_the_first_of_those_that_begin_alike_is_cancelled() -> None:
    tier, go = RemoteTier(), threading.Event()
    kv, tiers, _ = make(tier)
    tier.faults["has"] = go
    first, second = make_request(_PROMPT, "first"), make_request(_PROMPT, "second")
    assert not kv.prefetch(first)
    assert not kv.prefetch(second)
    kv.release(first)
    tier.faults.clear()
    go.set()
    until(lambda: kv.prefetch(second, 0.01))
    assert not kv.is_loading
    tiers.close(1.0)


def test_evicted_pages_leave_together() -> None:
    tier = HostTier(1 << 20)
    kv, tiers, memory = make(tier, num_pages=8)
    scheduler = make_scheduler(kv, context_length=32)
    for number in range(2):
        scheduler.add(make_request([100 * number + place for place in range(29)], f"r{number}", max_tokens=1))
        while scheduler.has_work:
            step(scheduler)
    assert max(map(len, memory.batches)) >= 6, "one export for all pages that one step needs"
    assert tiers.flush(10.0)
    assert tier.stats.entries == sum(map(len, memory.batches))
    kv.close()
