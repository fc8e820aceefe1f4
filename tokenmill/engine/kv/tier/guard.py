"""A tier behind two threads of its own, deadlines and breakers: nobody else ever waits for its storage.

The reading thread opens the tier (again and again, if need be), refreshes it and reads; the writing thread writes. A
call that does not return in time counts as a failure; the tier is then off until the call returns and a trial succeeds.
So a tier that is down, full or hung costs one deadline and its pages, never a step. TierStack owns one for each tier.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tokenmill.engine.kv.tier.base import PageExport, PageTier, TierUnavailableError
from tokenmill.engine.kv.tier.breaker import CLOSED, Breaker
from tokenmill.log import get_logger

_log = get_logger(__name__)
_READ_SECONDS = 2.0  # for one call: a lookup, or a few pages
_WRITE_SECONDS = 5.0  # for one page
_REFRESH_SECONDS = 30.0
_OPEN_SECONDS = 0.25  # between looks whether it is time to try to open a tier that is off
_MAX_QUEUED_BYTES = 256 << 20


class Leaving:
    """Pages that were exported together; every tier's writer takes its own from here."""

    def __init__(self, export: PageExport) -> None:
        self._export: PageExport | None = export
        self._pages: list[memoryview] = []
        self._lock = threading.Lock()

    def page(self, index: int) -> memoryview:
        with self._lock:
            if self._export is not None:
                self._pages, self._export = self._export.wait(), None
            return self._pages[index]


@dataclass(eq=False)
class _Call:
    function: Callable[[], Any]
    result: Any = None
    error: Exception | None = None
    done: threading.Event = field(default_factory=threading.Event)


class GuardedTier:
    def __init__(self, tier: PageTier, page_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.tier = tier
        self.name = tier.name
        self.remote = tier.remote
        self.stats = tier.stats
        self._page_bytes = page_bytes
        self._clock = clock
        self._reads = Breaker(clock)
        self._writes = Breaker(clock)
        self._opened = threading.Event()
        self._tried = threading.Event()  # to open it
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._stuck: _Call | None = None  # a read that passed its deadline and has not returned
        self._write_queue: queue.SimpleQueue[tuple[bytes, Leaving, int] | None] = queue.SimpleQueue()
        self._queued: dict[bytes, None] = {}  # keys from `put` until written
        self._writing_since = 0.0  # 0: no write is under way
        self._hung_since = 0.0  # the same moment, once that write has passed its deadline
        self._threads = [
            threading.Thread(target=self._read_all, name=f"kv-{self.name}-reader", daemon=True),
            threading.Thread(target=self._write_all, name=f"kv-{self.name}-writer", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    # --- engine thread: never waits for the storage ---

    def wait_tried(self, seconds: float) -> bool:
        """Wait until opening the tier was tried once. Whether it is open."""
        self._tried.wait(seconds)
        return self._opened.is_set()

    def wait_open(self, seconds: float) -> bool:
        return self._opened.wait(seconds)

    @property
    def readable(self) -> bool:
        return self._opened.is_set() and self._stuck is None and self._reads.ready

    @property
    def writable(self) -> bool:
        return self._opened.is_set() and not self._is_write_hung() and self._writes.ready

    @property
    def has_space(self) -> bool:
        return (len(self._queued) + 1) * self._page_bytes <= max(_MAX_QUEUED_BYTES, self._page_bytes)

    def wants(self, key: bytes) -> bool:
        """Whether the page should be written to this tier now."""
        return key not in self._queued and self.writable and not self.tier.holds(key)

    def put(self, key: bytes, batch: Leaving, index: int) -> None:
        self._queued[key] = None
        self._write_queue.put((key, batch, index))

    @property
    def num_queued(self) -> int:
        return len(self._queued)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is left to write, or waiting for it is of no use."""
        return not self._queued or not self.writable

    def local(self, keys: list[bytes]) -> list[bool]:
        """Which pages a tier of this machine has."""
        return self.tier.has(keys) if keys and not self.remote and self.readable else [False] * len(keys)

    def end(self) -> None:
        self._calls.put(None)
        self._write_queue.put(None)

    def join(self, deadline: float) -> None:
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    # --- loading thread: waits until a deadline ---

    def has(self, keys: list[bytes]) -> list[bool]:
        if not keys:
            return []
        try:
            found: list[bool] = self._call(lambda: self.tier.has(keys))
        except TierUnavailableError:
            return [False] * len(keys)
        return found

    def get(self, keys: Sequence[bytes]) -> list[memoryview]:
        """The pages in order, up to the first that is not there."""
        try:
            pages: list[memoryview] = self._call(lambda: self._get(keys))
        except TierUnavailableError:
            return []
        return pages

    def _get(self, keys: Sequence[bytes]) -> list[memoryview]:
        pages = []
        for key in keys:
            page = self.tier.get(key)
            if page is None or page.nbytes != self._page_bytes:
                break
            pages.append(page)
        return pages

    def _call(self, function: Callable[[], Any]) -> Any:
        if not self._opened.is_set() or self._stuck is not None or not self._reads.allow():
            raise TierUnavailableError(self.name)
        call = _Call(function)
        self._calls.put(call)
        if not call.done.wait(_READ_SECONDS):
            self._stuck = call
            if call.done.is_set():  # just now: the reading thread has not seen that it is stuck
                self._stuck = None
            self._failed(self._reads, "read", f"no answer in {_READ_SECONDS:g} s")
            self.tier.interrupt()
            raise TierUnavailableError(self.name)
        if call.error is not None:
            self._failed(self._reads, "read", str(call.error) or type(call.error).__name__)
            raise TierUnavailableError(self.name)
        self._succeeded(self._reads, "read")
        return call.result

    # --- reading thread ---

    def _read_all(self) -> None:
        while True:
            if not self._opened.is_set():
                self._open()
                self._tried.set()
            try:
                call = self._calls.get(timeout=_REFRESH_SECONDS if self._opened.is_set() else _OPEN_SECONDS)
            except queue.Empty:
                self._refresh()
                continue
            if call is None:
                self.tier.close()
                return
            try:
                call.result = call.function()
            except Exception as error:  # whatever it is, the pages are computed instead
                call.error = error
            call.done.set()
            if self._stuck is call:
                self._stuck = None

    def _open(self) -> None:
        if not self._reads.allow():
            return
        try:
            self.tier.open()
        except Exception as error:
            self._failed(self._reads, "open", str(error) or type(error).__name__)
            return
        self._succeeded(self._reads, "open")
        self.stats.up = 1
        self._opened.set()

    def _refresh(self) -> None:
        if not self._opened.is_set() or not self._reads.allow():
            return
        try:
            self.tier.refresh()
        except Exception as error:
            self._failed(self._reads, "refresh", str(error) or type(error).__name__)
            return
        self._succeeded(self._reads, "refresh")

    # --- writing thread ---

    def _write_all(self) -> None:
        while (item := self._write_queue.get()) is not None:
            key, batch, index = item
            if self._opened.is_set() and self._writes.allow():
                self._writing_since = self._clock() or 1e-9
                self._write(key, batch, index)
                self._writing_since = 0.0
            self._queued.pop(key, None)

    def _write(self, key: bytes, batch: Leaving, index: int) -> None:
        try:
            self.tier.put(key, batch.page(index))
        except Exception as error:
            self._failed(self._writes, "write", str(error) or type(error).__name__)
            return
        self._succeeded(self._writes, "write")

    def _is_write_hung(self) -> bool:
        since = self._writing_since
        if not since or self._clock() - since <= _WRITE_SECONDS:
            return False
        if since != self._hung_since:
            self._hung_since = since
            self._failed(self._writes, "write", f"no answer in {_WRITE_SECONDS:g} s")
            self.tier.interrupt()
            self._drop_queue()
        return True

    def _drop_queue(self) -> None:
        """What waits behind a write that hangs would only take memory."""
        while True:
            try:
                item = self._write_queue.get_nowait()
            except queue.Empty:
                return
            if item is None:
                self._write_queue.put(None)
                return
            self._queued.pop(item[0], None)

    # --- state ---

    def _failed(self, breaker: Breaker, what: str, why: str) -> None:
        self.stats.failures += 1
        pause = breaker.pause
        news = breaker.failed()
        self._show_state()
        if news:
            _log.warning(
                "%s tier: cannot %s (%s); pages are computed instead, next try in %.0f s", self.name, what, why, pause
            )

    def _succeeded(self, breaker: Breaker, what: str) -> None:
        if breaker.succeeded():
            self._show_state()
            _log.warning("%s tier: can %s again", self.name, what)

    def _show_state(self) -> None:
        self.stats.up = int(self._opened.is_set() and self._reads.state == self._writes.state == CLOSED)
