"""Brings the prefix pages of a waiting request back from the tiers into the prefix tree, where it then finds them.

At admission: which pages would lengthen the match, which tier has them, are they worth it; they are fetched in a
thread while others compute, then copied into pages of the pool as if a request had computed and released them. Requests
that begin alike share one load; beyond a number of loads, and after a time, a request is computed instead. A request
that names a peer as the source of its pages has them fetched from there, without weighing: the work is done. The KV
manager owns it and calls it from the engine thread; the loading thread reads `_WantedPrefix` too, which never changes.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from tokenmill.engine.kv.handles import Restored
from tokenmill.engine.kv.pages import PagePool
from tokenmill.engine.kv.prefix_tree import NO_PAGE, UNBOUNDED, PrefixNode, PrefixTree, child_name
from tokenmill.engine.kv.tier.costs import IMPORT
from tokenmill.engine.kv.tier.load import Load
from tokenmill.engine.kv.tier.stack import TierStack
from tokenmill.engine.kv.transfer.peer import NAME as PEER
from tokenmill.types import KvLease, Request

_MAX_LOADS = 32  # under way at the same time


@dataclass(frozen=True, slots=True)
class _WantedPrefix:
    """The pages of a prefix by depth (from 1) and group: their keys, and which the tree had when it was made."""

    keys: list[list[bytes]]  # [depth - 1][group]
    present: list[list[bool]]
    spans: list[int]
    page_size: int

    def missing(self, depth: int) -> list[bytes]:
        """Keys of the pages that a match of this depth needs and the tree lacks, from the root on."""
        return [
            self.keys[place][group]
            for place in range(depth)
            for group, span in enumerate(self.spans)
            if place >= depth - span and not self.present[place][group]
        ]

    def absent(self, place: int | None = None) -> list[bytes]:
        """Keys of all pages that the tree lacks, or of those at one place."""
        places = range(len(self.keys)) if place is None else (place,)
        return [
            key for each in places for key, there in zip(self.keys[each], self.present[each], strict=True) if not there
        ]

    def depth(self, found: set[bytes]) -> int:
        """The deepest match that the tree and the found pages allow."""
        runs = [0] * len(self.spans)
        best = 0
        for place, keys in enumerate(self.keys):
            usable = True
            for group, key in enumerate(keys):
                there = self.present[place][group] or key in found
                runs[group] = runs[group] + 1 if there else 0
                usable = usable and runs[group] >= min(place + 1, self.spans[group])
            if usable:
                best = place + 1
        return best

    def choose(self, found: set[bytes]) -> list[bytes]:
        return self.missing(self.depth(found))

    def num_saved(self, chosen: list[bytes]) -> int:
        return (self.depth(set(chosen)) - self.depth(set())) * self.page_size


class Restorer:
    def __init__(self, tree: PrefixTree, pool: PagePool, tiers: TierStack) -> None:
        self._tree = tree
        self._pool = pool
        self._tiers = tiers
        self._waiting: dict[Request, tuple[_WantedPrefix, Load]] = {}
        self._following: dict[Request, tuple[bytes, Load]] = {}  # the page it lacks first, another request's load of it
        self._restored: dict[Request, Restored] = {}  # until admission
        self._early: set[Request] = set()  # those that were looked at before their turn

    def start_early(self, request: Request, max_pages: int) -> None:
        """Have a load begin for a request whose turn is yet to come. What it brings stays in its buffers until then;
        where there is nothing to load, that is decided when it is its turn."""
        if not (request in self._early or request in self._restored or self._is_loading(request)):
            self._early.add(request)
            self._begin(request, max_pages)

    def ready(self, request: Request, max_pages: int, num_reserved: int, wait: float) -> bool:
        """Whether all pages that are worth waiting for are in the tree. Waits for at most `wait` seconds.

        `num_reserved`: pages to leave for running requests.
        """
        if request in self._following and not self._stop_following(request, num_reserved, wait):
            return False
        if request not in self._restored and request not in self._waiting:
            restored = self._begin(request, max_pages)
            if restored is not None:
                self._restored[request] = restored
        if request in self._waiting:
            if self._has_no_room(request, num_reserved):
                return True
            self._collect(request, num_reserved, wait)
        return request in self._restored

    @property
    def is_loading(self) -> bool:
        """Whether a request waits for pages."""
        return bool(self._waiting or self._following)

    def unfinished(self) -> list[Request]:
        """The requests that cannot have their pages yet."""
        followers = [request for request, (_, load) in self._following.items() if load.pending]
        return followers + [request for request, (_, load) in self._waiting.items() if load.pending]

    def settle(self, request: Request) -> Restored:
        """The request is admitted: what it got."""
        restored = self._restored.pop(request, None)
        if restored is None:  # it is started without what waits in its buffers
            self.abandon(request)
        self._end_lease(request)
        return restored or Restored()

    def abandon(self, request: Request) -> None:
        """The request is gone before it was admitted."""
        self._restored.pop(request, None)
        self._following.pop(request, None)
        if request in self._waiting:
            load = self._waiting.pop(request)[1]
            load.abandoned = True
            load.cancel()
        self._end_lease(request)

    def source_failed(self, request_id: str) -> None:
        """Nobody computes the pages that a request waits for. Late news of a request that is gone changes nothing."""
        for request, (_, load) in self._waiting.items():
            if request.request_id == request_id and load.from_peer:
                load.problem = "prefill_failed"
                load.cancel()

    # --- how ---

    def _wanted_prefix(self, request: Request, max_pages: int) -> _WantedPrefix:
        size, groups = self._tree.page_size, range(len(self._tree.spans))
        token_ids, salt = request.token_ids, request.cache_name
        node: PrefixNode | None = self._tree.find_root(salt)
        name = self._tree.root_name(salt)
        keys, present = [], []
        for place in range(max_pages):
            tokens = tuple(token_ids[place * size : (place + 1) * size])
            node = node.children.get(tokens) if node is not None else None
            name = node.name if node is not None else child_name(name, tokens)
            keys.append([self._tiers.key(name, group) for group in groups])
            present.append([node is not None and node.pages[group] >= 0 for group in groups])
        return _WantedPrefix(keys, present, self._tree.spans, size)

    def _begin(self, request: Request, max_pages: int) -> Restored | None:
        """Ask for what would help: None. Else there is nothing to wait for."""
        wanted = self._wanted_prefix(request, max_pages)
        source, declined = self._source(request, wanted)
        if source is not None:
            keys = wanted.missing(max_pages)
        else:
            keys = wanted.absent() if self._tiers.has_remote else wanted.choose(self._found_here(wanted))
        if not keys:
            return Restored(source=declined)
        for _, load in self._waiting.values():
            # Who has no peer does not wait for one: that may take as long as computing.
            if load.keys[0] == keys[0] and not load.cancelled and (source is not None or not load.from_peer):
                self._following[request] = (keys[0], load)
                return None
        if len(self._waiting) >= _MAX_LOADS:
            return Restored("tier_busy", source="busy" if source is not None else declined)
        load = Load(keys, wanted.choose, wanted.num_saved, from_peer=source is not None)
        self._waiting[request] = (wanted, load)
        self._tiers.start(load, source)
        if source is not None and source.on_demand and self._tiers.peers is not None:
            self._tiers.peers.on_wanted(request.request_id)
        return None

    def _source(self, request: Request, wanted: _WantedPrefix) -> tuple[KvLease | None, str]:
        """The peer to fetch from, or why not from there. A request that was preempted has had its pages."""
        source, peers = request.source, self._tiers.peers
        if source is None or request.num_preemptions:
            return None, ""
        if peers is None or not peers.allows(source.address):
            return None, "not_allowed"
        num_missing = (len(wanted.keys) - wanted.depth(set())) * wanted.page_size
        return (source, "") if num_missing >= max(1, source.min_tokens) else (None, "short")

    def _end_lease(self, request: Request) -> None:
        self._early.discard(request)
        if request.source is not None and self._tiers.peers is not None:
            self._tiers.peers.release(request.source)

    def _is_loading(self, request: Request) -> bool:
        return request in self._waiting or request in self._following

    def _has_no_room(self, request: Request, num_reserved: int) -> bool:
        """Whether all pages of a peer are here, but running requests leave no room for them: they stay in their
        buffers until the request can start, which it cannot now. Less than all would be computed again."""
        wanted, load = self._waiting[request]
        if not load.from_peer or not load.done.is_set() or not num_reserved or len(load.pages) < len(load.keys):
            return False
        depth = len(wanted.keys)
        return len(load.keys) + num_reserved > self._available(request, depth)

    def _collect(self, request: Request, num_reserved: int, wait: float) -> bool:
        """Put what was loaded for a request into the tree. False: it is still on its way."""
        wanted, load = self._waiting[request]
        if not load.done.wait(wait) and not load.expired:
            return False
        if load.done.is_set():
            load.cancelled = False  # whoever ended it early: what came counts
        else:
            load.cancel()
        del self._waiting[request]
        self._restored[request] = self._take(request, wanted, load, num_reserved)
        return True

    def _stop_following(self, request: Request, num_reserved: int, wait: float) -> bool:
        """Whether the load of another request is over. What that did not bring is not asked for again."""
        key, load = self._following[request]
        first = next((other for other, (_, each) in self._waiting.items() if each is load), None)
        if first is not None and not self._collect(first, num_reserved, wait):
            return False
        del self._following[request]
        if key not in load.pages and not load.abandoned:
            reason = "tier_failed" if load.cancelled else load.reason
            self._restored[request] = Restored(reason, source=load.problem if load.from_peer else "")
        return True

    def _found_here(self, wanted: _WantedPrefix) -> set[bytes]:
        """What the tiers of this machine have of a wanted prefix, as far as there is no gap that ends every match."""
        found: set[bytes] = set()
        for place in range(len(wanted.keys)):
            absent = wanted.absent(place)
            found |= self._tiers.local(absent)
            if any(wanted.spans[wanted.keys[place].index(key)] == UNBOUNDED for key in absent if key not in found):
                break
        return found

    def _take(self, request: Request, wanted: _WantedPrefix, load: Load, num_reserved: int) -> Restored:
        """Put the loaded pages into the tree, as far as they and the pool reach."""
        pages = {} if load.cancelled else load.pages
        source = (load.problem or ("timeout" if load.cancelled else "used")) if load.from_peer else ""
        if not pages:
            return Restored("tier_failed" if load.cancelled else load.reason, source=source)
        # The tree may have changed since: look again.
        wanted = self._wanted_prefix(request, len(wanted.keys))
        before, depth, reason = wanted.depth(set()), wanted.depth(set(pages)), load.reason
        while depth > before:
            missing = wanted.missing(depth)
            excess = len(missing) + num_reserved - self._available(request, depth)
            if excess <= 0 and pages.keys() >= set(missing):
                break
            depth -= max(1, excess // len(wanted.spans))
            reason = reason or "no_room"
        if depth <= before:
            return Restored(reason, source=source)
        self._insert(request, wanted, depth, load)
        size = self._tree.page_size
        slowest = {load.tiers[key] for key in wanted.missing(depth)}
        names = [tier.name for tier in self._tiers.tiers] + [PEER]
        tier = next(name for name in reversed(names) if name in slowest)
        return Restored(reason, (depth - before) * size, tier, source)

    def _available(self, request: Request, depth: int) -> int:
        """Pages that can be had without those on the path itself."""
        nodes = self._tree.match(request.token_ids, depth, request.cache_name)
        path = sum(page >= 0 and self._pool.refs[page] == 0 for node in nodes for page in node.pages)
        return self._pool.available - path

    def _insert(self, request: Request, wanted: _WantedPrefix, depth: int, load: Load) -> None:
        tree, pool, size = self._tree, self._pool, self._tree.page_size
        nodes = []
        node = tree.open_root(request.cache_name)
        for place in range(depth):
            node = tree.child(node, tuple(request.token_ids[place * size : (place + 1) * size]))
            nodes.append(node)
        node.cursors += 1  # nobody prunes the path
        began = time.monotonic()
        needed = [(place, group) for place in range(depth) for group, span in enumerate(tree.spans)
                  if place >= depth - span]  # fmt: skip
        # What is there is held before anything is evicted for the rest.
        for place, group in needed:
            if wanted.present[place][group]:
                pool.take(nodes[place].pages[group])
        absent = [(place, group) for place, group in needed if not wanted.present[place][group]]
        pages = [pool.allocate() for _ in absent]
        data = [load.pages[wanted.keys[place][group]] for place, group in absent]
        self._tiers.restore(pages, data)
        for (place, group), page in zip(absent, pages, strict=True):
            assert nodes[place].pages[group] == NO_PAGE
            tree.attach(nodes[place], group, page)
        num_bytes = sum(each.nbytes for each in data)
        self._tiers.costs.record_load(IMPORT, num_bytes, time.monotonic() - began)
        node.cursors -= 1
        for place, group in reversed(needed):  # the end of a prefix is evicted before its beginning
            pool.drop(nodes[place].pages[group])
