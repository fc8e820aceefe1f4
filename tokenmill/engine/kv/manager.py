"""The KV manager: gives requests their pages. One pool of interchangeable pages serves all KV groups.

Owns block tables, sharing (prefix cache, forks), copy-on-write, windows and budgets; knows token ids and counts but
neither tensors nor why a request runs. The scheduler calls prefetch, match, reserve, commit, fork, release and
take_copies; the engine around it save, record_step, measure and close. A request holds pages from its first `reserve`
to `release`; its tables have equal length in all groups. A holder of a tree node holds the pages of all its ancestors
(but those its windows left), so pages without a holder can always be evicted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from tokenmill.engine.kv.budget.enforcer import BudgetEnforcer
from tokenmill.engine.kv.copying import PageCopies
from tokenmill.engine.kv.handles import (
    NO_MATCH,
    NO_SLOTS,
    PrefixMatch,
    Reservation,
    report_of,
    wants_prompt_logprobs,
)
from tokenmill.engine.kv.holding import Holding, check_holding, enter_pages
from tokenmill.engine.kv.pages import PagePool
from tokenmill.engine.kv.policy.base import EvictionPolicy
from tokenmill.engine.kv.policy.retention import FOREVER, RetentionPolicy
from tokenmill.engine.kv.prefix_tree import NO_PAGE, UNBOUNDED, PrefixNode, PrefixTree
from tokenmill.engine.kv.restore import Restorer
from tokenmill.engine.kv.saving import Saver
from tokenmill.engine.kv.snapshots import Snapshots
from tokenmill.engine.kv.sources import PrefixSources
from tokenmill.engine.kv.states import StateSlots
from tokenmill.engine.kv.tier.stack import TierStack
from tokenmill.engine.kv.transfer.publisher import Publisher
from tokenmill.engine.kv.usage import measure_pages
from tokenmill.engine.stats import EngineStats
from tokenmill.hardware.kv_layout import KVLayout
from tokenmill.types import CacheControl, Request, StepPlan


class KVManager:
    def __init__(
        self,
        layout: KVLayout,
        num_pages: int,
        prefix_caching: bool,
        policy: EvictionPolicy,
        tiers: TierStack | None = None,
        budgets: BudgetEnforcer | None = None,
        num_state_slots: int = 0,
        publisher: Publisher | None = None,
    ) -> None:
        """`num_state_slots`: of recurrent layers, as many as sequences may run at once or more. `publisher`: pages of
        prompts that other engines fetch go there; the tree has names then."""
        self.layout = layout
        self.num_pages = num_pages
        self.prefix_caching = prefix_caching
        self.stats = EngineStats(num_pages=num_pages, tiers=tiers.stats if tiers is not None else [])
        self._retention = RetentionPolicy(policy, self.stats)
        self._budgets = budgets or BudgetEnforcer(layout)
        states = StateSlots(num_state_slots, self._is_promised) if layout.states else None
        self._snapshots = Snapshots(states, layout.page_size, prefix_caching) if states is not None else None
        self._tree = PrefixTree(layout, tiers.root_name if tiers is not None else b"", states)
        self._saver = Saver(self._tree, tiers, self.stats) if tiers is not None else None
        on_evict = self._saver.offer if self._saver is not None else None
        self._pool = PagePool(num_pages, self._tree, self._retention, self.stats, on_evict)
        restorer = Restorer(self._tree, self._pool, tiers) if tiers is not None else None
        self.sources = PrefixSources(restorer, publisher, tiers.peers if tiers is not None else None, self._max_match)
        self.watch = self._tree.watch  # logs which pages the prefix cache has, by name, from now on
        self._page_size = layout.page_size
        self._num_groups = len(layout.groups)
        self._windowed = [g for g, span in enumerate(self._tree.spans) if span != UNBOUNDED]
        self._holdings: dict[Request, Holding] = {}
        self._copies = PageCopies(self._pool, self._tree)

    # --- the verbs of the scheduler ---

    def prefetch(self, request: Request, wait: float = 0.0) -> bool:
        """Have the tiers bring what they have of a waiting request's prefix, if that is faster than computing it.

        False: it is on its way. Blocks for at most `wait` seconds; ask again before `match`.
        """
        # Every holder could still grow by a page.
        return self.sources.ready(request, len(self._holdings) * self._num_groups, wait)

    @property
    def is_loading(self) -> bool:
        return self.sources.is_loading

    def match(self, request: Request, without: Sequence[Request] = ()) -> PrefixMatch:
        """The longest cached prefix of all known tokens, at least one short of them. Changes nothing.

        `fits`: whether all known tokens of the request fit now and every holder could still grow by a page, or nobody
        else holds pages; as if the requests in `without` had released theirs (a shared page counts for each of them).
        """
        max_pages = self._max_match(request)
        nodes, reached = self._find(request, max_pages) if max_pages else ([], 0)
        refs, unheld = self._pool.refs, 0
        if nodes:
            for group, first in enumerate(self._first_live(len(nodes) * self._page_size)):
                unheld += [refs[node.pages[group]] for node in nodes[first:]].count(0)
        fits = self._fits(request, len(nodes), unheld, without)
        size = self._page_size
        return PrefixMatch(len(nodes) * size, max_pages * size, fits, unheld, nodes, reached * size)

    def reserve(
        self, request: Request, count: int, match: PrefixMatch = NO_MATCH, only_spare: bool = False
    ) -> Reservation:
        """Slots to write the next `count` tokens to, in every group, or as many as there are; none: nothing changed.

        The first reservation of a request takes the pages of `match`; the tokens then begin after it. Pages that fell
        out of a window are released before new ones are taken. `only_spare`: leave a page for every holder to grow by.
        """
        holding = self._holdings.get(request)
        if holding is None:
            limit = self._row_limit(request, match.num_tokens, match.branch)
            count = min(count, limit, self._first_room(match))
            if count <= 0:
                return NO_SLOTS
            holding = self._open(request, match)
            self._extend(holding, match.num_tokens + count)
            return Reservation(count, holding.tables, 0, holding.state_slot)
        computed = request.num_computed
        if request.params.cache is not None:
            self._trim(request, holding)
        if request.budget is not None or self._snapshots is not None:
            count = min(count, self._row_limit(request, computed, holding.branch))
        if computed + count > holding.capacity or holding.shared:
            count = min(count, self._room(holding, computed, only_spare))
            if count <= 0:
                return NO_SLOTS
            if holding.shared:
                self._copies.unshare(holding, computed)
            self._extend(holding, computed + count)
        return Reservation(count, holding.tables, holding.num_dropped, holding.state_slot)

    def commit(self, request: Request) -> None:
        """Enter the pages that are now full and computed into the tree.

        Where the tree has such a page already (another request computed the same meanwhile) that one replaces ours.
        """
        holding = self._holdings[request]
        full = request.num_computed // self._page_size
        if full > holding.committed and self.prefix_caching and not holding.num_dropped:
            enter_pages(request, holding, full, self._tree, self._pool)
        if request.publishes is not None:
            self.sources.committed(request, holding, self._tree)
        if self._snapshots is not None:
            self._snapshots.keep(request, holding)
        cache = request.params.cache
        if cache is not None and not request.cache.retention and request.num_computed >= len(request.prompt_ids):
            self._retain(request, holding, cache)

    def release(self, request: Request) -> None:
        """Release all pages, from tail to head so that the end of a prefix is evicted before its beginning. Of a
        request that is still waiting: forget what was fetched for it."""
        holding = self._holdings.pop(request, None)
        if holding is None:
            self.sources.abandon(request)
            return
        if request.params.cache is not None:
            self._retain(request, holding, request.params.cache)
        drop = self._pool.drop
        for row in zip(*(reversed(table) for table in holding.tables), strict=True):
            for page in row:
                if page >= 0:
                    drop(page)
        if self._snapshots is not None:
            self._snapshots.release(holding)
        holding.cursor.cursors -= 1
        self._tree.prune(holding.cursor)
        self._copies.forget_released()
        if request.budget is not None:
            self._budgets.scores.released(request)

    def fork(self, parent: Request, child: Request) -> bool:
        """Share the pages of `parent` with `child` as far as its tokens go, the last one partly filled. Writers copy.

        The child's `token_ids` are a prefix of the parent's, its `num_computed` no more than what the parent computed.
        False: there is no copy of the recurrent states that the child would begin with (any more); nothing changed.
        """
        size = self._page_size
        source = self._holdings[parent]
        assert not source.num_dropped, "a request is forked before its budget takes pages"
        length = -(-child.num_tokens // size)
        committed = min(source.committed, child.num_computed // size)
        cursor = source.cursor
        for _ in range(source.committed - committed):
            assert cursor.parent is not None
            cursor = cursor.parent
        computed = child.num_computed
        slot = self._snapshots.fork(source, cursor, computed, committed) if self._snapshots is not None else 0
        if slot is None:
            return False
        tables = tuple(table[:length] for table in source.tables)
        for table in tables:
            for page in table:
                if page >= 0:
                    self._pool.take(page)
        self._holdings[child] = Holding(
            tables, list(source.first_live), len(tables[0]) * size, committed, cursor, shared=True, state_slot=slot
        )
        cursor.cursors += 1
        source.shared = True
        return True

    def take_copies(self) -> list[tuple[int, int]]:
        """(source, destination) pages to copy before the next step writes; no page is the destination of two."""
        if self._saver is not None:
            self._saver.export()  # what was evicted for that step
        return self._copies.take()

    def take_state_copies(self) -> list[tuple[int, int]]:
        """(source, destination) state slots to copy before the next step, in order."""
        return self._snapshots.slots.take_copies() if self._snapshots is not None else []

    # --- the engine around the scheduler ---

    def check(self) -> None:
        """Raise AssertionError if any page, count, table or tree link is not as it should be."""
        held = Counter(
            page for holding in self._holdings.values() for table in holding.tables for page in table if page >= 0
        )
        self._pool.check(held)
        self._tree.check(Counter(holding.cursor for holding in self._holdings.values()))
        for request, holding in self._holdings.items():
            check_holding(request, holding, self.layout, self._tree, self._pool)
        if self._snapshots is not None:
            self._snapshots.check(self._holdings.values(), self._tree.nodes())

    def measure(self) -> EngineStats:
        """The statistics record, with the page gauges of this moment."""
        self.stats.num_pages_retained = self._retention.num_retained
        self.sources.measure(self.stats)
        return measure_pages(self.stats, self.layout, self._pool, self._holdings)

    @property
    def num_available(self) -> int:
        """Pages that can be had now: free, or cached and without a holder."""
        return self._pool.available

    def clear(self) -> None:
        """Forget every cached page that nobody holds."""
        self._pool.clear()

    def record_step(self, plan: StepPlan, seconds: float) -> None:
        """How long a step took: the tiers weigh loading against computing."""
        if self._saver is not None:
            self._saver.record_step(plan, seconds)

    def save(self, wait: float = 0.0) -> bool:
        """Have a few cached pages written to the tiers, in an idle moment; False: there are no more. With `wait` all of
        them, blocking until they are written or these seconds have passed: False if they are."""
        return self._saver is not None and self._saver.save(wait)

    def close(self, timeout: float = 60.0) -> None:
        """Write what is cached to the tiers, as far as time allows, and do without them from now on."""
        if self._saver is not None:
            self._saver.close(timeout)
        self._saver = None
        self.sources.close()
        self._pool.on_evict = None

    # --- how ---

    def _fits(self, request: Request, matched: int, unheld: int, without: Sequence[Request]) -> bool:
        others = len(self._holdings) - len(without)
        if not others:
            return True
        total = -(-request.num_tokens // self._page_size)
        needed = sum(total - max(first, matched) for first in self._first_live(request.num_tokens))
        spare = self._pool.available - unheld
        for holding in map(self._holdings.__getitem__, without):
            spare += sum(len(holding.tables[0]) - first for first in holding.first_live)
        return needed + others * self._num_groups <= spare

    def _first_room(self, match: PrefixMatch) -> int:
        """Tokens of a request without pages that fit now, beside the matched ones."""
        return max(0, self._pool.available - match.num_unheld) // self._num_groups * self._page_size

    def _room(self, holding: Holding, num_computed: int, only_spare: bool) -> int:
        """Tokens from `num_computed` on that fit now."""
        self._slide(holding, num_computed)
        pages = self._pool.available
        if holding.shared:
            pages -= self._copies.count(holding, num_computed)
            if pages < 0:
                return 0
        if only_spare:
            pages = max(0, pages - len(self._holdings) * self._num_groups)
        return holding.capacity + pages // self._num_groups * self._page_size - num_computed

    def _find(self, request: Request, max_pages: int) -> tuple[list[PrefixNode], int]:
        """The nodes that a request can go on from, and the depth up to which pages are cached."""
        if self._snapshots is not None:
            return self._tree.match_snapshot(request.token_ids, max_pages, request.cache_name)
        nodes = self._tree.match(request.token_ids, max_pages, request.cache_name)
        return nodes, len(nodes)

    def _row_limit(self, request: Request, start: int, branch: int) -> int:
        """The most tokens that a row which begins at `start` may have."""
        limit = UNBOUNDED if request.budget is None else self._budgets.row_limit(request, start)
        return limit if self._snapshots is None else min(limit, self._snapshots.row_limit(request, start, branch))

    def _is_promised(self, owner: object) -> bool:
        return isinstance(owner, PrefixNode) and any(map(self._retention.is_promised, owner.pages))

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
            self._pool.take_path(table[first:])
        cursor = match.nodes[-1] if depth else self._tree.open_root(request.cache_name)
        cursor.cursors += 1
        slot = self._snapshots.slots.allocate(cursor.snapshot) if self._snapshots is not None else 0
        holding = self._holdings[request] = Holding(
            tables, first_live, match.num_tokens, depth, cursor, state_slot=slot, branch=match.branch
        )
        if self.prefix_caching:
            self.stats.num_prefix_query_tokens += request.num_tokens
            self.stats.num_prefix_hit_tokens += match.num_tokens
        self._report(request, match)
        return holding

    def _needs_all_computed(self, request: Request) -> bool:
        return request.budget is not None and self._budgets.needs_all_computed(request)

    def _max_match(self, request: Request) -> int:
        """The most pages of its prefix that a request may take from the cache."""
        if not self.prefix_caching or wants_prompt_logprobs(request) or self._needs_all_computed(request):
            return 0
        limit = request.num_tokens - 1 if request.logits_from is None else request.logits_from
        if request.budget is not None:
            # Its own output was computed over fewer pages; they leave between a row of the prompt and the next.
            limit = min(limit, len(request.prompt_ids) - 1)
        return limit // self._page_size

    def _report(self, request: Request, match: PrefixMatch) -> None:
        """What the cache did for a request that is admitted for the first time."""
        restored = self.sources.settle(request)
        if request.num_preemptions:
            return
        must_compute = request.params.prompt_logprobs is not None or self._needs_all_computed(request)
        reason = "off" if not self.prefix_caching else "must_compute" if must_compute else ""
        request.cache = report_of(match, self._max_match(request), restored, reason)

    def _extend(self, holding: Holding, end: int) -> None:
        allocate = self._pool.allocate
        while holding.capacity < end:
            for table in holding.tables:
                table.append(allocate())
            holding.capacity += self._page_size

    def _slide(self, holding: Holding, num_computed: int) -> None:
        """Release the pages that no token from `num_computed` on can see."""
        for group in self._windowed:
            first = self.layout.first_live_page(self.layout.groups[group], num_computed)
            first -= holding.num_dropped // self._page_size  # all before the window
            table = holding.tables[group]
            for index in range(holding.first_live[group], min(first, len(table))):
                self._pool.drop(table[index])
                table[index] = NO_PAGE
                holding.first_live[group] = index + 1

    def _trim(self, request: Request, holding: Holding) -> None:
        """Release the pages that the request's budget has no place for."""
        victims = self._budgets.victims(request, holding.tables, holding.num_dropped)
        if not victims:
            return
        if not holding.num_dropped:  # it leaves the tree: what it holds from now on is no prefix
            holding.cursor.cursors -= 1
            self._tree.prune(holding.cursor)
            self._tree.root.cursors += 1
            holding.cursor, holding.committed = self._tree.root, 0
        for page in holding.drop(victims, self._page_size):
            self._pool.drop(page)
        request.cache.num_dropped_tokens = holding.num_dropped
        self._budgets.scores.dropped(request, victims)

    def _retain(self, request: Request, holding: Holding, cache: CacheControl) -> None:
        """Have the pages of the prompt retained, if the tenant's quota allows it: when the prompt is computed, so that
        the first token can tell, and again at release, from which a TTL counts."""
        depth = min(holding.committed, len(request.prompt_ids) // self._page_size)
        pages = [page for table in holding.tables for page in table[:depth] if page >= 0]
        if not (cache.ttl or cache.pin) or not pages or request.cache.retention == "over_quota":
            return
        seconds, max_pages = FOREVER if cache.pin else cache.ttl, int(request.max_pinned_share * self.num_pages)
        granted = self._retention.promise(pages, seconds, request.tenant, max_pages)
        request.cache.retention = "granted" if granted else "over_quota"
