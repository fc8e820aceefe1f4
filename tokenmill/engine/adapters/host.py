"""Adapters in host memory: the most recently used ones within a budget, the others are read from disk when wanted.

Files are read in a thread, never by the engine's loop. What an adapter is, is not known here: anything with `nbytes`.
Called from the engine's thread; imports no torch.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, TimeoutError
from typing import Protocol

from tokenmill.engine.stats import EngineStats


class Payload(Protocol):
    """The matrices of an adapter."""

    @property
    def nbytes(self) -> int: ...


class HostStore:
    def __init__(
        self, read: Callable[[bytes], Payload], max_bytes: int, max_count: int = 0, stats: EngineStats | None = None
    ) -> None:
        """`read` gets a digest and may take its time: it is called in a thread. `max_count` 0: no such limit."""
        self._read = read
        self._max_bytes = max_bytes
        self._max_count = max_count
        self._kept: OrderedDict[bytes, Payload] = OrderedDict()  # least recently used first
        self._reading: dict[bytes, Future[Payload]] = {}
        self._pool = ThreadPoolExecutor(1, "adapter-reader")
        self.stats = stats or EngineStats()
        self.nbytes = 0

    def get(self, digest: bytes, wait: float = 0.0) -> Payload | None:
        """None: it is being read; blocks for at most `wait` seconds. Raises what went wrong with reading it, once."""
        payload = self._kept.get(digest)
        if payload is not None:
            self._kept.move_to_end(digest)
            return payload
        future = self._reading.get(digest)
        if future is None:
            future = self._reading[digest] = self._pool.submit(self._read, digest)
            self.stats.num_adapter_reads += 1
        try:
            payload = future.result(wait)
        except TimeoutError:
            if not future.done():
                return None
            payload = future.result()
        finally:
            if future.done():
                self._reading.pop(digest, None)
        self.keep(digest, payload)
        return payload

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
        self._reading.pop(digest, None)
        self._forget(digest)
        self._measure()

    def _forget(self, digest: bytes) -> None:
        payload = self._kept.pop(digest, None)
        if payload is not None:
            self.nbytes -= payload.nbytes

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._reading.clear()
        self._kept.clear()
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def _measure(self) -> None:
        self.stats.num_adapters_in_host = len(self._kept)
        self.stats.adapter_host_bytes = self.nbytes
