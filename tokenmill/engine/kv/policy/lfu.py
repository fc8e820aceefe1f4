"""Least frequently used first; of equals, the least recently used.

A request that takes a page takes those before it too, so the beginning of a prefix is counted at least as often as its
end and is evicted after it. Counts stop at a ceiling; when a page has reached it all are halved, so that they age.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from tokenmill.engine.kv.policy.base import EvictionPolicy

CEILING = 63


class LeastFrequentlyUsed(EvictionPolicy):
    def __init__(self) -> None:
        self._counts: dict[int, int] = {}  # uses of every page that has any, in the policy or held
        self._levels: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(CEILING + 1)]  # by count
        self._occupied = 0  # bit i: level i is not empty
        self._size = 0
        self._aged = False  # a page has reached the ceiling

    def use(self, page: int) -> None:
        count = self._counts[page] = min(self._counts.get(page, 0) + 1, CEILING)
        self._aged = self._aged or count == CEILING

    def forget(self, page: int) -> None:
        self._counts.pop(page, None)

    def add(self, page: int) -> None:
        level = self._counts.get(page, 0)
        self._levels[level][page] = None
        self._occupied |= 1 << level
        self._size += 1

    def remove(self, page: int) -> None:
        level = self._counts.get(page, 0)
        pages = self._levels[level]
        del pages[page]
        if not pages:
            self._occupied &= ~(1 << level)
        self._size -= 1

    def victim(self) -> int | None:
        if self._aged:  # only here: not between the uses of the pages of one prefix
            self._halve()
        if not self._occupied:
            return None
        lowest = (self._occupied & -self._occupied).bit_length() - 1
        return next(iter(self._levels[lowest]))

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[int]:
        for pages in self._levels:
            yield from pages

    def _halve(self) -> None:
        """Costs a pass over all pages, once in at least CEILING / 2 uses of one page."""
        self._counts = {page: count // 2 for page, count in self._counts.items()}
        unused = list(self)
        for pages in self._levels:
            pages.clear()
        self._occupied = self._size = 0
        self._aged = False
        for page in unused:  # from rare to frequent, old to new: the order within a level stays
            self.add(page)
