"""The pages of several engines of one model as one sequence of changes: a page is there while any engine has it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from tokenmill.engine.messages import Pages, Ready
from tokenmill.serve.supervision.page_feed import PageChanges, PageFeed


class MergedPages(PageChanges):
    def __init__(self, feeds: Sequence[PageFeed]) -> None:
        super().__init__()
        self._feeds = feeds
        self._held: list[set[bytes]] = [set() for _ in feeds]
        for number, feed in enumerate(feeds):
            feed.on_change = self._taker(number)

    @property
    def root(self) -> bytes:  # type: ignore[override]
        """The same for all of them: it names the model."""
        return next((feed.root for feed in self._feeds if feed.root), b"")

    async def open(self, engine: Ready | None) -> None:
        await asyncio.gather(*(feed.open(engine) for feed in self._feeds))

    def _taker(self, number: int) -> Callable[[Pages], None]:
        return lambda message: self._take_of(number, message)

    def _take_of(self, number: int, message: Pages) -> None:
        mine, others = self._held[number], [held for each, held in enumerate(self._held) if each != number]
        mine.update(name for name, _ in message.stored)
        mine.difference_update(message.removed)
        stored = [(name, parent) for name, parent in message.stored if name not in self.pages]
        removed = [name for name in message.removed if not any(name in held for held in others)]
        if stored or removed:
            self.take(Pages(stored, removed))
