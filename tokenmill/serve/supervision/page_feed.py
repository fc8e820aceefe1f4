"""Which pages the engine's prefix cache has, by name, as a numbered sequence of changes: what a router follows.

Nothing is named before somebody asks: the name of the root needs a hash of the whole model, which is computed once,
beside the event loop. A reader that missed changes, or comes new, gets all names at once; so does one that followed
another engine, because each has a feed of its own. Knows neither HTTP nor who reads.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import dropwhile
from pathlib import Path

from tokenmill.engine.kv.page_names import root_name
from tokenmill.engine.messages import Pages, Ready, WatchPages
from tokenmill.serve.errors import ApiError
from tokenmill.serve.supervision.signals import in_daemon_thread

_KEPT = 4096  # changes that a reader may be behind
_NAMING_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class Change:
    """One step's: (name, parent's name) of pages that came, names of those that left."""

    sequence: int
    stored: list[tuple[bytes, bytes]]
    removed: list[bytes]


class PageChanges:
    """Names of cached pages and how they changed, for readers. `root`: what the names begin with; empty until known."""

    root = b""

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self.feed = secrets.token_hex(8)
        self.sequence = 0
        self.pages: dict[bytes, bytes] = {}  # name -> parent's name
        self._changes: deque[Change] = deque(maxlen=_KEPT)
        self._news = asyncio.Event()

    async def open(self, engine: Ready | None) -> None:
        """Have pages named, if they are not yet."""
        raise NotImplementedError

    def take(self, message: Pages) -> None:
        self.sequence += 1
        self.pages.update(message.stored)
        for name in message.removed:
            self.pages.pop(name, None)
        self._changes.append(Change(self.sequence, message.stored, message.removed))
        news, self._news = self._news, asyncio.Event()
        news.set()

    def since(self, feed: str, sequence: int) -> list[Change] | None:
        """What changed after `sequence`; None if that is no longer known: take all pages."""
        if feed != self.feed or not 0 <= sequence <= self.sequence:
            return None
        if sequence == self.sequence:
            return []
        if self._changes[0].sequence > sequence + 1:
            return None
        return list(dropwhile(lambda change: change.sequence <= sequence, self._changes))

    async def wait(self, feed: str, sequence: int, seconds: float) -> None:
        """Until there is more than `sequence`, or these seconds have passed."""
        if feed == self.feed and sequence == self.sequence:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._news.wait(), seconds)


class PageFeed(PageChanges):
    """Of one engine."""

    def __init__(self, path: Path, ask: Callable[[WatchPages], None]) -> None:
        """`ask` sends the engine a message, or raises ApiError."""
        self._path = path
        self._ask = ask
        self._naming: asyncio.Task[None] | None = None
        self.on_change: Callable[[Pages], None] = lambda _pages: None
        super().__init__()

    def restart(self) -> None:
        """Another engine, with nothing cached."""
        gone = list(self.pages)
        self.root = b""
        self._begin()
        self.on_change(Pages([], gone))

    def take(self, message: Pages) -> None:
        super().take(message)
        self.on_change(message)

    async def open(self, engine: Ready | None) -> None:
        """One without pages never names any. A model that must be hashed first takes longer than a reader waits: it
        asks again."""
        if self.root or engine is None or not engine.page_meaning:
            return
        if self._naming is None or self._naming.done():
            self._naming = asyncio.create_task(self._name(str(engine.options["load_format"]), engine.page_meaning))
        await asyncio.wait((self._naming,), timeout=_NAMING_SECONDS)

    async def _name(self, load_format: str, meaning: str) -> None:
        feed = self.feed
        root = await in_daemon_thread(lambda: root_name(self._path, load_format, meaning))
        if feed == self.feed:
            with contextlib.suppress(ApiError):  # it is away just now: the next reader tries again
                self._ask(WatchPages(root))
                self.root = root
