"""Stages the pages of prompts that another engine asked for, step by step while they are computed.

The KV manager calls it from the engine thread when a request is queued, when pages of it are committed, and when it
ends; pages are copied there, while they cannot change. A thread of its own waits for copies that are still on their way
from a device and writes them to the staging memory, in order, so that a lease is closed after its last page.
"""

from __future__ import annotations

import queue
import threading

from tokenmill.engine.kv.holding import Holding
from tokenmill.engine.kv.prefix_tree import PrefixTree
from tokenmill.engine.kv.tier.base import PageAccess, PageExport
from tokenmill.engine.kv.transfer.staging import Staging
from tokenmill.log import get_logger
from tokenmill.types import Request

_log = get_logger(__name__)


class Publisher:
    def __init__(self, staging: Staging, access: PageAccess) -> None:
        self.staging = staging
        self._access = access
        self._published: dict[Request, int] = {}  # pages of the prefix
        self._queue: queue.SimpleQueue[tuple[str, list[bytes], PageExport | None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write_all, name="kv-publisher", daemon=True)
        self._thread.start()

    def announce(self, request: Request) -> None:
        """A request is queued."""
        if request.publishes is not None and request.index == 0:
            self._published[request] = 0
            self.staging.open(request.publishes.name, request.publishes.ttl)

    def committed(self, request: Request, holding: Holding, tree: PrefixTree) -> None:
        """Pages of a request are in the tree, and it holds them: copy what was not copied yet.

        Of groups with a window only what the end of the prompt looks at: nobody can use the rest.
        """
        begin = self._published.get(request)
        if begin is None or request.publishes is None:
            return
        last = (len(request.prompt_ids) - 1) // tree.page_size
        end = min(holding.committed, last)
        if end <= begin:
            return
        path = [holding.cursor]
        for _ in range(holding.committed - begin - 1):
            assert path[-1].parent is not None
            path.append(path[-1].parent)
        path.reverse()
        keys, pages = [], []
        for place in range(begin, end):
            node = path[place - begin]
            for group, span in enumerate(tree.spans):
                if place >= last - span and node.pages[group] >= 0:
                    keys.append(node.name + bytes([group]))
                    pages.append(node.pages[group])
        self._published[request] = end
        if keys:
            self._queue.put((request.publishes.name, keys, self._access.export_pages(pages)))

    def forget(self, request: Request) -> None:
        """A request has ended, or is gone."""
        if self._published.pop(request, None) is not None and request.publishes is not None:
            self._queue.put((request.publishes.name, [], None))

    def close(self, timeout: float = 0.5) -> None:
        self._queue.put(None)
        self._thread.join(timeout)

    def _write_all(self) -> None:
        while (item := self._queue.get()) is not None:
            lease, keys, export = item
            try:
                for key, page in zip(keys, export.wait() if export is not None else (), strict=True):
                    self.staging.stage(lease, key, page)
            except Exception:  # those who wait are told that no more comes
                _log.exception("KV pages could not be staged")
                export = None
            if export is None:
                self.staging.close(lease)
