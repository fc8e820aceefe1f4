"""The server's client of the engine process: starts it, submits requests, dispatches events, restarts it.

An engine that dies or hangs in a step is replaced; requests in flight get an error that says so, new ones are
refused until the next engine is ready. Decides liveness. Knows tokens and processes, not HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from tokenmill.config import EngineConfig
from tokenmill.engine.messages import Cancel, Events, FromEngine, Phase, Ready, Refused, Submit
from tokenmill.engine.stats import EngineStats
from tokenmill.errors import UserError
from tokenmill.log import get_logger
from tokenmill.serve.errors import ApiError, engine_gone
from tokenmill.serve.generation import Generation, Member
from tokenmill.serve.link import EngineLink, LinkDownError

_log = get_logger(__name__)
_WATCH_SECONDS = 0.25
_PING_SECONDS = 1.0
_START_SILENCE = 120.0  # without messages, while the process imports its libraries from a cold disk
_FIRST_BACKOFF = 0.2
_MAX_BACKOFF = 30.0


class Observer(Protocol):
    """Receives what the engine did: metrics and admission."""

    def on_step(self, stats: EngineStats) -> None: ...

    def on_tokens(self, member: Member, num_tokens: int) -> None: ...

    def on_end(self, member: Member) -> None: ...

    def on_restart(self, reason: str) -> None: ...


class EngineClient:
    def __init__(self, path: Path, config: EngineConfig, stall_timeout: float, on_phase: Callable[[str], None]) -> None:
        self._path = path
        self._config = config
        self._stall_timeout = stall_timeout
        self._on_phase = on_phase
        self._folder = Path(tempfile.mkdtemp(prefix="tokenmill-"))  # readable by this user only
        self._link: EngineLink | None = None
        self._num_links = 0
        self._ready: asyncio.Future[Ready] | None = None
        self._members: dict[str, Member] = {}  # by request id
        self._observers: list[Observer] = []
        self._supervisor: asyncio.Task[None] | None = None
        self._closing = False
        self.state = "starting"  # "ready", "restarting", "closed"
        self.reason = ""  # why the last engine ended
        self.stats = EngineStats()
        self.identity: Ready | None = None

    # --- start and stop ---

    async def start(self) -> Ready:
        """Start the first engine; raises what keeps it from starting."""
        identity = await self._launch()
        self._supervisor = asyncio.create_task(self._supervise(), name="engine-supervisor")
        return identity

    def observe(self, observer: Observer) -> None:
        self._observers.append(observer)

    async def close(self, timeout: float = 2.0) -> None:
        self._closing = True
        self.state = "closed"
        self.fail_all("the server is shutting down")
        if self._supervisor is not None:
            self._supervisor.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._supervisor
        if self._link is not None:
            await self._link.stop(timeout)
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def pid(self) -> int | None:
        return self._link.pid if self._link is not None else None

    async def healthy(self) -> tuple[bool, str]:
        """True only if tokens are generated, or the idle engine loop answers a ping within a second."""
        link = self._link
        if self.state != "ready" or link is None:
            return False, f"the engine is {self.state}" + (f" ({self.reason})" if self.reason else "")
        before = link.heartbeat
        if before.step_age == 0.0 or _silence(link) > _PING_SECONDS:
            if await link.ping(_PING_SECONDS):
                return True, "serving" if self._members else "idle"
            now = link.heartbeat
            moved = now.num_steps > before.num_steps
            if not moved and (now.step_age == 0.0 or _silence(link) > _PING_SECONDS):
                return False, "the engine does not answer"
        age = link.heartbeat.step_age
        return age < self._stall_timeout, f"a step has been running for {age:.1f} s" if age > 1 else "serving"

    # --- requests ---

    def submit(self, generation: Generation) -> None:
        """Submit all prompts of a generation to the engine."""
        if self.state != "ready" or self._link is None:
            raise engine_gone(f"the engine is {self.state}; try again soon")
        try:
            for member in generation.members:
                self._members[member.request.request_id] = member
                self._link.send(Submit.of(member.request))
        except LinkDownError as error:
            self.withdraw(generation)
            raise engine_gone(str(error)) from None

    def withdraw(self, generation: Generation) -> None:
        """Forget a generation; its unfinished sequences are cancelled within a step."""
        for member in generation.members:
            if self._members.pop(member.request.request_id, None) is None:
                continue
            if not member.finished:
                self._cancel(member.request.request_id)
            for observer in self._observers:
                observer.on_end(member)

    @property
    def num_in_flight(self) -> int:
        return len(self._members)

    def _cancel(self, request_id: str, index: int | None = None) -> None:
        if self._link is not None:
            with contextlib.suppress(LinkDownError):
                self._link.send(Cancel(request_id, index))

    # --- from the engine ---

    def _deliver(self, message: FromEngine) -> None:
        match message:
            case Events():
                self._take_events(message)
            case Refused():
                member = self._members.get(message.request_id)
                if member is not None:
                    member.generation.fail(ApiError(400, message.message))
                elif not message.request_id:
                    _log.error("the engine refused a message: %s", message.message)
            case Phase(name=name):
                self._on_phase(name)
            case Ready():
                if self._ready is not None and not self._ready.done():
                    self._ready.set_result(message)

    def _take_events(self, message: Events) -> None:
        self.stats = message.stats
        for event in message.events:
            member = self._members.get(event.request_id)
            if member is None:
                continue  # withdrawn while the step ran
            try:
                if member.take(event):
                    self._cancel(event.request_id, event.index)
            except Exception:
                _log.exception("cannot handle an event of %s", event.request_id)
                self._cancel(event.request_id)
                member.generation.fail(ApiError(500, "internal error while reading the engine's answer"))
                continue
            for observer in self._observers:
                observer.on_tokens(member, len(event.token_ids))
        for observer in self._observers:
            observer.on_step(message.stats)

    # --- supervision ---

    async def _launch(self) -> Ready:
        self._num_links += 1
        link = EngineLink(self._folder, self._num_links, self._deliver)
        self._ready = asyncio.get_running_loop().create_future()
        self._link = link
        await link.launch(str(self._path), self._config)
        ended = asyncio.ensure_future(link.ended())
        try:
            waited = (self._ready, ended)
            while not any(each.done() for each in waited):
                await asyncio.wait(waited, timeout=_WATCH_SECONDS, return_when=asyncio.FIRST_COMPLETED)
                if _silence(link) > max(self._stall_timeout, _START_SILENCE):
                    await link.dump_and_kill()
            if not self._ready.done():
                reason = await ended
                link.close()
                if link.failure is not None and link.failure.user_error:
                    raise UserError(link.failure.message)
                raise RuntimeError(f"the engine process ended while starting: {reason}")
        finally:
            ended.cancel()
        self.identity = self._ready.result()
        self.stats = EngineStats()
        self.state = "ready"
        return self.identity

    async def _supervise(self) -> None:
        while not self._closing:
            assert self._link is not None
            self.reason = await self._watch(self._link)
            self._link.close()
            self.state = "restarting"
            _log.error("the engine process ended (%s); %d requests were in flight", self.reason, len(self._members))
            self.stats = EngineStats(num_pages=self.stats.num_pages)
            self.fail_all(f"the engine stopped ({self.reason}) and is being restarted; send the request again")
            for observer in self._observers:
                observer.on_restart(self.reason)
            await self._restart()

    async def _watch(self, link: EngineLink) -> str:
        """Wait until the process ends or is stuck and killed; returns the reason."""
        ended = asyncio.ensure_future(link.ended())
        try:
            while True:
                done, _ = await asyncio.wait((ended,), timeout=_WATCH_SECONDS)
                if done:
                    return ended.result()
                silence = _silence(link)
                stuck = max(silence, link.heartbeat.step_age)
                if stuck > self._stall_timeout:
                    what = "no sign of life" if silence > link.heartbeat.step_age else "a step that does not end"
                    reason = f"stuck: {what} for {stuck:.1f} s"
                    self.state = "restarting"
                    _log.error("the engine is %s; its stacks follow, then it is killed", reason)
                    await link.dump_and_kill()
                    await ended
                    return reason
        finally:
            ended.cancel()

    async def _restart(self) -> None:
        backoff = _FIRST_BACKOFF
        while not self._closing:
            began = time.monotonic()
            try:
                await self._launch()
            except (UserError, RuntimeError, OSError) as error:
                _log.error("the engine does not start: %s; next try in %.1f s", error, backoff)
                await asyncio.sleep(backoff)
                backoff = min(2 * backoff, _MAX_BACKOFF)
            else:
                _log.warning("the engine is serving again after %.1f s", time.monotonic() - began)
                return

    def fail_all(self, message: str) -> None:
        for member in list(self._members.values()):
            member.generation.fail(engine_gone(message))


def _silence(link: EngineLink) -> float:
    return time.monotonic() - link.last_sign
