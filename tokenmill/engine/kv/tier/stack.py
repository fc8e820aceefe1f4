"""The tiers of an engine, nearest first, behind two threads: one writes pages out, one brings them back.

The engine thread only copies pages and asks tables in memory. Pages that cannot be written as fast as they come are
dropped and counted; loads are asked for at admission and are cut off when computing would have been done by then. Knows
keys and bytes; which pages a request needs is restore.py's business.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from tokenmill.engine.kv.tier.base import PageAccess, PageTier
from tokenmill.engine.kv.tier.costs import LoadCosts
from tokenmill.engine.stats import TierStats
from tokenmill.log import get_logger

_log = get_logger(__name__)
_MAX_QUEUED_BYTES = 256 << 20
_MAX_LOAD_SECONDS = 10.0  # a stalled disk must not look like a stuck step
_DEFAULT_LOAD_SECONDS = 5.0  # where no step has been measured yet


@dataclass(eq=False)
class Load:
    """Pages on their way. The loading thread fills it in; the engine thread reads it once `done` is set."""

    keys: list[bytes]  # that would help, in order of use
    choose: Callable[[set[bytes]], list[bytes]]  # those found -> those to fetch, in order
    num_tokens: Callable[[list[bytes]], int]  # how many tokens these save
    pages: dict[bytes, memoryview] = field(default_factory=dict)
    tiers: dict[bytes, str] = field(default_factory=dict)  # where each came from
    reason: str = ""  # "", "slower" or "tier_failed"
    done: threading.Event = field(default_factory=threading.Event)
    cancelled: bool = False
    began: float = field(default_factory=time.monotonic)

    def wait(self, seconds: float) -> bool:
        """Whether the load has come to its end, or must be taken as it is because it hangs."""
        if self.done.wait(seconds):
            return True
        self.cancelled = time.monotonic() - self.began > _MAX_LOAD_SECONDS + 1.0
        return self.cancelled


class TierStack:
    def __init__(self, tiers: Sequence[PageTier], access: PageAccess, root_name: bytes, page_bytes: int) -> None:
        """`root_name`: what all keys of this engine's pages hang from (model, KV dtype, layout)."""
        assert tiers
        self.tiers = list(tiers)
        self.root_name = root_name
        self.costs = LoadCosts()
        self._access = access
        self._page_bytes = page_bytes
        self._writes: queue.SimpleQueue[tuple[bytes, memoryview] | None] = queue.SimpleQueue()
        self._loads: queue.SimpleQueue[Load | None] = queue.SimpleQueue()
        self._queued: set[bytes] = set()  # keys between `offer` and `put`
        self._threads = [
            threading.Thread(target=self._write_all, name="kv-writer", daemon=True),
            threading.Thread(target=self._load_all, name="kv-loader", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    # --- engine thread ---

    @staticmethod
    def key(name: bytes, group: int) -> bytes:
        return name + bytes([group])

    def holds(self, key: bytes) -> bool:
        """Whether every tier has the page, or is about to."""
        return key in self._queued or all(tier.holds(key) for tier in self.tiers)

    @property
    def has_space(self) -> bool:
        """Whether another page can wait to be written."""
        return len(self._queued) * self._page_bytes < _MAX_QUEUED_BYTES

    def offer(self, key: bytes, page: int) -> bool:
        """Copy a page and have it written, unless it is stored already. False: pages come faster than they can be
        written, and this one is not kept."""
        if self.holds(key):
            return True
        if not self.has_space:
            return False
        self._queued.add(key)
        self._writes.put((key, self._access.export_page(page)))
        return True

    def restore(self, page: int, data: memoryview) -> None:
        self._access.import_page(page, data)

    def local(self, keys: Iterable[bytes]) -> set[bytes]:
        """Those of the keys that a tier in this machine has."""
        wanted = list(keys)
        found: set[bytes] = set()
        for tier in self.tiers:
            if not tier.remote:
                found.update(key for key, there in zip(wanted, tier.has(wanted), strict=True) if there)
        return found

    @property
    def has_remote(self) -> bool:
        return any(tier.remote for tier in self.tiers)

    def start(self, load: Load) -> None:
        self._loads.put(load)

    def flush(self, timeout: float) -> bool:
        """Wait until all that was offered is written. False: not in time."""
        deadline = time.monotonic() + timeout
        while self._queued and time.monotonic() < deadline:
            time.sleep(0.005)
        return not self._queued

    def close(self, timeout: float) -> None:
        if not self.flush(timeout):
            _log.warning("%d KV pages were not written to the tiers in time", len(self._queued))
        self._writes.put(None)
        self._loads.put(None)
        for thread in self._threads:
            thread.join(0.5)
        for tier in self.tiers:
            tier.close()

    @property
    def stats(self) -> list[TierStats]:
        """Of each tier, nearest first: the records that the tiers themselves count in."""
        return [tier.stats for tier in self.tiers]

    # --- writing thread ---

    def _write_all(self) -> None:
        while (item := self._writes.get()) is not None:
            key, data = item
            try:
                for tier in self.tiers:
                    if not tier.holds(key):
                        tier.put(key, data)
            except Exception:
                _log.exception("a KV page could not be written")
            finally:
                self._queued.discard(key)

    # --- loading thread ---

    def _load_all(self) -> None:
        while (load := self._loads.get()) is not None:
            try:
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
        limit = min(self.costs.recompute_seconds(num_tokens) or _DEFAULT_LOAD_SECONDS, _MAX_LOAD_SECONDS)
        read: Counter[str] = Counter()
        spent: defaultdict[str, float] = defaultdict(float)
        for key in chosen:
            at = time.monotonic()
            if load.cancelled or at - load.began > limit:
                break
            tier = places[key]
            data = tier.get(key)
            if data is None:
                break  # what comes after it is of no use without it
            load.pages[key], load.tiers[key] = data, tier.name
            read[tier.name] += data.nbytes
            spent[tier.name] += time.monotonic() - at
        for name, num_bytes in read.items():
            self.costs.record_load(name, num_bytes, spent[name])
        for tier in self.tiers:
            tier.stats.read_bandwidth = self.costs.bandwidth(tier.name)
        if len(load.pages) < len(chosen):
            load.reason = "tier_failed"

    def _find(self, keys: list[bytes]) -> dict[bytes, PageTier]:
        """The nearest tier that has each page."""
        places: dict[bytes, PageTier] = {}
        for tier in self.tiers:
            missing = [key for key in keys if key not in places]
            places |= {key: tier for key, there in zip(missing, tier.has(missing), strict=True) if there}
        return places
