"""The engine loop: the one place that drives an engine, whichever face its caller sees.

LLM, AsyncEngine and the engine process submit and cancel requests and are told what came of them (`Listener`); where
their messages come from is an `Inbox`. Requests with structured output wait here for their grammar; requests whose
deadline has passed, or whose adapter cannot be had, are dropped before a step computes them; idle moments check the
pages and do the engine's idle work. One thread calls everything; only `activity` may be read from another.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from tokenmill.engine.activity import IDLE, Activity
from tokenmill.engine.adapters.registry import NOT_FOUND, AdapterError, AdapterRegistry
from tokenmill.engine.deadlines import DeadlineError, Deadlines
from tokenmill.engine.grammar_queue import GrammarQueue
from tokenmill.engine.stats import EngineStats
from tokenmill.errors import UserError
from tokenmill.grammar.compiler import GrammarCompiler
from tokenmill.log import get_logger
from tokenmill.types import Request, TokenEvent

_log = get_logger(__name__)
_SHORT_WAIT = 0.002  # seconds: for messages between two pieces of idle work, or for a grammar between messages
_IDLE_WORK_LIMIT = 300.0  # seconds: a piece of it may compile kernels or capture a graph
_CHECK_AFTER_IDLE = 0.2  # seconds without any work before the pages are checked
_CHECK_SHARE = 0.01  # of the time, at most, goes into checking pages


class Core(Protocol):
    """What the loop drives: EngineCore, or the core of an encoder."""

    stats: EngineStats

    @property
    def has_work(self) -> bool: ...

    def add(self, request: Request) -> None: ...

    def cancel(self, request_id: str, index: int | None = None) -> bool: ...

    def knows(self, request_id: str) -> bool: ...

    def step(self, run: int = 1) -> list[TokenEvent]: ...

    def using(self, digest: bytes) -> Sequence[Request]:
        """The sequences of an adapter that wait or run."""
        ...

    def measure(self) -> None:
        """Bring the gauges up to date."""
        ...

    def check(self) -> None:
        """Raise AssertionError if what it holds is inconsistent."""
        ...


class Listener(Protocol):
    """Is told what the loop did."""

    def on_events(self, events: list[TokenEvent]) -> None:
        """What a step brought; empty where only the statistics have changed."""
        ...

    def on_refused(self, request_id: str, error: UserError) -> None:
        """A request that was submitted cannot be computed."""
        ...


class Inbox(Protocol):
    """Where the messages of callers come from."""

    @property
    def closed(self) -> bool: ...

    def receive(self, timeout: float | None) -> None:
        """Apply all that has come; wait for the first of it for at most `timeout` seconds (None: its own choice)."""
        ...


class _NoListener:
    def on_events(self, events: list[TokenEvent]) -> None: ...

    def on_refused(self, request_id: str, error: UserError) -> None:
        raise AssertionError(f"request {request_id} was refused: {error}")


class EngineLoop:
    def __init__(
        self,
        core: Core,
        listener: Listener | None = None,
        grammars: GrammarCompiler | None = None,
        idle_work: Sequence[Callable[[], bool]] = (),
        activity: Activity | None = None,
        clock: Callable[[], float] = time.monotonic,
        adapters: AdapterRegistry | None = None,
    ) -> None:
        """`idle_work`: each is called in idle moments until it returns False (nothing left), anew after each step.
        `activity` is kept up to date for a watchdog."""
        self.core = core
        self.activity = activity or Activity(clock=clock)
        self._clock = clock
        self._listener = listener or _NoListener()
        self._grammars = GrammarQueue(grammars)
        self._adapters = adapters
        if adapters is not None:
            adapters.count_waiting = self._grammars.count_of
        self._idle_work = tuple(idle_work)
        self._idle_left = deque(self._idle_work)
        self._worked = False  # idle work was done that the listener has not heard of
        self._deadlines = Deadlines()
        self._is_stale = False  # gauges have changed without a step
        self._is_unchecked = False  # pages moved since they were last checked
        self._check_at = 0.0  # not before this time
        self._next_check = 0.0  # the same, by what the last check took

    # --- requests ---

    def submit(self, request: Request) -> None:
        self._deadlines.add(request)
        if request.params.structured is not None and request.grammar is None:
            self._grammars.add(request)
        else:
            self._add(request)

    def cancel(self, request_id: str, index: int | None = None) -> bool:
        """Forget a request and its siblings, or only the one at `index`. False: not known."""
        waited = self._grammars.cancel(request_id)
        cancelled = self.core.cancel(request_id, index)
        if not self.knows(request_id):
            self._deadlines.remove(request_id)
        if cancelled:
            self._is_stale = True
            self._pages_moved()
        return waited or cancelled

    def knows(self, request_id: str) -> bool:
        return request_id in self._grammars or self.core.knows(request_id)

    @property
    def has_work(self) -> bool:
        return self.core.has_work or len(self._grammars) > 0

    # --- driving ---

    def run(self, inbox: Inbox) -> None:
        """Until the inbox is closed: take messages in, then step, or use the idle moment."""
        while not inbox.closed:
            self.activity.begin(IDLE)
            inbox.receive(self._patience())
            self.turn()

    @property
    def _changes_adapters(self) -> bool:
        return self._adapters is not None and self._adapters.is_busy

    def drain(self, run: int = 1) -> None:
        """Until no request is left. `run`: as in EngineCore.step."""
        while self.has_work:
            self.turn(run)

    def turn(self, run: int = 1) -> None:
        """One step; without work a short wait for a grammar, or a piece of what idle moments are for."""
        if len(self._grammars):
            self._take_grammars()
        if len(self._deadlines):
            self._drop_late_requests()
        if self._changes_adapters:
            self._change_adapters()
        if self.core.has_work:
            self._step(run)
        elif len(self._grammars):
            self._grammars.wait(_SHORT_WAIT)
        elif self._is_stale:
            self._report_gauges()
        elif self._idle_left:
            self._work_idle()
        elif self._is_unchecked and self._clock() >= self._check_at:
            self._check_pages()

    # --- how ---

    def _patience(self) -> float | None:
        """How long the inbox may wait for a message."""
        if self.has_work or self._is_stale:
            return 0.0
        if self._idle_left or self._changes_adapters:
            return _SHORT_WAIT
        return max(0.0, self._check_at - self._clock()) if self._is_unchecked else None

    def _take_grammars(self) -> None:
        self.activity.begin("taking grammars")
        for outcome in self._grammars.take():
            if isinstance(outcome, Request):
                self._add(outcome)
            else:
                self._refuse(*outcome)

    def _add(self, request: Request) -> None:
        ref = request.adapter
        if ref is not None and (self._adapters is None or not self._adapters.knows(ref)):  # unloaded since it came
            self._refuse(
                request.request_id,
                AdapterError(f"adapter '{ref.name}' is not loaded", "load it, or ask for another model", NOT_FOUND),
            )
        else:
            self.core.add(request)

    def _refuse(self, request_id: str, error: UserError) -> None:
        self._deadlines.remove(request_id)
        self._listener.on_refused(request_id, error)

    def _change_adapters(self) -> None:
        """Take in adapters that were read, let go of unloaded ones, refuse requests of those that cannot be had."""
        self.activity.begin("changing adapters")
        assert self._adapters is not None
        for digest, error in self._adapters.poll():
            for request_id in {request.request_id for request in self.core.using(digest)}:
                self.cancel(request_id)
                self._refuse(request_id, error)
        self._is_stale = self._is_stale or not self._adapters.is_busy  # the last change: gauges tell of it

    def _drop_late_requests(self) -> None:
        """Nobody waits any more for a request without a first token at its deadline, wherever it is."""
        for request_id in self._deadlines.take_passed(self._clock()):
            self.cancel(request_id)
            self.core.stats.num_expired += 1
            self._is_stale = True
            self._listener.on_refused(request_id, DeadlineError())

    def _step(self, run: int) -> None:
        self.activity.begin("a step")
        events = self.core.step(run)
        self.activity.begin("sending events")
        self._is_stale = False
        self._pages_moved()
        self._idle_left = deque(self._idle_work)
        if len(self._deadlines):
            for event in events:
                self._deadlines.remove(event.request_id)
        self._listener.on_events(events)

    def _pages_moved(self) -> None:
        self._is_unchecked = True
        self.core.stats.pages_checked = False
        self._check_at = max(self._clock() + _CHECK_AFTER_IDLE, self._next_check)

    def _report_gauges(self) -> None:
        self.activity.begin("sending events")
        self._is_stale = False
        self.core.measure()
        self._listener.on_events([])

    def _check_pages(self) -> None:
        """The page invariant. It takes time for every page there is: only after a while without work, and rarely."""
        self.activity.begin("checking pages")
        self._is_unchecked = False
        stats, began = self.core.stats, self._clock()
        try:
            self.core.check()
            stats.pages_consistent = True
        except AssertionError as error:
            stats.pages_consistent = False
            _log.error("KV pages are inconsistent: %s", error)
        stats.pages_checked = True
        now = self._clock()
        self._next_check = now + (now - began) / _CHECK_SHARE
        self._report_gauges()

    def _work_idle(self) -> None:
        work = self._idle_left[0]
        self.activity.begin(f"idle work ({getattr(work, '__qualname__', work)})", _IDLE_WORK_LIMIT)
        if work():
            self._worked = True
            return
        self._idle_left.popleft()
        if self._worked and not self._idle_left:
            self._worked = False
            self._report_gauges()
