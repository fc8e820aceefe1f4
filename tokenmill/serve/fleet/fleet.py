"""Which models are loaded: on demand, within the memory plan, the least recently used given up first.

A request takes a lease on its model and returns it when its answer has left; a model with leases is never given up.
Where a model does not fit beside those that are loaded, its requests wait, in a queue with a bound and a deadline;
those of a model that must go wait too, behind them, once that model has had its turn, so that nobody starves. One task
moves models, one at a time. Knows neither HTTP nor how an engine starts (host.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from tokenmill.errors import UserError
from tokenmill.log import get_logger
from tokenmill.serve.errors import ApiError
from tokenmill.serve.fleet.catalog import ModelSpec, added
from tokenmill.serve.fleet.facts import find_facts
from tokenmill.serve.fleet.host import ASLEEP, LOADED, UNLOADED, Host, Opener
from tokenmill.serve.fleet.plan import MemoryPlan
from tokenmill.serve.fleet.routing import Routes, may_use
from tokenmill.serve.tenants.keys import Client

if TYPE_CHECKING:
    from tokenmill.serve.service import Service

_log = get_logger(__name__)
_POLL_SECONDS = 0.05  # while a model is waited for that has requests
_BUSY_SECONDS = 1.0  # until a model that was to be given up is looked at again
_RETRY_SECONDS = 5.0
_MAX_WAITING_BODIES = 8  # of the largest size allowed, in memory while their models are loaded


class Fleet:
    def __init__(
        self, hosts: list[Host], routes: Routes, plan: MemoryPlan, opener: Opener, max_waiting: int, load_timeout: float
    ) -> None:
        """`max_waiting`: requests that may wait for models, with bodies of at most `_MAX_WAITING_BODIES` times the
        largest one allowed; `load_timeout`: seconds that one may wait."""
        self.hosts = {host.name: host for host in hosts}
        self.routes = routes
        self.plan = plan
        self.draining = False
        self._opener = opener
        self._max_waiting = max_waiting
        self._load_timeout = load_timeout
        self._waiting_of: Counter[str] = Counter()  # requests, by key
        self._bytes_of: Counter[str] = Counter()  # of their bodies
        self._changed = asyncio.Event()
        self._moving = asyncio.Lock()
        self._mover: asyncio.Task[None] | None = None
        self._moves: set[asyncio.Task[bool]] = set()  # that operators asked for

    # --- life ---

    async def start(self) -> bool:
        """Load the first model, and those after it that fit beside it. Raises what keeps one from being loaded."""
        for number, host in enumerate(self.hosts.values()):
            if number == 0 or self._fits_beside(host):
                await host.load(self._opener)
                self._expire_later(host)
        self._mover = asyncio.create_task(self._move_models(), name="model-mover")
        return True

    def drain(self) -> None:
        """Take no more requests; those that wait for a model are refused."""
        self.draining = True
        for service in self.services:
            service.admission.draining = True
        for host in self.hosts.values():
            self._fail(host, _shutting_down())

    async def close(self, timeout: float) -> None:
        self.draining = True
        if self._mover is not None:
            self._mover.cancel()
            await asyncio.gather(self._mover, return_exceptions=True)
        for host in self.hosts.values():
            self._fail(host, _shutting_down())
            await self._opener.shut(host)
            if host.service is not None:
                await host.service.engine.close(timeout)

    async def adopt(self, source: str) -> None:
        """One more model, which is on this disk, loaded when it is asked for. Raises UserError if it never fits."""
        if source in self.routes:
            return
        if any(source in host.adapter_names for host in self.hosts.values()):
            raise UserError(f"an adapter is called '{source}'", "unload it first")
        host = await asyncio.to_thread(plan_host, added(self.default.spec, source), self.plan)
        if source not in self.routes:
            self.hosts[host.name] = host
            self.routes.add(host.spec.names)

    # --- for requests ---

    @property
    def default(self) -> Host:
        """The model whose application answers what concerns no model; it was loaded at the start."""
        return self.hosts[self.routes.default]

    @property
    def services(self) -> list[Service]:
        """Of the models that were loaded at some time."""
        return [host.service for host in self.hosts.values() if host.service is not None]

    @property
    def num_in_flight(self) -> int:
        return sum(service.engine.num_in_flight for service in self.services)

    @property
    def num_waiting(self) -> int:
        return sum(len(host.waiters) for host in self.hosts.values())

    def body_limit(self, path: str) -> int:
        """Bytes of a body of which it is not known yet which model it is for: the limit of the most generous one."""
        return max(host.body_limit(path) for host in self.hosts.values())

    def services_for(self, client: Client) -> list[Service]:
        """Of the models that were loaded and that the key may use."""
        hosts = (host for host in self.hosts.values() if may_use(client, host.name))
        return [host.service for host in hosts if host.service is not None]

    def find(self, name: str | None, client: Client) -> Host:
        """By the name of a model, or of an adapter, which its base answers."""
        if name is not None and not self.routes.knows(name) and client.may_use(name):
            for host in self.hosts.values():
                if name in host.adapter_names and may_use(client, host.name):
                    return host
        return self.hosts[self.routes.find(name, client)]

    def has_room(self, client: Client, name: str | None) -> bool:
        """Whether a row of a batch may start that asks for this model or adapter. One that nobody answers may: it is
        refused then, and waits for nothing."""
        hosts = [self.hosts[own] for own in self.routes.all_of(name, client)]
        hosts = hosts or [host for host in self.hosts.values() if name in host.adapter_names]
        services = [host.service for host in hosts]
        first = self.default.service
        takes = not services or any(each is None or each.takes_row for each in services)
        return first is not None and first.may_add_row(client) and takes

    def is_taken(self, name: str, host: Host) -> bool:
        """Whether a new adapter of `host` must not have this name: requests would go to the wrong model."""
        others = (each for each in self.hosts.values() if each is not host)
        return self.routes.knows(name) or any(name in each.adapter_names for each in others)

    @asynccontextmanager
    async def lease(
        self, host: Host, deadline: float | None = None, client: Client | None = None, num_bytes: int = 0
    ) -> AsyncIterator[None]:
        """The model is loaded within the block. `deadline`: seconds that may pass before; `client`: who waits, None
        for the operator; `num_bytes`: of a body that is kept meanwhile. Raises ApiError."""
        host.last_used = time.monotonic()
        if not host.usable:
            self._check_queue(host, client, num_bytes)
            name = client.name if client is not None else ""
            self._waiting_of[name] += 1
            self._bytes_of[name] += num_bytes
            try:
                await self._wait(host, deadline)
            finally:
                self._waiting_of[name] -= 1
                self._bytes_of[name] -= num_bytes
                self._waiting_of += Counter()  # forgets those without any
                self._bytes_of += Counter()
        else:
            host.leases += 1
        host.expires = math.inf
        try:
            yield
        finally:
            self._return(host)

    def _check_queue(self, host: Host, client: Client | None, num_bytes: int) -> None:
        """Raise ApiError if no more may wait, or the model could not be loaded a moment ago."""
        if self.draining:
            raise _shutting_down()
        if host.failure and time.monotonic() < host.failed_at + _RETRY_SECONDS:
            raise _unavailable(host)
        room = _MAX_WAITING_BODIES * self.body_limit("")
        if self.num_waiting >= self._max_waiting or self._bytes_of.total() + num_bytes > room:
            problem = "the queue of requests for models that must be loaded is full"
            raise ApiError(429, problem, code="queue_full", retry_after=_RETRY_SECONDS)
        if client is None or not self._waiting_of[client.name]:
            return
        share = client.queue_share
        too_many = self._waiting_of[client.name] >= share * self._max_waiting
        if too_many or self._bytes_of[client.name] + num_bytes > share * room:
            problem = f"key '{client.name}' has its share of the requests that wait for models"
            raise ApiError(429, problem, code="queue_share", retry_after=_RETRY_SECONDS)

    async def _wait(self, host: Host, deadline: float | None) -> None:
        """Until the model is loaded, with a lease on it."""
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiter = time.monotonic(), ready
        host.waiters.append(waiter)
        self._changed.set()
        seconds = self._load_timeout if deadline is None else min(deadline, self._load_timeout)
        try:
            async with asyncio.timeout(seconds):
                await ready
        except BaseException as error:
            if waiter in host.waiters:
                host.waiters.remove(waiter)
            elif ready.done() and not ready.cancelled() and ready.exception() is None:
                self._return(host)  # granted, but nobody takes it
            if not isinstance(error, TimeoutError):
                raise
            problem = f"model '{host.name}' was not loaded within {seconds:.0f} s"
            late = deadline is not None and deadline <= self._load_timeout
            code = "deadline" if late else "model_loading"
            raise ApiError(429 if late else 503, problem, code=code, retry_after=_RETRY_SECONDS) from None

    def _return(self, host: Host) -> None:
        host.leases -= 1
        host.last_used = time.monotonic()
        if not host.leases:
            self._expire_later(host)
            self._changed.set()

    # --- for the operator ---

    async def load(self, host: Host, keep_alive: float | None = None) -> None:
        async with self.lease(host):
            host.keep_alive = host.keep_alive if keep_alive is None else keep_alive

    async def sleep(self, host: Host, level: int = 1) -> str:
        """Give a model up as soon as its requests have ended; new ones wait, and load it again. Level 2 ends its
        process. Returns its state."""
        if host.state == UNLOADED or (host.state == ASLEEP and level < 2):
            return host.state
        host.held += 1
        try:
            async with asyncio.timeout(self._load_timeout):
                while True:  # a caller who leaves stops no move halfway
                    move = asyncio.create_task(self._give_up(host, level))
                    self._moves.add(move)
                    move.add_done_callback(self._moves.discard)
                    if await asyncio.shield(move):
                        break
                    await asyncio.sleep(_POLL_SECONDS)
        except TimeoutError:
            raise ApiError(503, f"model '{host.name}' still has requests", code="model_busy", retry_after=1) from None
        finally:
            host.held -= 1
            self._changed.set()
        return host.state

    async def _give_up(self, host: Host, level: int) -> bool:
        """False: it has requests."""
        async with self._moving:
            if host.busy:
                return False
            if level >= 2 and host.state != UNLOADED:
                await host.unload(self._opener)
            elif host.state == LOADED:
                await host.sleep(self._opener)
        return True

    def end_clients(self, clients: Collection[Client]) -> None:
        for service in self.services:
            service.end_clients(clients)

    async def ready(self, host: Host) -> tuple[bool, str]:
        """Whether the model answers, or would once it is loaded again."""
        if host.service is None:
            return not host.failure, host.failure or host.moving or UNLOADED
        if host.state != LOADED or host.moving:
            return True, host.moving or host.state
        return await host.service.engine.ready()

    # --- moving models ---

    async def _move_models(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._patience()):  # wait_for of Python 3.11 may lose a cancellation
                    await self._changed.wait()
            self._changed.clear()
            try:
                await self._serve_waiting()
                await self._give_up_expired()
            except Exception:
                _log.exception("cannot move models")
                await asyncio.sleep(_POLL_SECONDS)

    def _patience(self) -> float | None:
        if self.num_waiting:
            return _POLL_SECONDS
        soonest = min(host.expires for host in self.hosts.values())
        return None if soonest == math.inf else max(0.0, soonest - time.monotonic())

    async def _serve_waiting(self) -> None:
        """The model whose request has waited longest comes first; without room for it, no other is loaded either."""
        for host in self.hosts.values():
            host.yielding = False  # unless somebody still waits for its memory
        waited_for = [host for host in self.hosts.values() if host.waiters]
        for host in sorted(waited_for, key=lambda each: each.waiters[0][0]):
            if host.usable:
                self._grant(host)
            elif host.held or host.moving:  # it is being given up, by the operator
                continue
            elif await self._make_room(host):
                await self._load(host)
            else:
                return

    async def _load(self, host: Host) -> None:
        try:
            async with self._moving:
                await host.load(self._opener)
        except Exception as error:
            host.failure, host.failed_at = str(error) or type(error).__name__, time.monotonic()
            _log.error("model '%s' cannot be loaded: %s", host.name, host.failure)
            self._fail(host, _unavailable(host))
        else:
            self._grant(host)

    def _grant(self, host: Host) -> None:
        for _, ready in host.waiters:
            if not ready.done():
                host.leases += 1
                ready.set_result(None)
        host.waiters.clear()
        if not host.leases:  # those who waited have left
            self._expire_later(host)

    def _fail(self, host: Host, error: ApiError) -> None:
        for _, ready in host.waiters:
            if not ready.done():
                ready.set_exception(error)
        host.waiters.clear()

    async def _make_room(self, wanted: Host) -> bool:
        """Give models up until `wanted` fits. False: one that must go has requests; it takes no new ones."""
        while not self._fits_beside(wanted):
            victim = self._victim(wanted)
            if victim is None:
                return True  # the plan has seen that it fits alone
            if victim.busy:
                if time.monotonic() >= victim.turn_ends:
                    victim.yielding = True
                return False
            async with self._moving:
                if victim.busy:
                    return False
                if victim.state == LOADED:
                    await victim.sleep(self._opener)
                elif victim.state == ASLEEP:
                    await victim.unload(self._opener)
        return True

    def _victim(self, wanted: Host) -> Host | None:
        """Idle ones first, then those that sleep, then busy ones; of each the least recently used."""
        others = [host for host in self.hosts.values() if host is not wanted and host.state != UNLOADED]
        rank = {LOADED: 0, ASLEEP: 1}
        return min(others, key=lambda host: (host.busy, rank[host.state], host.last_used), default=None)

    def _fits_beside(self, wanted: Host) -> bool:
        others = [host for host in self.hosts.values() if host is not wanted]
        awake = [host.need for host in others if host.state == LOADED]
        return self.plan.fits([wanted.need, *awake], [host.need for host in others if host.state == ASLEEP])

    def _expire_later(self, host: Host) -> None:
        host.expires = time.monotonic() + host.keep_alive

    async def _give_up_expired(self) -> None:
        for host in self.hosts.values():
            if host.expires > time.monotonic():
                continue
            if host.busy or host.waiters:  # such as by a response in the background, which has no lease
                host.expires = time.monotonic() + _BUSY_SECONDS
                continue
            host.expires = math.inf
            async with self._moving:
                if host.state == LOADED and not host.busy:
                    await host.sleep(self._opener)


def _shutting_down() -> ApiError:
    return ApiError(503, "the server is shutting down", code="draining", retry_after=5)


def _unavailable(host: Host) -> ApiError:
    problem = f"model '{host.name}' cannot be loaded: {host.failure}"
    return ApiError(503, problem, code="model_unavailable", retry_after=_RETRY_SECONDS)


def plan_host(spec: ModelSpec, plan: MemoryPlan) -> Host:
    """A model with what it needs. Raises UserError for one that is not found, or does not fit even alone."""
    facts = find_facts(spec.source, spec.engine)
    if plan.room is None:
        return Host(spec, facts)
    return Host(spec, facts, plan.need(spec.name, facts, spec.engine, spec.config.text_workers))
