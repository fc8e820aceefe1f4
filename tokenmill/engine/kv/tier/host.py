"""Host memory as a tier: for GPU runs, where it is larger than what the KV cache has on the device. Least recently used
pages make room; the other tiers got them when they were written, so nothing is handed down."""

from __future__ import annotations

import threading
from collections import OrderedDict

from tokenmill.engine.kv.tier.base import PageTier


class HostTier(PageTier):
    name = "host"

    def __init__(self, limit_bytes: int) -> None:
        super().__init__()
        self._limit = limit_bytes
        self._pages: OrderedDict[bytes, memoryview] = OrderedDict()
        self._lock = threading.Lock()

    def holds(self, key: bytes) -> bool:
        return key in self._pages

    def has(self, keys: list[bytes]) -> list[bool]:
        return [key in self._pages for key in keys]

    def get(self, key: bytes) -> memoryview | None:
        with self._lock:
            data = self._pages.get(key)
            if data is None:
                self.stats.misses += 1
                return None
            self._pages.move_to_end(key)
        self.stats.hits += 1
        self.stats.read_bytes += data.nbytes
        return data

    def put(self, key: bytes, data: memoryview) -> None:
        if data.nbytes > self._limit:
            return
        with self._lock:
            if key in self._pages:
                return
            while self.stats.bytes + data.nbytes > self._limit:
                self.stats.bytes -= self._pages.popitem(last=False)[1].nbytes
            self._pages[key] = data
            self.stats.bytes += data.nbytes
            self.stats.entries = len(self._pages)
        self.stats.written_bytes += data.nbytes
