"""Retention on top of any eviction policy: prompt pages that a request asked to keep for a time, or for good.

A promised page is evicted only when no other page can be, so that a promise never blocks a request; such breaches are
counted. When its time is over the page goes back to the policy below as if it had just been released. A promise counts
for the tenant that asked for it, and a tenant over its quota gets none. The KV manager makes the promises, the page
pool does not know of them. Expiry costs O(log n) in the number of promised pages.
"""

from __future__ import annotations

import heapq
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
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
        self._tenants: dict[int, str] = {}  # of promised pages: whose quota each counts for
        self._num_promised: Counter[str] = Counter()  # pages by tenant
        self._retained: OrderedDict[int, None] = OrderedDict()  # promised and unused, in the order of release
        self._expiries: list[tuple[float, int, int]] = []  # heap of (time, order, page); may name what is past
        self._order = count()

    def promise(self, pages: Sequence[int], seconds: float, tenant: str, max_pages: int) -> bool:
        """Retain all of these pages, or none if the tenant would then have more than `max_pages` promised."""
        self._expire()
        more = sum(self._tenants.get(page) != tenant for page in pages)
        if self._num_promised[tenant] + more > max_pages:
            return False
        for page in pages:
            self.retain(page, seconds, tenant)
        return True

    def retain(self, page: int, seconds: float, tenant: str = "") -> None:
        """Promise a page that somebody holds. The longer of two promises counts, for the tenant that asked for it."""
        assert page not in self._retained
        until = self._clock() + seconds
        if until > self._until.get(page, 0.0):
            self._end(page)
            self._until[page] = until
            self._tenants[page] = tenant
            self._num_promised[tenant] += 1

    def is_promised(self, page: int) -> bool:
        return self._until.get(page, 0.0) > self._clock()

    @property
    def num_retained(self) -> int:
        self._expire()
        return len(self._retained)

    def add(self, page: int) -> None:
        until = self._until.get(page)
        if until is None or until <= self._clock():
            self._end(page)
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
        until = self._end(page)
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
                del self._retained[page]
                self._end(page)
                self._policy.add(page)

    def _end(self, page: int) -> float | None:
        """Forget the promise of a page; until when it was."""
        if page not in self._until:
            return None
        tenant = self._tenants.pop(page)
        self._num_promised[tenant] -= 1
        if not self._num_promised[tenant]:
            del self._num_promised[tenant]
        return self._until.pop(page)
