"""The KV manager: gives requests their pages. One pool of interchangeable pages serves all KV groups.

Owns block tables, sharing (prefix cache, forks), copy-on-write and windows; knows token ids and counts but neither
tensors nor why a request runs. The scheduler is its only caller: match, reserve, commit, release, fork, check.
A request holds pages from its first `reserve` to `release`; its tables have equal length in all groups. A holder of a
tree node holds the pages of all its ancestors (but those its windows left), so unheld pages can always be evicted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from tokenmill.engine.kv.pages import PagePool
from tokenmill.engine.kv.policy.base import EvictionPolicy
from tokenmill.engine.kv.prefix_tree import NO_PAGE, UNBOUNDED, PrefixNode, PrefixTree
from tokenmill.hardware.kv_layout import KVLayout
from tokenmill.types import Request


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """What `match` found. A handle for `room`, `fits` and `reserve`; stale after any other call that moves pages."""

    num_tokens: int = 0
    num_unheld: int = 0  # matched pages that nobody holds: taking them makes that many fewer available
    nodes: list[PrefixNode] = field(default_factory=list)


NO_MATCH = PrefixMatch()


@dataclass(frozen=True, slots=True)
class KVUsage:
    """Pages by state, and how well the held ones are used."""

    num_free: int
    num_cached: int
    num_held: int
    waste: float  # of the token slots in held pages, the fraction that holds no token
    padding: float  # of the layer slots in held pages, the fraction that belongs to no layer


@dataclass(slots=True, eq=False)
class _Holding:
    """The pages of one request. All tables have the same length; entries before `first_live` are NO_PAGE."""

    tables: tuple[list[int], ...]
    first_live: list[int]
    capacity: int  # tokens that the tables have slots for
    committed: int  # leading pages that are in the tree
    cursor: PrefixNode  # tree node of the last committed page
    shared: bool = False  # forked and not written since: pages from the next written one on may have other holders


class KVManager:
    def __init__(self, layout: KVLayout, num_pages: int, prefix_caching: bool, policy: EvictionPolicy) -> None:
        self.layout = layout
        self.num_pages = num_pages
        self.prefix_caching = prefix_caching
        self.num_queries = 0  # requests that looked for a prefix and were admitted
        self.num_query_tokens = 0
        self.num_hit_tokens = 0
        self.tree = PrefixTree(layout)
        self.pool = PagePool(num_pages, self.tree, policy)
        self._page_size = layout.page_size
        self._num_groups = len(layout.groups)
        self._windowed = [g for g, span in enumerate(self.tree.spans) if span != UNBOUNDED]
        self._padding = [1 - len(group.layers) / layout.layers_per_page for group in layout.groups]
        self._holdings: dict[Request, _Holding] = {}
        self._copies: dict[int, int] = {}  # destination -> source

    # --- the verbs ---

    def match(self, request: Request) -> PrefixMatch:
        """The longest cached prefix of all known tokens, at least one short of them. Changes nothing."""
        if not self.prefix_caching:
            return NO_MATCH
        limit = request.num_tokens - 1 if request.logits_from is None else request.logits_from
        nodes = self.tree.match(request.token_ids, limit // self._page_size)
        if not nodes:
            return NO_MATCH
        refs = self.pool.refs
        unheld = sum(
            refs[node.pages[group]] == 0
            for group, first in enumerate(self._first_live(len(nodes) * self._page_size))
            for node in nodes[first:]
        )
        return PrefixMatch(len(nodes) * self._page_size, unheld, nodes)

    def reserve(self, request: Request, count: int, match: PrefixMatch = NO_MATCH) -> bool:
        """Slots to write the next `count` tokens to, in every group. False: not enough pages, and nothing changed.

        The first reservation of a request takes the pages of `match`; the tokens then begin after it. Pages that fell
        out of a window are let go of before new ones are taken.
        """
        holding = self._holdings.get(request)
        if holding is None:
            if count > self.room(request, match):
                return False
            holding = self._open(request, match)
            self._extend(holding, match.num_tokens + count)
            return True
        end = request.num_computed + count
        if end <= holding.capacity and not holding.shared:
            return True
        if count > self.room(request):
            return False
        if holding.shared:
            self._unshare(holding, request.num_computed)
        self._extend(holding, end)
        return True

    def commit(self, request: Request) -> None:
        """Enter the pages that are now full and computed into the tree.

        Where the tree has such a page already (another request computed the same meanwhile) that one replaces ours.
        """
        size = self._page_size
        holding = self._holdings[request]
        full = request.num_computed // size
        if full <= holding.committed or not self.prefix_caching:
            return
        node = holding.cursor
        node.cursors -= 1
        for index in range(holding.committed, full):
            node = self.tree.child(node, tuple(request.token_ids[index * size : (index + 1) * size]))
            for group, table in enumerate(holding.tables):
                ours, theirs = table[index], node.pages[group]
                if ours in (NO_PAGE, theirs):
                    continue
                if theirs == NO_PAGE:
                    self.tree.attach(node, group, ours)
                else:
                    self.pool.take(theirs)
                    table[index] = theirs
                    self.pool.drop(ours)
        node.cursors += 1
        holding.cursor = node
        holding.committed = full

    def release(self, request: Request) -> None:
        """Let go of everything, from tail to head so that the end of a prefix is evicted before its beginning."""
        holding = self._holdings.pop(request)
        drop = self.pool.drop
        for row in zip(*(reversed(table) for table in holding.tables), strict=True):
            for page in row:
                if page >= 0:
                    drop(page)
        holding.cursor.cursors -= 1
        self.tree.prune(holding.cursor)
        if self._copies:
            self._copies = {copy: source for copy, source in self._copies.items() if self.pool.refs[copy] > 0}

    def fork(self, parent: Request, child: Request) -> None:
        """Share the pages of `parent` with `child` as far as its tokens go, the last one partly filled. Writers copy.

        The child's `token_ids` are a prefix of the parent's, its `num_computed` no more than what the parent computed.
        """
        size = self._page_size
        source = self._holdings[parent]
        length = -(-child.num_tokens // size)
        committed = min(source.committed, child.num_computed // size)
        cursor = source.cursor
        for _ in range(source.committed - committed):
            assert cursor.parent is not None
            cursor = cursor.parent
        tables = tuple(table[:length] for table in source.tables)
        for table in tables:
            for page in table:
                if page >= 0:
                    self.pool.take(page)
        self._holdings[child] = _Holding(
            tables, list(source.first_live), len(tables[0]) * size, committed, cursor, shared=True
        )
        cursor.cursors += 1
        source.shared = True

    def check(self) -> None:
        """Raise AssertionError if any page, count, table or tree link is not as it should be."""
        held = Counter(
            page for holding in self._holdings.values() for table in holding.tables for page in table if page >= 0
        )
        self.pool.check(held)
        self.tree.check(Counter(holding.cursor for holding in self._holdings.values()))
        for request, holding in self._holdings.items():
            self._check_holding(request, holding)

    # --- questions the scheduler asks ---

    def room(self, request: Request, match: PrefixMatch = NO_MATCH) -> int:
        """For how many more tokens of this request `reserve` would succeed now."""
        holding = self._holdings.get(request)
        if holding is None:
            return max(0, self.pool.available - match.num_unheld) // self._num_groups * self._page_size
        self._slide(holding, request.num_computed)
        spare = self.pool.available
        if holding.shared:
            spare -= self._count_copies(holding, request.num_computed)
        if spare < 0:
            return 0
        return holding.capacity + spare // self._num_groups * self._page_size - request.num_computed

    def fits(self, request: Request, match: PrefixMatch, without: Sequence[Request] = ()) -> bool:
        """Whether all known tokens of a request that holds nothing fit now, and each holder could still grow a page.

        Answers as if the requests in `without` had let go of their pages (a shared page counts for each of them).
        """
        total = -(-request.num_tokens // self._page_size)
        needed = sum(total - max(first, len(match.nodes)) for first in self._first_live(request.num_tokens))
        needed += (len(self._holdings) - len(without)) * self._num_groups
        spare = self.pool.available - match.num_unheld
        for holding in map(self._holdings.__getitem__, without):
            spare += sum(len(holding.tables[0]) - first for first in holding.first_live)
        return needed <= spare

    def block_tables(self, request: Request) -> tuple[list[int], ...]:
        """Per group: page id by page index, NO_PAGE where the window left it. Lists that change in place."""
        return self._holdings[request].tables

    def take_copies(self) -> list[tuple[int, int]]:
        """(source, destination) pages to copy before the next step writes; no page is the destination of two."""
        copies = [(source, copy) for copy, source in self._copies.items()]
        self._copies.clear()
        return copies

    def clear_cache(self) -> None:
        """Forget every cached page that nobody holds."""
        self.pool.clear()

    def usage(self) -> KVUsage:
        pool = self.pool
        num_held = self.num_pages - pool.available
        unused = 0
        for request, holding in self._holdings.items():
            tail = holding.capacity - request.num_computed
            unused += tail // pool.refs[holding.tables[0][-1]] if holding.shared and tail else tail
        waste = unused * self._num_groups / (num_held * self._page_size) if num_held else 0.0
        padding = 0.0
        if num_held and any(self._padding):
            pages = [0] * self._num_groups
            for holding in self._holdings.values():
                for group, first in enumerate(holding.first_live):
                    pages[group] += len(holding.tables[group]) - first
            padding = sum(part * number for part, number in zip(self._padding, pages, strict=True)) / sum(pages)
        return KVUsage(pool.num_free, pool.num_cached, num_held, waste, padding)

    # --- how ---

    def _first_live(self, num_tokens: int) -> list[int]:
        return [self.layout.first_live_page(group, num_tokens) for group in self.layout.groups]

    def _open(self, request: Request, match: PrefixMatch) -> _Holding:
        """Start a holding with the matched pages."""
        depth = len(match.nodes)
        first_live = self._first_live(match.num_tokens)
        tables = tuple(
            [NO_PAGE] * first + [node.pages[group] for node in match.nodes[first:]]
            for group, first in enumerate(first_live)
        )
        for table, first in zip(tables, first_live, strict=True):
            for page in table[first:]:
                self.pool.take(page)
        cursor = match.nodes[-1] if depth else self.tree.root
        cursor.cursors += 1
        holding = self._holdings[request] = _Holding(tables, first_live, match.num_tokens, depth, cursor)
        if self.prefix_caching:
            self.num_queries += 1
            self.num_query_tokens += request.num_tokens
            self.num_hit_tokens += match.num_tokens
        return holding

    def _extend(self, holding: _Holding, end: int) -> None:
        allocate = self.pool.allocate
        while holding.capacity < end:
            for table in holding.tables:
                table.append(allocate())
            holding.capacity += self._page_size

    def _slide(self, holding: _Holding, num_computed: int) -> None:
        """Let go of the pages that no token from `num_computed` on can see."""
        for group in self._windowed:
            first = self.layout.first_live_page(self.layout.groups[group], num_computed)
            table = holding.tables[group]
            for index in range(holding.first_live[group], min(first, len(table))):
                self.pool.drop(table[index])
                table[index] = NO_PAGE
                holding.first_live[group] = index + 1

    def _count_copies(self, holding: _Holding, num_computed: int) -> int:
        index = num_computed // self._page_size
        return sum(page >= 0 and self.pool.refs[page] > 1 for table in holding.tables for page in table[index:])

    def _unshare(self, holding: _Holding, num_computed: int) -> None:
        """Make the pages to be written the request's own: copy what others hold, take the rest out of the tree."""
        for table in holding.tables:
            for index in range(num_computed // self._page_size, len(table)):
                page = table[index]
                if page == NO_PAGE:
                    continue
                if self.pool.refs[page] > 1:
                    table[index] = copy = self.pool.allocate()
                    if index * self._page_size < num_computed:  # else every slot of it is written anew
                        self._copies[copy] = page
                    self.pool.drop(page)
                elif page in self.tree.owner:
                    self.pool.uncache(page)
        holding.shared = False

    def _check_holding(self, request: Request, holding: _Holding) -> None:
        size = self._page_size
        assert {len(table) * size for table in holding.tables} == {holding.capacity}, "tables of unequal length"
        assert request.num_computed <= holding.capacity, "computed tokens without slots"
        for group, table in enumerate(holding.tables):
            first = holding.first_live[group]
            assert first <= self.layout.first_live_page(self.layout.groups[group], request.num_computed)
            assert all(page == NO_PAGE for page in table[:first]), "a page before the window is held"
            assert all(0 <= page < self.num_pages for page in table[first:]), "a page in the window is missing"
            for page in table[request.num_computed // size :]:
                own = page < 0 or (self.pool.refs[page] == 1 and page not in self.tree.owner)
                assert own or holding.shared, "a page to be written is not private"
        node = holding.cursor
        for index in range(holding.committed - 1, -1, -1):
            assert node.key == tuple(request.token_ids[index * size : (index + 1) * size]), "tree path of other tokens"
            for table, page in zip(holding.tables, node.pages, strict=True):
                assert table[index] in (NO_PAGE, page), "a committed page is not the tree's"
            assert node.parent is not None
            node = node.parent
        assert node is self.tree.root
