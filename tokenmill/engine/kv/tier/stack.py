"""The tiers of an engine, nearest first: pages that leave are written to all, those wanted come from the nearest.

The engine thread only copies pages and asks tables in memory; each tier has its own threads (guard.py), and one more
here runs the loads. Pages that cannot be written as fast as they come are dropped and counted; loads are asked for at
admission and are cut off when computing would have been done by then. Knows keys and bytes; which pages a request needs
is restore.py's business.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from tokenmill.engine.kv.tier.base import PageAccess, PageTier
from tokenmill.engine.kv.tier.costs import LoadCosts
from tokenmill.engine.kv.tier.guard import GuardedTier, Leaving
from tokenmill.engine.kv.tier.load import MAX_LOAD_SECONDS, Load
from tokenmill.engine.kv.transfer.peer import PeerPages
from tokenmill.engine.stats import TierStats
from tokenmill.log import get_logger
from tokenmill.types import KvLease

_log = get_logger(__name__)
_PAGES_AT_ONCE = 8  # read from a tier between two looks at the clock
_OPEN_SECONDS = 2.0  # at the start, for all tiers together; those that take longer join later
_CLOSE_SECONDS = 0.5  # for the threads of all tiers together


class TierStack:
    def __init__(
        self,
        tiers: Sequence[PageTier],
        access: PageAccess,
        root_name: bytes,
        page_bytes: int,
        peers: PeerPages | None = None,
    ) -> None:
        """`root_name`: what all keys of this engine's pages hang from (model, KV dtype, layout). `peers`: engines that
        requests may name as the source of their pages."""
        self.peers = peers
        self.tiers = [GuardedTier(tier, page_bytes) for tier in tiers]
        self.root_name = root_name
        self.costs = LoadCosts()
        self._access = access
        self._page_bytes = page_bytes
        self._leaving: dict[bytes, int] = {}  # key -> page, until the next export
        self._loads: queue.SimpleQueue[Load | None] = queue.SimpleQueue()
        self._loader = threading.Thread(target=self._load_all, name="kv-loader", daemon=True)
        self._loader.start()
        deadline = time.monotonic() + _OPEN_SECONDS
        for tier in self.tiers:
            if not tier.wait_tried(max(0.0, deadline - time.monotonic())):
                _log.warning("%s tier: not available yet; the engine starts without it", tier.name)

    # --- engine thread ---

    @staticmethod
    def key(name: bytes, group: int) -> bytes:
        return name + bytes([group])

    def holds(self, key: bytes) -> bool:
        """Whether no tier that can be written lacks the page, or it is about to be written."""
        return key in self._leaving or not any(tier.wants(key) for tier in self.tiers)

    @property
    def has_space(self) -> bool:
        """Whether another page can wait to be written."""
        return all(tier.has_space for tier in self.tiers if tier.writable)

    def offer(self, key: bytes, page: int) -> bool:
        """Have a page written, unless it is stored already. `export` must be called before it is overwritten. False:
        pages come faster than they can be written, and a tier does not get this one."""
        if key in self._leaving:
            return True
        wanting = [tier for tier in self.tiers if tier.wants(key)]
        if any(tier.has_space for tier in wanting):
            self._leaving[key] = page
        return all(tier.has_space for tier in wanting)

    def export(self) -> None:
        """Copy all pages that were offered, in one go, and hand them to the tiers."""
        if not self._leaving:
            return
        leaving, self._leaving = self._leaving, {}
        batch = Leaving(self._access.export_pages(list(leaving.values())))
        for index, key in enumerate(leaving):
            for tier in self.tiers:
                if tier.wants(key) and tier.has_space:
                    tier.put(key, batch, index)

    def restore(self, pages: Sequence[int], data: Sequence[memoryview]) -> None:
        self.export()  # some of the pages may have been evicted a moment ago
        self._access.import_pages(pages, data)

    def local(self, keys: Iterable[bytes]) -> set[bytes]:
        """Those of the keys that a tier in this machine has."""
        wanted = list(keys)
        found: set[bytes] = set()
        for tier in self.tiers:
            found.update(key for key, there in zip(wanted, tier.local(wanted), strict=True) if there)
        return found

    @property
    def has_remote(self) -> bool:
        """Whether a tier must be asked by a round trip, and can be."""
        return any(tier.remote and tier.readable for tier in self.tiers)

    def start(self, load: Load, lease: KvLease | None = None) -> None:
        """`lease`: of the peer that has the pages; without one the tiers are asked."""
        if lease is None:
            self._loads.put(load)
        else:
            assert self.peers is not None
            self.peers.start(load, lease)

    def flush(self, timeout: float) -> bool:
        """Wait until all that was offered is written. False: not in time, or a tier does not take it."""
        self.export()
        deadline = time.monotonic() + timeout
        while not all(tier.is_idle for tier in self.tiers) and time.monotonic() < deadline:
            time.sleep(0.005)
        return not self._num_unwritten

    def close(self, timeout: float) -> None:
        if not self.flush(timeout):
            _log.warning("%d KV pages were not written to the tiers in time", self._num_unwritten)
        self._loads.put(None)
        if self.peers is not None:
            self.peers.close()
        for tier in self.tiers:
            tier.end()
        deadline = time.monotonic() + _CLOSE_SECONDS
        for tier in self.tiers:
            tier.join(deadline)
        self._loader.join(max(0.0, deadline - time.monotonic()))

    @property
    def stats(self) -> list[TierStats]:
        """Of each tier, nearest first: the records that the tiers themselves count in."""
        return [tier.stats for tier in self.tiers] + ([self.peers.stats] if self.peers is not None else [])

    @property
    def _num_unwritten(self) -> int:
        return sum(tier.num_queued for tier in self.tiers)

    # --- loading thread ---

    def _load_all(self) -> None:
        while (load := self._loads.get()) is not None:
            try:
                if not load.cancelled:
                    self._load(load)
            except Exception:
                _log.exception("KV pages could not be loaded")
                load.reason = "tier_failed"
            finally:
                load.done.set()

    def _load(self, load: Load) -> None:
        places = self._find(load.keys)
        chosen = load.choose(set(places))
        if not chosen:
            return
        num_tokens = load.num_tokens(chosen)
        sizes = Counter(places[key].name for key in chosen)
        if not self.costs.worth_loading(num_tokens, {name: n * self._page_bytes for name, n in sizes.items()}):
            load.reason = "slower"
            return
        limit = min(self.costs.recompute_seconds(num_tokens) or MAX_LOAD_SECONDS, MAX_LOAD_SECONDS)
        self._fetch(load, chosen, places, load.began + limit)
        for tier in self.tiers:
            tier.stats.read_bandwidth = self.costs.bandwidth(tier.name)
        if len(load.pages) < len(chosen):
            load.reason = "tier_failed"

    def _fetch(self, load: Load, chosen: list[bytes], places: dict[bytes, GuardedTier], deadline: float) -> None:
        """The chosen pages in order, up to the first that does not come: what is after it is of no use without it."""
        read: Counter[str] = Counter()
        spent: defaultdict[str, float] = defaultdict(float)
        begin = 0
        while begin < len(chosen) and not load.cancelled and (at := time.monotonic()) < deadline:
            tier = places[chosen[begin]]
            end = begin + 1
            while end < min(len(chosen), begin + _PAGES_AT_ONCE) and places[chosen[end]] is tier:
                end += 1
            pages = tier.get(chosen[begin:end])
            for key, page in zip(chosen[begin:end], pages, strict=False):
                load.pages[key], load.tiers[key] = page, tier.name
            read[tier.name] += sum(page.nbytes for page in pages)
            spent[tier.name] += time.monotonic() - at
            if len(pages) < end - begin:
                break
            begin = end
        for name, num_bytes in read.items():
            self.costs.record_load(name, num_bytes, spent[name])

    def _find(self, keys: list[bytes]) -> dict[bytes, GuardedTier]:
        """The nearest tier that has each page."""
        places: dict[bytes, GuardedTier] = {}
        for tier in self.tiers:
            missing = [key for key in keys if key not in places]
            places |= {key: tier for key, there in zip(missing, tier.has(missing), strict=True) if there}
        return places
