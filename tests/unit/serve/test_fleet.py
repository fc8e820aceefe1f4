"""Which models are loaded: within the memory plan at every moment, nobody lost, nobody starved. The engines move at
once."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from tokenmill.config import EngineConfig
from tokenmill.engine.messages import Ready
from tokenmill.errors import UserError
from tokenmill.serve.config import ServeConfig
from tokenmill.serve.errors import ApiError
from tokenmill.serve.fleet import fleet as fleet_module
from tokenmill.serve.fleet import host as host_module
from tokenmill.serve.fleet.catalog import ModelSpec
from tokenmill.serve.fleet.facts import ModelFacts
from tokenmill.serve.fleet.fleet import Fleet
from tokenmill.serve.fleet.host import ASLEEP, LOADED, UNLOADED, Host
from tokenmill.serve.fleet.plan import ENGINE_BYTES, SERVER_BYTES, MemoryPlan, Need, make_plan
from tokenmill.serve.fleet.routing import Routes
from tokenmill.serve.tenants.keys import Client

_FACTS = ModelFacts(None, "llama", "", 100 << 20, 2048, 2048, "cpu", 50 << 20, 3 << 30, 10 << 20)  # type: ignore[arg-type]
_NEED = Need(weights=80, kv=10, steps=0, process=10)  # awake 100, asleep 10


class Engine:
    """The states of one, without a process."""

    def __init__(self, log: list[str], name: str, failures: list[str]) -> None:
        self.state = "ready"
        self.num_in_flight = 0
        self.adapters = SimpleNamespace(by_name={})
        self._log = log
        self._name = name
        self._failures = failures

    async def _move(self, what: str, state: str) -> None:
        self._log.append(f"{self._name} {what}")
        await asyncio.sleep(0)
        if what in self._failures:
            self._failures.remove(what)
            raise RuntimeError(f"cannot {what}")
        self.state = state

    async def rest(self, asleep: bool) -> int:
        await self._move("sleep" if asleep else "wake", "asleep" if asleep else "ready")
        return 0

    async def stop(self, _timeout: float) -> None:
        await self._move("stop", "stopped")

    async def start(self) -> None:
        await self._move("start", "ready")

    async def close(self, _timeout: float) -> None:
        self.state = "closed"

    async def ready(self) -> tuple[bool, str]:
        return self.state == "ready", self.state


class Model:
    """As much of a service as the fleet sees."""

    def __init__(self, engine: Engine, no_sleep: str) -> None:
        self.engine = engine
        self.identity = Ready(1, [], {}, "", "", "", 0, 0.0, no_sleep=no_sleep)
        self.config = ServeConfig().for_context(0)
        self.takes_row = True
        self.ended: list[Any] = []

    def may_add_row(self, client: Client) -> bool:
        return client.name != "poor"

    def end_clients(self, clients: Any) -> None:
        self.ended += clients


class Opener:
    def __init__(self) -> None:
        self.log: list[str] = []
        self.failures: dict[str, list[str]] = {}
        self.no_sleep = ""

    async def open(self, host: Host) -> Any:
        engine = Engine(self.log, host.name, self.failures.setdefault(host.name, []))
        await engine._move("load", "ready")
        return Model(engine, self.no_sleep), None

    async def reopen(self, host: Host) -> None:
        assert host.service is not None
        await host.service.engine.start()

    async def shut(self, host: Host) -> None: ...


class Site:
    def __init__(self, room: int | None, *names: str, need: Need = _NEED, **options: Any) -> None:
        self.opener = Opener()
        config = ServeConfig(keep_alive=options.pop("keep_alive", "-1"))
        hosts = [Host(ModelSpec(name, (name,), config, EngineConfig()), None, need) for name in names]
        limits = {"max_waiting": 64, "load_timeout": 30.0, **options}
        self.fleet = Fleet(hosts, Routes([(name,) for name in names], {}), MemoryPlan(room), self.opener, **limits)
        self.hosts = hosts

    @property
    def states(self) -> list[str]:
        return [host.state for host in self.hosts]


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_module, "_MIN_TURN", 0.0)
    monkeypatch.setattr(fleet_module, "_POLL_SECONDS", 0.001)


def run(site: Site, scenario: Callable[[Site], Awaitable[None]]) -> None:
    async def whole() -> None:
        try:
            await site.fleet.start()
            await scenario(site)
        finally:
            await site.fleet.close(0.0)

    asyncio.run(asyncio.wait_for(whole(), 60))


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.001)


async def enter(fleet: Fleet, host: Host, client: Client, leave: asyncio.Event) -> None:
    async with fleet.lease(host, client=client):
        await leave.wait()


async def turns() -> None:
    """Everybody who could do something has had the chance."""
    for _ in range(100):
        await asyncio.sleep(0)


def test_what_fits_is_loaded_at_the_start_and_the_rest_on_demand() -> None:
    async def scenario(site: Site) -> None:
        assert site.states == [LOADED, LOADED, UNLOADED]
        a, b, c = site.hosts
        async with site.fleet.lease(b):
            pass
        async with site.fleet.lease(c):
            assert site.states == [ASLEEP, LOADED, LOADED]  # a was used longer ago
        async with site.fleet.lease(a):
            assert site.states == [LOADED, ASLEEP, LOADED]
        assert site.opener.log == ["a load", "b load", "a sleep", "c load", "b sleep", "a wake"]

    run(Site(220, "a", "b", "c"), scenario)


def test_sleeping_processes_end_where_even_they_are_too_much() -> None:
    async def scenario(site: Site) -> None:
        a, b = site.hosts
        async with site.fleet.lease(b):
            assert site.states == [UNLOADED, LOADED]
        async with site.fleet.lease(a):
            pass
        assert site.opener.log == ["a load", "a sleep", "a stop", "b load", "b sleep", "b stop", "a start"]

    run(Site(105, "a", "b"), scenario)


def test_a_model_that_cannot_sleep_is_unloaded() -> None:
    async def scenario(site: Site) -> None:
        site.opener.no_sleep = "weights in GPU memory are dropped"
        async with site.fleet.lease(site.hosts[1]):
            pass
        async with site.fleet.lease(site.hosts[0]):
            assert site.states == [LOADED, UNLOADED]
        assert site.opener.log[-2:] == ["b stop", "a wake"]

    run(Site(115, "a", "b"), scenario)


def test_a_model_with_requests_is_never_given_up_and_nobody_starves() -> None:
    async def scenario(site: Site) -> None:
        a, b = site.hosts
        served: list[str] = []

        async def ask(host: Host, leave: asyncio.Event | None = None) -> None:
            async with site.fleet.lease(host):
                served.append(host.name)
                if leave is not None:
                    await leave.wait()
                assert host.state == LOADED

        leave = asyncio.Event()
        first = asyncio.create_task(ask(a, leave))
        await until(lambda: a.leases == 1)
        waiting = asyncio.create_task(ask(b))
        await until(lambda: a.yielding)
        assert site.states == [LOADED, UNLOADED]
        late = asyncio.create_task(ask(a))  # comes after the one for b: it must not keep that waiting
        await until(lambda: len(a.waiters) == 1)
        leave.set()
        await asyncio.gather(first, waiting, late)
        assert served == ["a", "b", "a"]

    run(Site(115, "a", "b"), scenario)


def test_a_busy_model_goes_on_when_the_one_who_waited_has_left() -> None:
    async def scenario(site: Site) -> None:
        a, b = site.hosts
        async with site.fleet.lease(a):
            waiting = asyncio.create_task(site.fleet.load(b))
            await until(lambda: a.yielding)
            waiting.cancel()
            await until(lambda: a.usable)
            assert not b.waiters
            async with site.fleet.lease(a):
                assert a.leases == 2

    run(Site(115, "a", "b"), scenario)


def test_no_request_is_lost_and_the_plan_always_holds() -> None:
    """Random requests for three models where two fit; some callers leave while they wait or run."""

    async def scenario(site: Site) -> None:
        draw = random.Random(7)
        answered = left = 0

        async def ask(host: Host) -> None:
            nonlocal answered
            for _ in range(draw.randrange(3)):
                await asyncio.sleep(0)
            async with site.fleet.lease(host):
                awake = [each for each in site.hosts if each.state == LOADED]
                asleep = [each for each in site.hosts if each.state == ASLEEP]
                assert host in awake
                assert 100 * len(awake) + 10 * len(asleep) <= 210
                for _ in range(draw.randrange(5)):
                    await asyncio.sleep(0)
            answered += 1

        for _ in range(40):
            tasks = [asyncio.create_task(ask(draw.choice(site.hosts))) for _ in range(draw.randrange(1, 12))]
            await asyncio.sleep(0)
            for task in tasks:
                if draw.random() < 0.1:
                    task.cancel()
            for outcome in await asyncio.gather(*tasks, return_exceptions=True):
                if isinstance(outcome, asyncio.CancelledError):
                    left += 1
                elif outcome is not None:
                    raise outcome
        assert answered > 100
        assert left > 5
        assert [host.leases for host in site.hosts] == [0, 0, 0]
        assert not any(host.waiters for host in site.hosts)

    run(Site(210, "a", "b", "c"), scenario)


def test_the_queue_is_bounded_and_has_a_deadline() -> None:
    async def scenario(site: Site) -> None:
        a, b = site.hosts
        async with site.fleet.lease(a):
            waiting = [asyncio.create_task(site.fleet.load(b)) for _ in range(2)]
            await until(lambda: len(b.waiters) == 2)
            with pytest.raises(ApiError) as refusal:
                await site.fleet.load(b)
            assert (refusal.value.status, refusal.value.code) == (429, "queue_full")
            for outcome in await asyncio.gather(*waiting, return_exceptions=True):
                assert isinstance(outcome, ApiError)
                assert (outcome.status, outcome.code) == (503, "model_loading")
            many, key = asyncio.Event(), Client("k", max_queue_share=0.5)
            first = asyncio.create_task(enter(site.fleet, b, key, many))
            await until(lambda: len(b.waiters) == 1)
            with pytest.raises(ApiError) as refusal:
                await enter(site.fleet, b, key, many)
            assert (refusal.value.status, refusal.value.code) == (429, "queue_share")
            first.cancel()
            with pytest.raises(ApiError) as refusal:
                async with site.fleet.lease(b, deadline=0.01):
                    pass
            assert (refusal.value.status, refusal.value.code) == (429, "deadline")

    run(Site(115, "a", "b", max_waiting=2, load_timeout=0.2), scenario)


def test_a_model_that_cannot_be_loaded_says_why_and_the_next_request_tries_again() -> None:
    async def scenario(site: Site) -> None:
        b = site.hosts[1]
        site.opener.failures["b"] = ["load"]
        for _ in range(2):  # the second is refused without a try
            with pytest.raises(ApiError, match="cannot be loaded: cannot load") as refusal:
                await site.fleet.load(b)
            assert refusal.value.status == 503
        assert site.opener.log == ["a load", "a sleep", "b load"]
        assert await site.fleet.ready(b) == (False, "cannot load")
        b.failed_at -= 60
        await site.fleet.load(b)
        assert await site.fleet.ready(b) == (True, "ready")

    run(Site(115, "a", "b"), scenario)


def test_a_model_that_fails_to_sleep_is_unloaded() -> None:
    async def scenario(site: Site) -> None:
        site.opener.failures["a"].append("sleep")
        await site.fleet.load(site.hosts[1])
        assert site.states == [UNLOADED, LOADED]

    run(Site(115, "a", "b"), scenario)


def test_keep_alive_gives_a_model_up_after_its_last_request() -> None:
    async def scenario(site: Site) -> None:
        a = site.hosts[0]
        await until(lambda: a.state == ASLEEP)  # nobody asked for it
        async with site.fleet.lease(a):
            assert a.state == LOADED
            await turns()
            assert a.state == LOADED
        await until(lambda: a.state == ASLEEP)
        await site.fleet.load(a, keep_alive=1e9)
        await turns()
        assert a.state == LOADED

    run(Site(None, "a", keep_alive="0"), scenario)


def test_the_operator_puts_models_to_sleep_when_their_requests_have_ended() -> None:
    async def scenario(site: Site) -> None:
        a = site.hosts[0]
        async with site.fleet.lease(a):
            sleeping = asyncio.create_task(site.fleet.sleep(a))
            await until(lambda: a.held)
            waiting = asyncio.create_task(site.fleet.load(a))
            await until(lambda: len(a.waiters) == 1)
            assert a.state == LOADED
        assert await sleeping in (ASLEEP, LOADED)
        await waiting  # which woke it again
        assert site.opener.log == ["a load", "a sleep", "a wake"]
        assert await site.fleet.sleep(a) == ASLEEP
        assert await site.fleet.sleep(a, level=2) == UNLOADED
        assert await site.fleet.sleep(a, level=2) == UNLOADED
        await site.fleet.load(a)
        assert site.opener.log[-2:] == ["a stop", "a start"]

    run(Site(None, "a"), scenario)


def test_those_who_wait_hear_of_a_shutdown() -> None:
    async def scenario(site: Site) -> None:
        a, b = site.hosts
        async with site.fleet.lease(a):
            waiting = asyncio.create_task(site.fleet.load(b))
            await until(lambda: len(b.waiters) == 1)
            await site.fleet.close(0.0)
            with pytest.raises(ApiError, match="shutting down"):
                await waiting
            with pytest.raises(ApiError, match="shutting down"):
                await site.fleet.load(b)
        site.fleet.end_clients([Client("gone")])

    run(Site(115, "a", "b"), scenario)


def test_the_plan_refuses_what_never_fits() -> None:
    facts = _FACTS
    plan = make_plan(1 << 30, "cpu")
    assert plan.room == (1 << 30) - SERVER_BYTES
    need = plan.need("m", facts, EngineConfig(), 1)
    assert facts.kv_one <= need.kv < facts.kv_all  # a share of what is left
    assert need.asleep >= ENGINE_BYTES
    assert plan.fits([need])
    assert not plan.fits([need] * 4)
    assert plan.need("m", facts, EngineConfig(memory=7 << 20), 1).kv == 7 << 20  # as stated
    assert plan.need("m", replace(facts, kv_all=60 << 20), EngineConfig(), 1).kv == 60 << 20  # no more than it can use
    with pytest.raises(UserError, match=r"model 'm' needs .* the limit of all models is 300 MiB"):
        make_plan(300 << 20, "cpu").need("m", facts, EngineConfig(), 1)
    with pytest.raises(UserError, match="memory of the GPU is not known"):
        make_plan(0, "cuda")
