"""Least recently used first.

Requests release their pages from tail to head, so the end of a prefix is evicted before its beginning.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from tokenmill.engine.kv.policy.base import EvictionPolicy


class LeastRecentlyUsed(EvictionPolicy):
    def __init__(self) -> None:
        self._pages: OrderedDict[int, None] = OrderedDict()  # oldest first; a plain dict is slow to pop at its head

    def add(self, page: int) -> None:
        self._pages[page] = None

    def remove(self, page: int) -> None:
        del self._pages[page]

    def victim(self) -> int | None:
        return next(iter(self._pages), None)

    def __len__(self) -> int:
        return len(self._pages)

    def __iter__(self) -> Iterator[int]:
        return iter(self._pages)
