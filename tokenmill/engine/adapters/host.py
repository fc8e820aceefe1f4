"""Adapters in host memory: the most recently used ones within a budget, the others are read from disk when wanted.

Files are read, and adapters prepared for the device, in threads and never by the engine's loop. What an adapter is, is
not known here: anything with `nbytes`. Called from the engine's thread; imports no torch.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, TimeoutError
from typing import Any, Protocol

from tokenmill.engine.stats import EngineStats

_THREADS = 2  # one adapter that takes long to read or prepare does not keep all others waiting


class Payload(Protocol):
    """The matrices of an adapter."""

    @property
    def nbytes(self) -> int: ...


class HostStore:
    def __init__(self, read: Callable[[bytes], Payload], max_bytes: int, max_count: int = 0) -> None:
        """`read` gets a digest and may take its time: it is called in a thread. `max_count` 0: no such limit."""
        self._read = read
        self._max_bytes = max_bytes
        self._max_count = max_count
        self._kept: OrderedDict[bytes, Payload] = OrderedDict()  # least recently used first
        self._coming: dict[bytes, Future[tuple[Payload, Any]]] = {}
        self._pool = ThreadPoolExecutor(_THREADS, "adapter-reader")
        self.prepare: Callable[[Any], Any] = lambda payload: payload  # for the device, in a thread
        self.stats = EngineStats()
        self.nbytes = 0

    def fetch(self, digest: bytes, wait: float = 0.0) -> Any | None:
        """The adapter prepared for the device. None: it is on its way; blocks for at most `wait` seconds. Raises what
        went wrong with reading it, once."""
        future = self._coming.get(digest)
        if future is None:
            kept = self._kept.get(digest)
            self.stats.num_adapter_reads += kept is None
            future = self._coming[digest] = self._pool.submit(self._bring, digest, kept)
        try:
            payload, prepared = future.result(wait)
        except TimeoutError:
            if not future.done():
                return None
            payload, prepared = future.result()
        finally:
            if future.done():
                self._coming.pop(digest, None)
        self.keep(digest, payload)
        return prepared

    def keep(self, digest: bytes, payload: Payload) -> None:
        """Keep it for as long as nothing else needs its place."""
        self._forget(digest)
        self._kept[digest] = payload
        self.nbytes += payload.nbytes
        while self._kept and (self.nbytes > self._max_bytes or 0 < self._max_count < len(self._kept)):
            self._forget(next(iter(self._kept)))
        self._measure()

    def drop(self, digest: bytes) -> None:
        """Forget it, also if it is only on its way."""
        self._coming.pop(digest, None)
        self._forget(digest)
        self._measure()

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._coming.clear()
        self._kept.clear()
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def _bring(self, digest: bytes, kept: Payload | None) -> tuple[Payload, Any]:
        payload = kept if kept is not None else self._read(digest)
        return payload, self.prepare(payload)

    def _forget(self, digest: bytes) -> None:
        payload = self._kept.pop(digest, None)
        if payload is not None:
            self.nbytes -= payload.nbytes

    def _measure(self) -> None:
        self.stats.num_adapters_in_host = len(self._kept)
        self.stats.adapter_host_bytes = self.nbytes
