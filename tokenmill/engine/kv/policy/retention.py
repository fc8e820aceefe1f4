"""Retention on top of any eviction policy: prompt pages that a request asked to keep for a time, or for good.

A promised page is evicted only when no other page can be, so that a promise never blocks a request; such breaches are
counted. When its time is over the page goes back to the policy below as if it had just been released. The KV manager
makes the promises, the page pool does not know of them. Expiry costs O(log n) in the number of promised pages.
"""

from __future__ import annotations

import heapq
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from itertools import count

from tokenmill.engine.kv.policy.base import EvictionPolicy
from tokenmill.engine.stats import EngineStats

FOREVER = float("inf")


class RetentionPolicy(EvictionPolicy):
    def __init__(self, policy: EvictionPolicy, stats: EngineStats, clock: Callable[[], float] = time.monotonic) -> None:
        self._policy = policy
        self._stats = stats
        self._clock = clock
        self._until: dict[int, float] = {}  # promises, of pages in use too
        self._retained: OrderedDict[int, None] = OrderedDict()  # promised and unused, in the order of release
        self._expiries: list[tuple[float, int, int]] = []  # heap of (time, order, page); may name what is past
        self._order = count()

    def retain(self, page: int, seconds: float) -> None:
        """Promise a page that somebody holds. The longer of two promises counts."""
        assert page not in self._retained
        self._until[page] = max(self._until.get(page, 0.0), self._clock() + seconds)

    @property
    def num_retained(self) -> int:
        self._expire()
        return len(self._retained)

    def add(self, page: int) -> None:
        until = self._until.get(page)
        if until is None or until <= self._clock():
            self._until.pop(page, None)
            self._policy.add(page)
            return
        self._retained[page] = None
        if until != FOREVER:
            heapq.heappush(self._expiries, (until, next(self._order), page))

    def remove(self, page: int) -> None:
        if page in self._retained:
            del self._retained[page]
        else:
            self._policy.remove(page)

    def victim(self) -> int | None:
        self._expire()
        page = self._policy.victim()
        return next(iter(self._retained), None) if page is None else page

    def use(self, page: int) -> None:
        self._policy.use(page)

    def forget(self, page: int) -> None:
        until = self._until.pop(page, None) if self._until else None
        self._stats.num_promises_broken += until is not None and until > self._clock()
        self._policy.forget(page)

    def __len__(self) -> int:
        return len(self._policy) + len(self._retained)

    def __iter__(self) -> Iterator[int]:
        yield from self._policy
        yield from self._retained

    def _expire(self) -> None:
        now = self._clock() if self._expiries else 0.0
        while self._expiries and self._expiries[0][0] <= now:
            until, _, page = heapq.heappop(self._expiries)
            if page in self._retained and self._until[page] == until:
                del self._retained[page], self._until[page]
                self._policy.add(page)
