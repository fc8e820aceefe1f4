"""The server's client of the engine process: starts it, submits requests, dispatches events, restarts it.

An engine that dies or hangs is replaced, by a spare process that has its libraries loaded; requests in flight get an
error that says so, new ones are refused until the next engine is ready. One that nobody needs can sleep, or be stopped
and started again. Knows tokens and processes, not HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tokenmill.config import EngineConfig
from tokenmill.engine.messages import (
    AdapterAnswer,
    Cancel,
    Events,
    FromEngine,
    Heartbeat,
    Pages,
    Phase,
    Ready,
    Refused,
    Rest,
    Rested,
    SourceWanted,
    Submit,
    ToEngine,
    WatchPages,
)
from tokenmill.engine.stats import EngineStats
from tokenmill.errors import UserError
from tokenmill.hardware.machine import usable_cores
from tokenmill.log import get_logger
from tokenmill.serve.errors import ApiError, engine_gone
from tokenmill.serve.generation import Generation, Member
from tokenmill.serve.supervision.adapter_questions import AdapterQuestions, Question, replacement_config
from tokenmill.serve.supervision.link import EngineLink, LinkDownError
from tokenmill.serve.supervision.listening import Observer, refusal
from tokenmill.serve.supervision.page_feed import PageFeed
from tokenmill.serve.supervision.spare import SpareEngine
from tokenmill.serve.supervision.starting import WATCH_SECONDS, until_ready
from tokenmill.serve.supervision.watchdog import Watchdog

_log = get_logger(__name__)
_PING_SECONDS = 1.0
_FIRST_BACKOFF = 0.2
_MAX_BACKOFF = 30.0
_SPARE_DELAY = 5.0  # after an engine is ready: the first requests come first


class EngineClient:
    def __init__(
        self,
        path: Path,
        config: EngineConfig,
        stall_timeout: float,
        on_phase: Callable[[str], None],
        keep_spare: bool = False,
        step_log: str = "",
        meters: bool = False,
        spare: SpareEngine | None = None,
    ) -> None:
        """`keep_spare`: a process with the engine's libraries waits to replace it: `spare`, if others use it too.
        `step_log`: folder. `meters`: the engine divides the time of its steps among tenants, for `on_device_time`."""
        self.path, self._config = path, config
        self.pages = PageFeed(path, self._ask)
        self._step_log, self._meters = step_log, meters
        self._watchdog, self._on_phase = Watchdog(stall_timeout), on_phase
        self._keep_spare, self._owns_spare = keep_spare, spare is None
        self._spare = spare or SpareEngine()
        self._folder = Path(tempfile.mkdtemp(prefix="tokenmill-"))  # readable by this user only
        self._link: EngineLink | None = None
        self._num_links = 0
        self._ready: asyncio.Future[Ready] | None = None
        self._rested: asyncio.Future[Rested] | None = None
        self._members: dict[str, Member] = {}  # by request id
        self.adapters = AdapterQuestions(self._ask)
        self._observers: list[Observer] = []
        self.on_device_time: Callable[[dict[str, float]], None] = lambda _seconds: None
        self.on_stopped: Callable[[], None] = lambda: None
        self.on_source_wanted: Callable[[Member], None] = lambda _member: None
        self.rescue: Callable[[Member], bool] = lambda _member: False  # True: another engine goes on with the request
        self._supervisor: asyncio.Task[None] | None = None
        self._closing = False
        self.state = "starting"  # "ready", "asleep", "stopped", "restarting", "closed"
        self.reason = ""  # why the last engine ended
        self.start_failure = ""  # why the next one does not start
        self.stats = EngineStats()
        self.identity: Ready | None = None

    # --- start and stop ---

    async def start(self) -> Ready:
        """Start an engine, the first or one after `stop`; raises what keeps it from starting. With a core to itself the
        spare process imports its libraries while the engine does, so that no request pays for it."""
        if self._keep_spare:  # it imports the engine's libraries: that is most of what a restart takes
            self._spare.prepare(0.0 if usable_cores() > 1 else _SPARE_DELAY)
        identity = await self._launch()
        self._supervisor = asyncio.create_task(self._supervise(), name="engine-supervisor")
        return identity

    def observe(self, observer: Observer) -> None:
        self._observers.append(observer)

    async def close(self, timeout: float = 2.0) -> None:
        """End the engine within `timeout` seconds. One that is not ready has nothing to save and is killed at once."""
        self._closing, was_ready, self.state = True, self.state == "ready", "closed"
        self.fail_all("the server is shutting down")
        await self._end_supervision()
        if self._owns_spare:
            await self._spare.close()
        if self._link is not None:
            await self._link.stop(timeout if was_ready else 0.0)
        shutil.rmtree(self._folder, ignore_errors=True)

    async def stop(self, timeout: float = 2.0) -> None:
        """End the engine, which has no requests, until `start` is called again."""
        was_ready, self.state = self.state == "ready", "stopped"
        await self._end_supervision()
        if self._link is not None:
            await self._link.stop(timeout if was_ready else 0.0)
        self._on_stopped("")

    async def rest(self, asleep: bool) -> int:
        """Have the engine, which has no requests, sleep or wake up; returns the bytes given back. Raises RuntimeError
        if it does not: an engine that cannot wake has ended."""
        link = self._link
        assert link is not None
        rested = self._rested = asyncio.get_running_loop().create_future()
        if asleep:
            self.state = "asleep"  # nothing is submitted from now on
        try:
            link.send(Rest(asleep))
            while not rested.done() and self.state == "asleep":
                await asyncio.wait((rested,), timeout=WATCH_SECONDS)
            answer = rested.result() if rested.done() else None
        except LinkDownError as error:
            raise RuntimeError(str(error)) from None
        finally:
            self._rested = None
        if answer is not None and self.state == "asleep" and not answer.asleep:
            self.state = "ready"
        if answer is None or answer.asleep != asleep:
            raise RuntimeError(answer.problem if answer is not None else self.reason or f"the engine is {self.state}")
        return answer.bytes

    async def _end_supervision(self) -> None:
        task, self._supervisor = self._supervisor, None
        if task is not None:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await task

    def _on_stopped(self, reason: str) -> None:
        self.state, self.reason = "stopped", reason
        self.stats, self._link = EngineStats(), None
        self.on_stopped()

    @property
    def pid(self) -> int | None:
        return self._link.pid if self._link is not None else None

    @property
    def heartbeat(self) -> Heartbeat:
        """The last one of the engine; an empty one while there is none."""
        return self._link.heartbeat if self._link is not None else Heartbeat()

    @property
    def spare_pid(self) -> int | None:
        return self._spare.pid

    @property
    def supervised(self) -> bool:
        """Whether an engine that ends would be replaced: the liveness of the server, whatever the engine does."""
        resting = self._closing or self.state == "stopped"
        return resting or (self._supervisor is not None and not self._supervisor.done())

    async def ready(self) -> tuple[bool, str]:
        """True if the engine is busy with work within its time, or its idle loop answers a ping within a second."""
        link = self._link
        if self.state != "ready" or link is None:
            why = "; ".join(text for text in (self.reason, self.start_failure) if text)
            return False, f"the engine is {self.state}" + (f" ({why})" if why else "")
        busy = self._watchdog.busy(link, _PING_SECONDS)
        if busy is not None:
            return True, busy
        if await link.ping(_PING_SECONDS):
            return True, "serving" if self._members else "idle"
        busy = self._watchdog.busy(link, _PING_SECONDS)
        return busy is not None, busy or "the engine does not answer"

    # --- requests ---

    def submit(self, generation: Generation) -> None:
        """Submit all prompts of a generation to the engine."""
        self._check_ready()
        try:
            for member in generation.members:
                self.take_on(member)
        except ApiError:
            self.withdraw(generation)
            raise

    def take_on(self, member: Member) -> None:
        """Submit one prompt of a generation."""
        self._ask(Submit.of(member.request))
        self._members[member.request.request_id] = member

    def withdraw(self, generation: Generation) -> None:
        """Forget a generation; its unfinished sequences are cancelled within a step."""
        for member in generation.members:
            if self._members.pop(member.request.request_id, None) is None:
                continue
            if not member.finished:
                self._cancel(member.request.request_id)
            for observer in self._observers:
                observer.on_end(member)

    def _check_ready(self) -> EngineLink:
        if self.state != "ready" or self._link is None:
            raise engine_gone(f"the engine is {self.state}; try again soon")
        return self._link

    def _ask(self, question: Question | Submit | WatchPages) -> None:
        try:
            self._check_ready().send(question)
        except LinkDownError as error:
            raise engine_gone(str(error)) from None

    @property
    def num_in_flight(self) -> int:
        return len(self._members)

    def _cancel(self, request_id: str, index: int | None = None) -> None:
        self.tell(Cancel(request_id, index))

    def tell(self, message: ToEngine) -> None:
        """Send what an engine that is gone needs no more."""
        if self._link is not None:
            with contextlib.suppress(LinkDownError):
                self._link.send(message)

    # --- from the engine ---

    def _deliver(self, message: FromEngine) -> None:
        match message:
            case Events():
                self._take_events(message)
            case Pages():
                self.pages.take(message)
            case Refused():
                member = self._members.get(message.request_id)
                if member is not None:
                    member.generation.fail(refusal(message))
                elif not message.request_id:
                    _log.error("the engine refused a message: %s", message.message)
            case SourceWanted():
                member = self._members.get(message.request_id)
                if member is not None:
                    self.on_source_wanted(member)
            case AdapterAnswer():
                self.adapters.take(message)
            case Phase(name=name):
                self._on_phase(name)
            case Rested():
                if self._rested is not None and not self._rested.done():
                    self._rested.set_result(message)
            case Ready():
                if self._ready is not None and not self._ready.done():
                    self._ready.set_result(message)

    def _take_events(self, message: Events) -> None:
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
        if message.device_seconds:
            self.on_device_time(message.device_seconds)
        if message.stats is not None:
            self.stats = message.stats
            for observer in self._observers:
                observer.on_step(message.stats)

    # --- supervision ---

    async def _launch(self) -> Ready:
        """Start an engine and wait until it is ready. Whatever goes wrong, nothing of it is left."""
        if not self._folder.is_dir():  # temporary folders get cleaned up
            self._folder = Path(tempfile.mkdtemp(prefix="tokenmill-"))
        self._num_links += 1
        link = EngineLink(self._folder, self._num_links, self._deliver)
        self._link = link
        self._ready = asyncio.get_running_loop().create_future()
        try:
            config, paths = replacement_config(self._config, self.identity), self.adapters.paths()
            await link.launch(str(self.path), config, self._spare.take(), self._step_log, self._meters, paths)
            self.identity = await until_ready(link, self._ready, self._watchdog)
        except BaseException:
            link.kill()
            link.close()
            raise
        self.adapters.enter(self.identity)
        self.pages.restart()
        self.stats = EngineStats()
        self.start_failure = ""
        self.state = "ready"
        if self._keep_spare:
            self._spare.prepare(_SPARE_DELAY)
        return self.identity

    async def _supervise(self) -> None:
        """Replace each engine that ends. Nothing but closing the client ends this."""
        while not self._closing:
            assert self._link is not None
            try:
                reason = await self._watch(self._link)
            except Exception as error:
                _log.exception("cannot watch the engine process; it is killed")
                reason = f"not supervised: {error}"
            self._link.kill()
            self._link.close()
            if self.state == "asleep":  # it is started again when it is needed
                _log.error("the engine process ended while it was asleep: %s", reason)
                self._on_stopped(reason)
                return
            self._on_ended(reason)
            await self._restart()

    def _on_ended(self, reason: str) -> None:
        self.state, self.reason = "restarting", reason
        _log.error("the engine process ended (%s); %d requests were in flight", reason, len(self._members))
        self.stats = EngineStats(num_pages=self.stats.num_pages)
        for request_id, member in list(self._members.items()):
            if not member.finished and self.rescue(member):
                del self._members[request_id]
        self.fail_all(f"the engine stopped ({reason}) and is being restarted; send the request again")
        for observer in self._observers:
            try:
                observer.on_restart(reason)
            except Exception:
                _log.exception("an observer failed")

    async def _watch(self, link: EngineLink) -> str:
        """Wait until the process ends or is stuck and killed; returns the reason."""
        ended = asyncio.ensure_future(link.ended())
        self._watchdog.start()
        try:
            while True:
                done, _ = await asyncio.wait((ended,), timeout=WATCH_SECONDS)
                if done:
                    return ended.result()
                hang = self._watchdog.look(link)
                if hang is not None:
                    self.state = "restarting"
                    _log.error("the engine is stuck: %s; its stacks follow, then it is killed", hang)
                    await link.dump_and_kill()
                    await ended
                    return f"stuck: {hang}"
        finally:
            ended.cancel()

    async def _restart(self) -> None:
        """Try until an engine is ready, at a pace that falls to one try in half a minute; `start_failure` says what
        keeps it from starting."""
        backoff, num_failures, began = _FIRST_BACKOFF, 0, time.monotonic()
        while not self._closing:
            try:
                await self._launch()
            except Exception as error:  # such as no memory, no file descriptors, a file that is gone
                num_failures += 1
                self.start_failure = f"start {num_failures} failed: {str(error) or type(error).__name__}"
                expected = isinstance(error, UserError | RuntimeError | OSError)
                _log.error("the engine does not start: %s; next try in %.1f s", error, backoff, exc_info=not expected)
                await asyncio.sleep(backoff)
                backoff = min(2 * backoff, _MAX_BACKOFF)
            else:
                _log.warning("the engine is serving again after %.1f s", time.monotonic() - began)
                return

    def fail_all(self, message: str) -> None:
        for member in list(self._members.values()):
            member.generation.fail(engine_gone(message))
        self.adapters.fail(engine_gone(message))
