"""What other places do for a request's prefix, or want of it: tiers and peers that bring pages, peers that fetch them.

One object for the KV manager and the scheduler, also where there are neither tiers nor peers; all calls are of the
engine thread and none waits longer than it is told to.
"""

from __future__ import annotations

from collections.abc import Callable
from weakref import WeakMethod

from tokenmill.engine.kv.handles import Restored
from tokenmill.engine.kv.holding import Holding
from tokenmill.engine.kv.prefix_tree import PrefixTree
from tokenmill.engine.kv.restore import Restorer
from tokenmill.engine.kv.transfer.peer import PeerPages
from tokenmill.engine.kv.transfer.publisher import Publisher
from tokenmill.engine.stats import EngineStats
from tokenmill.types import Request


class PrefixSources:
    def __init__(
        self,
        restorer: Restorer | None,
        publisher: Publisher | None,
        peers: PeerPages | None,
        max_match: Callable[[Request], int],
    ) -> None:
        """`max_match`: pages of its prefix that a request may take from elsewhere."""
        self._restorer = restorer
        self._publisher = publisher
        self._max_match = WeakMethod(max_match)  # whose owner has this: a circle would keep the weights
        self.peers = peers

    def _max_pages(self, request: Request) -> int:
        max_match = self._max_match()
        return 0 if max_match is None else max_match(request)

    # --- the life of a request ---

    def announce(self, request: Request) -> None:
        """It is queued."""
        if self._publisher is not None:
            self._publisher.announce(request)
        if request.source is not None and not request.source.on_demand and self.peers is not None:
            self.peers.hold(request.source)

    def ready(self, request: Request, num_reserved: int, wait: float) -> bool:
        """Whether all pages that are worth waiting for are in the tree; `num_reserved` pages are left for others."""
        max_pages = self._max_pages(request) if self._restorer is not None else 0
        if self._restorer is None or not max_pages:
            return True
        return self._restorer.ready(request, max_pages, num_reserved, wait)

    def start_early(self, request: Request) -> None:
        """Have its pages brought although it is not its turn."""
        if self._restorer is not None and (max_pages := self._max_pages(request)):
            self._restorer.start_early(request, max_pages)

    def settle(self, request: Request) -> Restored:
        """It is admitted: what it got."""
        return self._restorer.settle(request) if self._restorer is not None else Restored()

    def committed(self, request: Request, holding: Holding, tree: PrefixTree) -> None:
        if self._publisher is not None and request.publishes is not None:
            self._publisher.committed(request, holding, tree)

    def abandon(self, request: Request) -> None:
        """It waits no more: it was cancelled before it was admitted."""
        if self._restorer is not None:
            self._restorer.abandon(request)

    def forget(self, request: Request) -> None:
        """It has ended."""
        if self._publisher is not None:
            self._publisher.forget(request)

    # --- state ---

    @property
    def brings_pages(self) -> bool:
        return self._restorer is not None

    @property
    def is_loading(self) -> bool:
        return self._restorer is not None and self._restorer.is_loading

    def unfinished(self) -> list[Request]:
        """Those whose pages are still on their way."""
        return self._restorer.unfinished() if self._restorer is not None else []

    def measure(self, stats: EngineStats) -> None:
        if self._publisher is not None:
            staging = self._publisher.staging
            stats.num_staged, stats.num_leases = staging.num_used, staging.num_leases
            stats.num_published, stats.num_unpublished = staging.num_staged, staging.num_lost
            stats.num_leases_expired = staging.num_expired

    def source_failed(self, request_id: str) -> None:
        """The prompt of a request is not computed elsewhere after all."""
        if self._restorer is not None:
            self._restorer.source_failed(request_id)

    def close(self) -> None:
        self._restorer = None
        if self._publisher is not None:
            self._publisher.close()
