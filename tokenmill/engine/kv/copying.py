"""Copy-on-write: pages that several requests hold are copied before one of them writes.

Owns the list of copies to make before the next step. The KV manager calls it; it moves pages of one holding only.
"""

from __future__ import annotations

from tokenmill.engine.kv.holding import Holding
from tokenmill.engine.kv.pages import PagePool
from tokenmill.engine.kv.prefix_tree import NO_PAGE, PrefixTree


class PageCopies:
    def __init__(self, pool: PagePool, tree: PrefixTree) -> None:
        self._pool = pool
        self._tree = tree
        self._page_size = tree.page_size
        self._sources: dict[int, int] = {}  # by destination

    def count(self, holding: Holding, num_computed: int) -> int:
        """Pages that `unshare` would copy."""
        index = (num_computed - holding.num_dropped) // self._page_size
        return sum(page >= 0 and self._pool.refs[page] > 1 for table in holding.tables for page in table[index:])

    def unshare(self, holding: Holding, num_computed: int) -> None:
        """Make the pages to be written the request's own: copy what others hold, take the rest out of the tree."""
        computed = num_computed - holding.num_dropped
        for table in holding.tables:
            for index in range(computed // self._page_size, len(table)):
                page = table[index]
                if page == NO_PAGE:
                    continue
                if self._pool.refs[page] > 1:
                    table[index] = copy = self._pool.allocate()
                    if index * self._page_size < computed:  # else every slot of it is written anew
                        self._sources[copy] = page
                    self._pool.drop(page)
                elif page in self._tree.owner:
                    self._pool.uncache(page)
        holding.shared = False

    def forget_released(self) -> None:
        """Nobody holds some of the copies any more."""
        if self._sources:
            self._sources = {copy: source for copy, source in self._sources.items() if self._pool.refs[copy] > 0}

    def take(self) -> list[tuple[int, int]]:
        """(source, destination) pages to copy; no page is the destination of two."""
        copies = [(source, copy) for copy, source in self._sources.items()]
        self._sources.clear()
        return copies
