"""The pages of one request, and what must be true of them. Owned by the KV manager; nobody else sees a holding."""

from __future__ import annotations

from dataclasses import dataclass

from tokenmill.engine.kv.pages import PagePool
from tokenmill.engine.kv.prefix_tree import NO_PAGE, PrefixNode, PrefixTree
from tokenmill.engine.kv.states import NO_STATE
from tokenmill.hardware.kv_layout import KVLayout
from tokenmill.types import Request


@dataclass(slots=True, eq=False)
class Holding:
    """All tables have the same length; entries before `first_live` are NO_PAGE.

    A budget takes entries out of the middle: the entry of a position is then (position - num_dropped) // page_size,
    for all positions that are still written. From the first time on the request is at the root of the tree: it no
    longer holds the ancestors of what it holds, and enters nothing.
    """

    tables: tuple[list[int], ...]
    first_live: list[int]
    capacity: int  # tokens that the tables have slots for, dropped ones included
    committed: int  # leading pages that are in the tree
    cursor: PrefixNode  # tree node of the last committed page
    shared: bool = False  # forked and not written since: pages from the next written one on may have other holders
    num_dropped: int = 0  # tokens whose pages a budget took
    state_slot: int = 0  # of recurrent layers
    snapshot: int = NO_STATE  # a copy of the state at the fork point, for siblings
    branch: int = 0  # tokens after which its prompt parts from what was cached: others may too
    trailing: PrefixNode | None = None  # the node of the last snapshot of its output

    def drop(self, entries: list[int], page_size: int) -> list[int]:
        """Take full entries (ascending) out of all tables; the pages that were there, last first."""
        pages = []
        for index in reversed(entries):
            for group, table in enumerate(self.tables):
                page = table.pop(index)
                if page >= 0:
                    pages.append(page)
                self.first_live[group] -= index < self.first_live[group]
        self.num_dropped += len(entries) * page_size
        return pages


def enter_pages(request: Request, holding: Holding, full: int, tree: PrefixTree, pool: PagePool) -> None:
    """Enter the first `full` pages into the tree, as far as they are not. A page that it has already replaces ours."""
    size = tree.page_size
    node = holding.cursor
    node.cursors -= 1
    for index in range(holding.committed, full):
        node = tree.child(node, tuple(request.token_ids[index * size : (index + 1) * size]))
        for group, table in enumerate(holding.tables):
            ours, theirs = table[index], node.pages[group]
            if ours in (NO_PAGE, theirs):
                continue
            if theirs == NO_PAGE:
                tree.attach(node, group, ours)
            else:
                pool.take(theirs, counts=False)
                table[index] = theirs
                pool.drop(ours)
    node.cursors += 1
    holding.cursor = node
    holding.committed = full


def check_holding(request: Request, holding: Holding, layout: KVLayout, tree: PrefixTree, pool: PagePool) -> None:
    """Raise AssertionError if a holding is not as it should be."""
    size, dropped = layout.page_size, holding.num_dropped
    assert {len(table) * size + dropped for table in holding.tables} == {holding.capacity}, "tables of unequal length"
    assert request.num_computed <= holding.capacity, "computed tokens without slots"
    for group, table in enumerate(holding.tables):
        first = holding.first_live[group]
        live = layout.first_live_page(layout.groups[group], request.num_computed)
        assert first <= max(0, live - dropped // size), "a page in the window was released"
        assert all(page == NO_PAGE for page in table[:first]), "a page before the window is held"
        assert all(0 <= page < pool.num_pages for page in table[first:]), "a page in the window is missing"
        for page in table[(request.num_computed - dropped) // size :]:
            own = page < 0 or (pool.refs[page] == 1 and page not in tree.owner)
            assert own or holding.shared, "a page to be written is not private"
    if dropped:
        assert holding.cursor is tree.root, "a request that lost pages is still in the tree"
    _check_path(request, holding, tree, size)


def _check_path(request: Request, holding: Holding, tree: PrefixTree, size: int) -> None:
    root = tree.root if holding.num_dropped else tree.find_root(request.cache_name)
    node = holding.cursor
    for index in range(holding.committed - 1, -1, -1):
        assert node.key == tuple(request.token_ids[index * size : (index + 1) * size]), "tree path of other tokens"
        for table, page in zip(holding.tables, node.pages, strict=True):
            assert table[index] in (NO_PAGE, page), "a committed page is not the tree's"
        assert node.parent is not None
        node = node.parent
    assert node is root, "a path that does not begin at the root of its salt"
