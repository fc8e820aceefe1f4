"""The engine loop: the one place that drives an engine, whichever face its caller sees.

LLM, AsyncEngine and the engine process submit and cancel requests and are told what came of them (`Listener`); where
their messages come from is an `Inbox`. Requests with structured output wait here for their grammar; idle moments check
the pages and do the engine's idle work. One thread calls everything; only `step_began` may be read from another.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from tokenmill.engine.core import EngineCore
from tokenmill.engine.grammar_queue import GrammarQueue
from tokenmill.errors import UserError
from tokenmill.grammar.compiler import GrammarCompiler
from tokenmill.log import get_logger
from tokenmill.types import Request, TokenEvent

_log = get_logger(__name__)
_SHORT_WAIT = 0.002  # seconds: for messages between two pieces of idle work, or for a grammar between messages


class Listener(Protocol):
    """Who is told what the loop did."""

    def on_events(self, events: list[TokenEvent]) -> None:
        """What a step brought; empty where only the statistics have changed."""
        ...

    def on_refused(self, request_id: str, error: UserError) -> None:
        """A request that was submitted cannot be computed."""
        ...


class Inbox(Protocol):
    """Where a face takes the wishes of its callers from."""

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
        core: EngineCore,
        listener: Listener | None = None,
        grammars: GrammarCompiler | None = None,
        idle_work: Sequence[Callable[[], bool]] = (),
    ) -> None:
        """`idle_work`: each is called in idle moments until it returns False (nothing left), anew after each step."""
        self.core = core
        self.step_began = 0.0  # monotonic; 0: no step runs. For watchdogs
        self._listener = listener or _NoListener()
        self._grammars = GrammarQueue(grammars)
        self._idle_work = tuple(idle_work)
        self._idle_left = deque(self._idle_work)
        self._worked = False  # idle work was done that the listener has not heard of
        self._changed = False  # pages moved since they were last checked

    # --- requests ---

    def submit(self, request: Request) -> None:
        if request.params.structured is not None and request.grammar is None:
            self._grammars.add(request)
        else:
            self.core.add(request)

    def cancel(self, request_id: str, index: int | None = None) -> bool:
        """Forget a request and its siblings, or only the one at `index`. False: not known."""
        waited = self._grammars.cancel(request_id)
        cancelled = self.core.cancel(request_id, index)
        self._changed = self._changed or cancelled
        return waited or cancelled

    def knows(self, request_id: str) -> bool:
        return request_id in self._grammars or self.core.scheduler.knows(request_id)

    @property
    def has_work(self) -> bool:
        return self.core.has_work or len(self._grammars) > 0

    # --- driving ---

    def run(self, inbox: Inbox) -> None:
        """Until the inbox is closed: take messages in, then step, or use the idle moment."""
        while not inbox.closed:
            inbox.receive(self._patience())
            self.turn()

    def drain(self, run: int = 1) -> None:
        """Until no request is left. `run`: as in EngineCore.step."""
        while self.has_work:
            self.turn(run)

    def turn(self, run: int = 1) -> None:
        """One step; without work a short wait for a grammar, or a piece of what idle moments are for."""
        for outcome in self._grammars.take():
            if isinstance(outcome, Request):
                self.core.add(outcome)
            else:
                self._listener.on_refused(*outcome)
        if self.core.has_work:
            self._step(run)
        elif len(self._grammars):
            self._grammars.wait(_SHORT_WAIT)
        elif self._changed:
            self._check_pages()
        elif self._idle_left:
            self._work_idle()

    # --- how ---

    def _patience(self) -> float | None:
        """How long the inbox may wait for a message."""
        if self.has_work or self._changed:
            return 0.0
        return _SHORT_WAIT if self._idle_left else None

    def _step(self, run: int) -> None:
        self.step_began = time.monotonic()
        events = self.core.step(run)
        self.step_began = 0.0
        self._changed = True
        self._idle_left = deque(self._idle_work)
        self._listener.on_events(events)

    def _check_pages(self) -> None:
        """The page invariant, and gauges that a cancellation changed without a step."""
        self._changed = False
        stats = self.core.scheduler.measure()
        try:
            self.core.scheduler.kv.check()
            stats.pages_consistent = True
        except AssertionError as error:
            stats.pages_consistent = False
            _log.error("KV pages are inconsistent: %s", error)
        self._listener.on_events([])

    def _work_idle(self) -> None:
        if self._idle_left[0]():
            self._worked = True
            return
        self._idle_left.popleft()
        if self._worked and not self._idle_left:
            self._worked = False
            self.core.scheduler.measure()
            self._listener.on_events([])
