"""The page pool: state and reference count of each page. A page is free, held (by requests), or cached (in the tree).

                allocate                 drop, in the tree
        free ------------> held (ref>0) -------------------> cached (ref 0)
          ^                 |    ^                             |   |
          +-----------------+    +-----------------------------+   |
          |  drop, not in the tree            take                 |
          +--------------------------------------------------------+  evict

Knows no requests and no tokens; the manager is its only caller. A page that makes room is shown to `on_evict` while its
content is still there.
"""

from __future__ import annotations

from collections.abc import Callable

from tokenmill.engine.kv.policy.base import EvictionPolicy
from tokenmill.engine.kv.prefix_tree import PrefixTree
from tokenmill.engine.stats import EngineStats


class PagePool:
    def __init__(
        self,
        num_pages: int,
        tree: PrefixTree,
        policy: EvictionPolicy,
        stats: EngineStats,
        on_evict: Callable[[int, bytes, int], None] | None = None,
    ) -> None:
        """`on_evict` gets the page, the name of its node and its group."""
        self.num_pages = num_pages
        self.refs = [0] * num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._tree = tree
        self._policy = policy
        self._stats = stats
        self.on_evict = on_evict

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._policy)

    @property
    def available(self) -> int:
        """Pages that `allocate` can give: every cached page can be evicted."""
        return len(self._free) + len(self._policy)

    def allocate(self) -> int:
        """A page with one holder, from the free ones or by evicting. The caller has looked at `available`."""
        if not self._free:
            victim = self._policy.victim()
            assert victim is not None, "allocate without an available page"
            assert self.refs[victim] == 0, "the policy names a page in use"
            self.uncache(victim, self.on_evict)
        page = self._free.pop()
        self.refs[page] = 1
        return page

    def take(self, page: int, counts: bool = True) -> None:
        """One more holder of a page that is held or cached. It counts as a use if the whole path to it is taken too."""
        if self.refs[page] == 0:
            self._policy.remove(page)
        if counts and page in self._tree.owner:
            self._policy.use(page)
        self.refs[page] += 1

    def take_path(self, pages: list[int]) -> None:
        """`take` for pages of the tree, the whole path to each among them."""
        refs, policy = self.refs, self._policy
        for page in pages:
            if refs[page] == 0:
                policy.remove(page)
            policy.use(page)
            refs[page] += 1

    def drop(self, page: int) -> None:
        """One holder fewer."""
        refs = self.refs[page] = self.refs[page] - 1
        if refs == 0:
            if page in self._tree.owner:
                self._policy.add(page)
            else:
                self._free.append(page)
        assert refs >= 0

    def uncache(self, page: int, on_evict: Callable[[int, bytes, int], None] | None = None) -> None:
        """Take a page out of the tree, with all that is of no use there without it. Holders keep what they hold."""
        for removed, name, group in self._tree.detach(page):
            if self.refs[removed] == 0:
                self._policy.remove(removed)
                self._free.append(removed)
                self._stats.num_evictions += 1
                if on_evict is not None:
                    on_evict(removed, name, group)
            self._policy.forget(removed)

    def clear(self) -> None:
        """Evict every cached page."""
        while (victim := self._policy.victim()) is not None:
            self.uncache(victim)

    def check(self, held: dict[int, int]) -> None:
        """`held`: page -> number of tables that name it. Every page is in exactly one state, with the right count."""
        assert self.refs == [held.get(page, 0) for page in range(self.num_pages)], "reference counts differ from tables"
        free, cached = set(self._free), set(self._policy)
        assert len(free) == len(self._free), "a page is free twice"
        assert len(cached) == len(self._policy), "a page is cached twice"
        assert not free & cached, "a page is free and cached"
        assert not free & held.keys(), "a held page is free"
        assert not free & self._tree.owner.keys(), "a free page is in the tree"
        assert cached == self._tree.owner.keys() - held.keys(), "eviction order differs from the unheld tree pages"
        victim = self._policy.victim()
        assert victim in cached if cached else victim is None, "victim is not a cached page"
        assert len(free) + len(cached) + len(held) == self.num_pages, "pages are lost"
