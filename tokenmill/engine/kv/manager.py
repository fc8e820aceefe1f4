"""The KV manager: gives requests their pages. One pool of interchangeable pages serves all KV groups.

Owns block tables, sharing (prefix cache, forks), copy-on-write, windows and budgets; knows token ids and counts but
neither tensors nor why a request runs. The scheduler is its only caller: match, reserve, commit, release, fork, check,
and `prepare` where pages may have to come back from a tier first. A request holds pages from its first `reserve` to
`release`; its tables have equal length in all groups. A holder of a tree node holds the pages of all its ancestors (but
those its windows left), so unheld pages can always be evicted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from tokenmill.engine.kv.budget.base import PageScores
from tokenmill.engine.kv.budget.keeper import BudgetKeeper, budget_of
from tokenmill.engine.kv.holding import Holding, check_holding
from tokenmill.engine.kv.pages import PagePool
from tokenmill.engine.kv.policy.base import EvictionPolicy
from tokenmill.engine.kv.policy.keeping import FOREVER, Keeping
from tokenmill.engine.kv.prefix_tree import NO_PAGE, UNBOUNDED, PrefixNode, PrefixTree
from tokenmill.engine.kv.restore import Restored, Restorer
from tokenmill.engine.kv.saving import Saver
from tokenmill.engine.kv.tier.stack import TierStack
from tokenmill.engine.kv.usage import KVUsage, usage_of
from tokenmill.hardware.kv_layout import KVLayout
from tokenmill.types import CacheReport, Request, StepPlan


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """What `match` found. A handle for `room`, `fits` and `reserve`; stale after any other call that moves pages."""

    num_tokens: int = 0
    num_unheld: int = 0  # matched pages that nobody holds: taking them makes that many fewer available
    nodes: list[PrefixNode] = field(default_factory=list)


NO_MATCH = PrefixMatch()


class KVManager:
    def __init__(
        self,
        layout: KVLayout,
        num_pages: int,
        prefix_caching: bool,
        policy: EvictionPolicy,
        tiers: TierStack | None = None,
        scores: PageScores | None = None,
    ) -> None:
        self.layout = layout
        self.num_pages = num_pages
        self.prefix_caching = prefix_caching and not layout.states  # a recurrent state cannot be cut at a page
        self.num_queries = 0  # requests that looked for a prefix and were admitted
        self.num_query_tokens = 0
        self.num_hit_tokens = 0
        self.keeping = Keeping(policy)
        self.budgets = BudgetKeeper(layout, scores)
        self.tiers = tiers
        self.tree = PrefixTree(layout, tiers.root_name if tiers is not None else b"")
        self._saver = Saver(self.tree, tiers) if tiers is not None else None
        self.pool = PagePool(num_pages, self.tree, self.keeping, self._saver.offer if self._saver else None)
        self._restorer = Restorer(self.tree, self.pool, tiers) if tiers is not None else None
        self._page_size = layout.page_size
        self._num_groups = len(layout.groups)
        self._windowed = [g for g, span in enumerate(self.tree.spans) if span != UNBOUNDED]
        self._holdings: dict[Request, Holding] = {}
        self._copies: dict[int, int] = {}  # destination -> source

    # --- the verbs ---

    def match(self, request: Request) -> PrefixMatch:
        """The longest cached prefix of all known tokens, at least one short of them. Changes nothing."""
        nodes = self.tree.match(request.token_ids, self._max_match(request))
        if not nodes:
            return NO_MATCH
        refs, unheld = self.pool.refs, 0
        for group, first in enumerate(self._first_live(len(nodes) * self._page_size)):
            unheld += [refs[node.pages[group]] for node in nodes[first:]].count(0)
        return PrefixMatch(len(nodes) * self._page_size, unheld, nodes)

    def prepare(self, request: Request, wait: float = 0.0) -> bool:
        """Have the tiers bring what they have of a waiting request's prefix, if that is faster than computing it.

        False: it is on its way, for at most `wait` seconds more; ask again before `match`.
        """
        if self._restorer is None:
            return True
        reserved = len(self._holdings) * self._num_groups  # everyone who runs could still grow by a page
        return self._restorer.ready(request, self._max_match(request), reserved, wait)

    def abandon(self, request: Request) -> None:
        """A waiting request is gone."""
        if self._restorer is not None:
            self._restorer.abandon(request)

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
        self._trim(request, holding)
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
        if full <= holding.committed or not self.prefix_caching or holding.num_dropped:
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
                    self.pool.take(theirs, counts=False)
                    table[index] = theirs
                    self.pool.drop(ours)
        node.cursors += 1
        holding.cursor = node
        holding.committed = full

    def release(self, request: Request) -> None:
        """Let go of everything, from tail to head so that the end of a prefix is evicted before its beginning."""
        holding = self._holdings.pop(request)
        self._promise(request, holding)
        drop = self.pool.drop
        for row in zip(*(reversed(table) for table in holding.tables), strict=True):
            for page in row:
                if page >= 0:
                    drop(page)
        holding.cursor.cursors -= 1
        self.tree.prune(holding.cursor)
        if self._copies:
            self._copies = {copy: source for copy, source in self._copies.items() if self.pool.refs[copy] > 0}
        if budget_of(request) is not None:
            self.budgets.scores.released(request)

    def fork(self, parent: Request, child: Request) -> None:
        """Share the pages of `parent` with `child` as far as its tokens go, the last one partly filled. Writers copy.

        The child's `token_ids` are a prefix of the parent's, its `num_computed` no more than what the parent computed.
        """
        size = self._page_size
        source = self._holdings[parent]
        assert not self.layout.states, "a recurrent state would have to be copied"
        assert not source.num_dropped, "a request is forked before its budget takes pages"
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
        self._holdings[child] = Holding(
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
            check_holding(request, holding, self.layout, self.tree, self.pool)

    # --- questions the scheduler asks ---

    def room(self, request: Request, match: PrefixMatch = NO_MATCH) -> int:
        """For how many more tokens of this request `reserve` would succeed now."""
        holding = self._holdings.get(request)
        if holding is None:
            return max(0, self.pool.available - match.num_unheld) // self._num_groups * self._page_size
        self._trim(request, holding)
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

    def num_dropped(self, request: Request) -> int:
        """Tokens whose pages a budget took out of the tables."""
        return self._holdings[request].num_dropped

    def row_limit(self, request: Request, start: int) -> int:
        """The most tokens that a row which begins at `start` may have."""
        return UNBOUNDED if budget_of(request) is None else self.budgets.row_limit(request, start)

    def take_copies(self) -> list[tuple[int, int]]:
        """(source, destination) pages to copy before the next step writes; no page is the destination of two."""
        copies = [(source, copy) for copy, source in self._copies.items()]
        self._copies.clear()
        return copies

    def clear_cache(self) -> None:
        """Forget every cached page that nobody holds."""
        self.pool.clear()

    # --- tiers ---

    def save(self) -> bool:
        """Have a few cached pages written to the tiers when idle; False once there are no more."""
        return self._saver is not None and self._saver.save()

    def record_step(self, plan: StepPlan, seconds: float) -> None:
        """How long a step took: the tiers weigh loading against computing."""
        if self._saver is not None:
            self._saver.record_step(plan, seconds)

    def close(self, timeout: float = 60.0) -> None:
        """Write what is cached to the tiers, as far as time allows, and do without them from now on."""
        if self._saver is not None:
            self._saver.close(timeout)
        self.tiers = self._saver = self._restorer = None
        self.pool.on_evict = None

    def usage(self) -> KVUsage:
        return usage_of(self.layout, self.pool, self._holdings)

    # --- how ---

    def _first_live(self, num_tokens: int) -> list[int]:
        return [self.layout.first_live_page(group, num_tokens) for group in self.layout.groups]

    def _open(self, request: Request, match: PrefixMatch) -> Holding:
        """Start a holding with the matched pages."""
        depth = len(match.nodes)
        first_live = self._first_live(match.num_tokens)
        tables = tuple(
            [NO_PAGE] * first + [node.pages[group] for node in match.nodes[first:]]
            for group, first in enumerate(first_live)
        )
        for table, first in zip(tables, first_live, strict=True):
            self.pool.take_path(table[first:])
        cursor = match.nodes[-1] if depth else self.tree.root
        cursor.cursors += 1
        holding = self._holdings[request] = Holding(tables, first_live, match.num_tokens, depth, cursor)
        if self.prefix_caching:
            self.num_queries += 1
            self.num_query_tokens += request.num_tokens
            self.num_hit_tokens += match.num_tokens
        self._report(request, match)
        return holding

    def _max_match(self, request: Request) -> int:
        """The most pages of its prefix that a request may take from the cache."""
        if not self.prefix_caching or self.budgets.needs_all_computed(request):
            return 0
        limit = request.num_tokens - 1 if request.logits_from is None else request.logits_from
        if budget_of(request) is not None:
            # Its own output was computed over fewer pages; they leave between a row of the prompt and the next.
            limit = min(limit, len(request.prompt_ids) - 1)
        return limit // self._page_size

    def _report(self, request: Request, match: PrefixMatch) -> None:
        """What the cache did for a request that is admitted for the first time."""
        restored = self._restorer.settle(request) if self._restorer is not None else Restored()
        if request.num_preemptions:
            return
        most = self._max_match(request)
        if not self.prefix_caching:
            reason = "off"
        elif request.params.prompt_logprobs is not None or self.budgets.needs_all_computed(request):
            reason = "must_compute"
        elif len(match.nodes) >= most:
            reason = "hit" if most else "short"
        else:
            reason = restored.reason or ("partial" if match.nodes else "cold")
        loaded = min(restored.num_tokens, match.num_tokens)
        request.cache = CacheReport(reason, restored.tier if loaded else "", loaded)

    def _extend(self, holding: Holding, end: int) -> None:
        allocate = self.pool.allocate
        while holding.capacity < end:
            for table in holding.tables:
                table.append(allocate())
            holding.capacity += self._page_size

    def _slide(self, holding: Holding, num_computed: int) -> None:
        """Let go of the pages that no token from `num_computed` on can see."""
        for group in self._windowed:
            first = self.layout.first_live_page(self.layout.groups[group], num_computed)
            first -= holding.num_dropped // self._page_size  # all before the window
            table = holding.tables[group]
            for index in range(holding.first_live[group], min(first, len(table))):
                self.pool.drop(table[index])
                table[index] = NO_PAGE
                holding.first_live[group] = index + 1

    def _trim(self, request: Request, holding: Holding) -> None:
        """Let go of the pages that the request's budget has no place for."""
        if request.params.cache is None:
            return
        victims = self.budgets.victims(request, holding.tables, holding.num_dropped)
        if not victims:
            return
        if not holding.num_dropped:  # it leaves the tree: what it holds from now on is no prefix
            holding.cursor.cursors -= 1
            self.tree.prune(holding.cursor)
            self.tree.root.cursors += 1
            holding.cursor, holding.committed = self.tree.root, 0
        for page in holding.drop(victims, self._page_size):
            self.pool.drop(page)
        request.cache.num_dropped_tokens = holding.num_dropped
        self.budgets.scores.dropped(request, victims)

    def _promise(self, request: Request, holding: Holding) -> None:
        """Have the pages of the prompt kept, before they are let go of."""
        cache = request.params.cache
        if cache is None or not (cache.ttl or cache.pin):
            return
        pages = min(holding.committed, len(request.prompt_ids) // self._page_size)
        for table in holding.tables:
            for page in table[:pages]:
                if page >= 0:
                    self.keeping.keep(page, FOREVER if cache.pin else cache.ttl)

    def _count_copies(self, holding: Holding, num_computed: int) -> int:
        index = (num_computed - holding.num_dropped) // self._page_size
        return sum(page >= 0 and self.pool.refs[page] > 1 for table in holding.tables for page in table[index:])

    def _unshare(self, holding: Holding, num_computed: int) -> None:
        """Make the pages to be written the request's own: copy what others hold, take the rest out of the tree."""
        computed = num_computed - holding.num_dropped
        for table in holding.tables:
            for index in range(computed // self._page_size, len(table)):
                page = table[index]
                if page == NO_PAGE:
                    continue
                if self.pool.refs[page] > 1:
                    table[index] = copy = self.pool.allocate()
                    if index * self._page_size < computed:  # else every slot of it is written anew
                        self._copies[copy] = page
                    self.pool.drop(page)
                elif page in self.tree.owner:
                    self.pool.uncache(page)
        holding.shared = False
