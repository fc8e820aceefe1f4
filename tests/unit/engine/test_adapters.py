"""Adapters of an engine: who gets a slot of the device, who waits, what is kept in host memory, what is refused."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from tests.unit.engine.building import CountingRunner, make_kv, make_request
from tokenmill.engine.adapters.host import HostStore
from tokenmill.engine.adapters.registry import (
    EXISTS,
    IN_USE,
    NOT_FOUND,
    AdapterError,
    AdapterRegistry,
    AdapterVersion,
    check_name,
    split_option,
)
from tokenmill.engine.adapters.residency import AdapterSlots
from tokenmill.engine.core import EngineCore
from tokenmill.engine.loop import EngineLoop
from tokenmill.engine.order import DISCIPLINES
from tokenmill.engine.scheduler import Scheduler
from tokenmill.errors import UserError
from tokenmill.types import Request, TokenEvent


@dataclass
class Numbers:
    digest: bytes
    nbytes: int = 100


@dataclass
class Bench:
    """A loop over a runner that counts; adapter `x` is read from path `x`, whose content is its name."""

    num_slots: int = 2
    max_host_bytes: int = 1000
    max_in_host: int = 0
    max_running: int = 8
    events: list[TokenEvent] = field(default_factory=list)
    refused: dict[str, UserError] = field(default_factory=dict)
    device: dict[int, bytes] = field(default_factory=dict)
    reads: list[str] = field(default_factory=list)
    broken: set[str] = field(default_factory=set)
    gate: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.gate.set()
        self.kv = make_kv(num_pages=64)
        self.registry = AdapterRegistry(self.read, self.max_host_bytes, self.max_in_host)
        self.slots = AdapterSlots(self.num_slots, self.registry.store, self.place, self.device.pop, self.kv.stats)
        self.registry.store.stats = self.kv.stats
        discipline = DISCIPLINES.get("fcfs")()
        self.scheduler = Scheduler(self.kv, discipline, 64, self.max_running, 64, adapters=self.slots)
        self.registry.attach(self.slots, lambda digest: len(self.scheduler.using(digest)))
        self.runner = CountingRunner()
        self.loop = EngineLoop(EngineCore(self.scheduler, self.runner), self, adapters=self.registry)

    def read(self, name: str, path: str) -> tuple[AdapterVersion, Numbers]:
        self.gate.wait(10)
        self.reads.append(path)
        if path in self.broken:
            raise UserError(f"{path} is damaged", "download it again")
        digest = path.encode().ljust(32, b".")
        return AdapterVersion(name, path, digest, 4, 100), Numbers(digest)

    def place(self, slot: int, numbers: Numbers) -> None:
        self.device[slot] = numbers.digest

    def on_events(self, events: list[TokenEvent]) -> None:
        self.events += events

    def on_refused(self, request_id: str, error: UserError) -> None:
        self.refused[request_id] = error

    def load(self, *names: str) -> None:
        for name in names:
            self.registry.load_now(name, name)

    def bring(self, *names: str) -> None:
        """To the device, by a request each."""
        for name in names:
            self.submit(f"bring {name}", name, max_tokens=1)
            self.loop.drain()

    def submit(self, name: str, adapter: str = "", max_tokens: int = 3) -> Request:
        request = make_request(5, name, max_tokens=max_tokens, arrival=len(self.reads))
        request.adapter = self.registry.find(adapter) if adapter else None
        self.loop.submit(request)
        return request

    def running(self) -> set[str]:
        """Who was computed in the last step."""
        return {row.request.request_id for row in self.runner.plans[-1].scheduled}

    def on_device(self) -> set[str]:
        return {digest.rstrip(b".").decode() for digest in self.device.values()}


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.gate.set()
    made.registry.close()


def finished(bench: Bench) -> set[str]:
    return {event.request_id for event in bench.events if event.finish_reason}


def test_requests_of_several_adapters_and_of_the_base_share_a_step(bench: Bench) -> None:
    bench.load("a", "b")
    bench.bring("a", "b")
    for name in ("a", "b", ""):
        bench.submit(f"r{name}", name)
    bench.loop.turn()
    assert bench.running() == {"ra", "rb", "r"}
    slots = {row.request.request_id: row.adapter_slot for row in bench.runner.plans[-1].scheduled}
    assert slots["r"] == 0
    assert {bench.device[slots["ra"]][:1], bench.device[slots["rb"]][:1]} == {b"a", b"b"}
    bench.loop.drain()
    assert {"ra", "rb", "r"} <= finished(bench)


def test_a_request_whose_adapter_is_being_read_holds_nobody_up() -> None:
    bench = Bench(max_host_bytes=0)  # nothing is kept: every use reads the files
    bench.load("a", "b")
    bench.gate.clear()
    bench.submit("slow", "a", max_tokens=1)
    bench.submit("base", max_tokens=4)
    for _ in range(8):
        bench.loop.turn()
    assert finished(bench) == {"base"}
    assert bench.loop.has_work
    bench.gate.set()
    bench.loop.drain()
    assert finished(bench) == {"base", "slow"}
    bench.registry.close()


def test_the_least_recently_used_adapter_makes_room_and_never_one_that_computes(bench: Bench) -> None:
    bench.load("a", "b", "c")
    bench.bring("a", "b", "a")
    assert bench.on_device() == {"a", "b"}
    bench.submit("long", "a", max_tokens=40)
    bench.loop.turn()
    bench.submit("c", "c", max_tokens=1)
    while "c" not in finished(bench):
        bench.loop.turn()
        assert "a" in bench.on_device()
    assert bench.on_device() == {"a", "c"}
    assert bench.kv.stats.num_adapter_evictions == 1
    bench.loop.drain()


def test_nobody_waits_forever_for_slots_that_are_always_busy() -> None:
    bench = Bench(num_slots=1, max_running=2)
    bench.load("busy", "rare")
    bench.bring("busy")
    bench.submit("busy", "busy", max_tokens=3)
    bench.submit("rare", "rare", max_tokens=1)
    number = 0
    while "rare" not in finished(bench):  # there is always one more request of the busy adapter
        if bench.scheduler.num_waiting < 4:
            bench.submit(f"busy {number}", "busy", max_tokens=3)
            number += 1
        bench.loop.turn()
        assert number < 100_000
    bench.loop.drain()
    assert len(finished(bench)) == number + 3
    bench.registry.close()


def test_a_long_line_for_a_slot_holds_nobody_else_up() -> None:
    """However many wait for adapters that no slot can be had for: the base, and who comes after them, is reached."""
    bench = Bench(num_slots=1, max_running=4)
    bench.load("here", "there", "elsewhere")
    bench.bring("here")
    bench.submit("long", "here", max_tokens=30)
    bench.loop.turn()
    for number in range(600):
        bench.submit(f"wait {number}", ("there", "elsewhere")[number % 2], max_tokens=1)
    bench.submit("base", max_tokens=2)
    bench.loop.turn()
    assert bench.running() == {"long", "base"}
    for _ in range(4):
        bench.loop.turn()
    assert "base" in finished(bench)
    assert bench.scheduler.num_waiting == 600, "those who were passed over keep their place"
    assert bench.scheduler._waiting.at(0).request_id == "wait 0"
    bench.loop.drain()
    ended = [event.request_id for event in bench.events if event.finish_reason]
    assert len(ended) == 603
    bench.registry.close()


def test_siblings_and_preempted_requests_keep_their_adapter() -> None:
    bench = Bench(num_slots=1)
    bench.load("a", "b")
    twins = make_request(9, "twins", n=3, max_tokens=20)
    twins.adapter = bench.registry.find("a")
    bench.loop.submit(twins)
    bench.submit("b", "b", max_tokens=2)
    bench.loop.turn()
    preempted = False
    while bench.loop.has_work:
        bench.runner.plans.clear()
        bench.loop.turn()
        rows = bench.runner.plans[-1].scheduled if bench.runner.plans else []
        for row in rows:
            wanted = row.request.adapter.digest if row.request.adapter else None
            assert bench.device.get(row.adapter_slot) == wanted
        if len(rows) == 3 and not preempted:
            preempted = True
            bench.scheduler._preempt(rows[1].request)
    assert preempted
    assert sum(1 for event in bench.events if event.request_id == "twins" and event.finish_reason) == 3
    bench.registry.close()


def test_host_memory_has_a_budget_in_bytes_and_in_number() -> None:
    store = HostStore(lambda digest: Numbers(digest), 250)
    for name in (b"a", b"b", b"c"):
        store.keep(name, Numbers(name))
    assert (len(store), store.nbytes) == (2, 200)
    counted = HostStore(lambda digest: Numbers(digest), 1000, 1)
    for name in (b"a", b"b"):
        counted.keep(name, Numbers(name))
    assert len(counted) == 1
    assert counted.fetch(b"b", 10.0).digest == b"b"
    assert counted.stats.num_adapter_reads == 0
    assert counted.fetch(b"a", 10.0).digest == b"a"
    assert counted.stats.num_adapter_reads == 1
    store.close()
    counted.close()


def test_an_adapter_that_cannot_be_read_again_refuses_its_requests_alone() -> None:
    bench = Bench(max_host_bytes=0)
    bench.load("a", "b")
    bench.broken.add("a")
    bench.submit("ra", "a")
    bench.submit("rb", "b")
    bench.loop.drain()
    assert "damaged" in str(bench.refused["ra"])
    assert finished(bench) == {"rb"}
    bench.broken.clear()
    bench.submit("again", "a")
    bench.loop.drain()
    assert "again" in finished(bench)
    bench.registry.close()


def test_files_that_changed_are_not_taken_for_the_old_ones() -> None:
    bench = Bench(max_host_bytes=0)
    version = bench.registry.load_now("a", "a")
    bench.registry._sources[version.digest] = AdapterVersion("a", "other", version.digest, 4, 100)
    bench.submit("ra", "a")
    bench.loop.drain()
    assert "have changed since it was loaded" in str(bench.refused["ra"])
    bench.registry.close()


def test_an_adapter_in_use_is_not_unloaded_unless_it_may_drain(bench: Bench) -> None:
    bench.load("a")
    bench.submit("ra", "a", max_tokens=10)
    bench.loop.turn()
    with pytest.raises(AdapterError, match="in use by 1 request") as caught:
        bench.registry.unload("a")
    assert caught.value.code == IN_USE
    ended: list[object] = []
    bench.registry.unload("a", drains=True, done=lambda _version, error: ended.append(error))
    with pytest.raises(AdapterError) as caught:
        bench.registry.find("a")
    assert caught.value.code == NOT_FOUND
    assert not ended
    bench.loop.drain()
    bench.loop.turn()
    assert finished(bench) == {"ra"}
    assert ended == [None]
    assert not bench.device
    assert bench.registry.store.nbytes == 0


def test_a_replacement_is_for_new_requests_only(bench: Bench) -> None:
    bench.load("a")
    old = bench.submit("old", "a", max_tokens=12)
    bench.loop.turn()
    with pytest.raises(AdapterError) as caught:
        bench.registry.load_now("a", "a2")
    assert caught.value.code == EXISTS
    answers: list[AdapterVersion | None] = []
    bench.registry.load("a", "a2", True, lambda version, _error: answers.append(version))
    while not answers:
        bench.loop.turn()
    new = bench.submit("new", "a", max_tokens=12)
    assert old.adapter is not None
    assert new.adapter is not None
    assert (old.adapter.name, old.adapter.digest) != (new.adapter.name, new.adapter.digest)
    assert old.cache_name != new.cache_name
    bench.loop.drain()
    bench.loop.turn()
    assert finished(bench) == {"old", "new"}
    assert bench.on_device() == {"a2"}


def test_an_adapter_that_was_unloaded_before_its_request_came_is_not_found(bench: Bench) -> None:
    bench.load("a")
    late = make_request(5, "late", max_tokens=1)
    late.adapter = bench.registry.find("a")
    bench.registry.unload("a")
    bench.loop.submit(late)
    assert getattr(bench.refused["late"], "code", "") == NOT_FOUND


def test_two_names_of_one_content_share_its_memory(bench: Bench) -> None:
    bench.registry.load_now("x", "same")
    bench.registry.load_now("y", "same")
    for name in ("x", "y"):
        bench.submit(f"r{name}", name, max_tokens=8)
    bench.loop.turn()
    bench.registry.unload("x")  # the other name keeps it
    bench.loop.drain()
    assert finished(bench) == {"rx", "ry"}
    assert len(bench.device) == 1
    bench.registry.unload("y")
    assert not bench.device


def test_content_is_read_again_from_the_directory_of_a_name_that_is_left() -> None:
    bench = Bench(max_host_bytes=0)
    version = bench.registry.load_now("x", "same")
    bench.registry._enter(AdapterVersion("y", "copy", version.digest, 4, 100), Numbers(version.digest))
    bench.registry.unload("y")
    bench.broken.add("copy")  # its directory is gone
    bench.submit("rx", "x")
    bench.loop.drain()
    assert finished(bench) == {"rx"}
    bench.registry.close()


@pytest.mark.parametrize("name", ["", "a=b", "a,b", "x" * 200, "new\nline", 'quo"te'])
def test_names_that_cannot_be_shown_or_written_are_refused(name: str) -> None:
    with pytest.raises(UserError):
        check_name(name)


def test_how_an_adapter_is_written() -> None:
    assert split_option("sql=/srv/sql") == ("sql", "/srv/sql")
    assert split_option("adapters/sql/") == ("sql", "adapters/sql/")
    with pytest.raises(UserError):
        split_option("sql=")
