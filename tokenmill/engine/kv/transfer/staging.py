"""Pages that another engine may fetch: copies in host memory, held by leases that end by themselves.

A lease is opened when its prompt is queued, filled as pages are computed, and closed when the request has ended; from
then on its time runs, renewed by every sign of the engine that wants the pages. When it is done or its time is over,
the slots that no other lease holds are free. Slots lie in one file without a name that a process of the same user can
map: whoever reads a slot checks key and checksum, so a slot that was given away meanwhile is a page that did not come,
never a wrong one. The publisher writes, the page server reads, each on its own threads.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from tokenmill.engine.kv.transfer.wire import NOT_MAPPED, Mapping, checksum

_ALIGNMENT = 64
_MAX_LEASES = 4096
UNKNOWN, CLOSED, NO_ROOM = "unknown", "closed", "no_room"


@dataclass(slots=True)
class _Slot:
    index: int
    crc: int
    leases: set[str]


@dataclass(slots=True)
class _Lease:
    ttl: float
    expires: float
    open: bool = True  # more pages may come
    keys: list[bytes] = field(default_factory=list)
    lost: set[bytes] = field(default_factory=set)  # that there was no room for


class Staging:
    def __init__(self, limit_bytes: int, page_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.page_bytes = page_bytes
        self._stride = -(-page_bytes // _ALIGNMENT) * _ALIGNMENT
        self.num_slots = max(1, limit_bytes // self._stride)
        self.mapping = NOT_MAPPED
        self._memory = self._map(self.num_slots * self._stride)
        self._view = memoryview(self._memory)
        self._clock = clock
        self._free = list(range(self.num_slots - 1, -1, -1))
        self._slots: dict[bytes, _Slot] = {}
        self._leases: dict[str, _Lease] = {}
        self._past: OrderedDict[str, None] = OrderedDict()  # names of leases that have ended
        self._changed = threading.Condition()
        self.num_staged = 0  # pages, ever
        self.num_lost = 0  # that there was no room for
        self.num_expired = 0  # leases that nobody ended

    # --- the publisher ---

    def open(self, name: str, ttl: float) -> None:
        """A prompt is queued whose pages somebody wants."""
        with self._changed:
            self._expire()
            self._past.pop(name, None)
            if name not in self._leases and len(self._leases) < _MAX_LEASES:
                self._leases[name] = _Lease(ttl, self._clock() + ttl)
            self._changed.notify_all()

    def stage(self, name: str, key: bytes, page: memoryview) -> None:
        """Keep a page for a lease; nothing happens if that is gone, or full memory loses the page."""
        assert page.nbytes == self.page_bytes
        with self._changed:
            lease = self._leases.get(name)
            if lease is None:
                return
            slot = self._slots.get(key) or self._claim(key)
            if slot is None:
                lease.lost.add(key)
                self.num_lost += 1
            elif slot.crc < 0:  # claimed just now: nobody is told of it before it is written
                at = slot.index * self._stride
                self._view[at : at + self.page_bytes] = page
                slot.crc = checksum(key, page)
                self.num_staged += 1
            if slot is not None and name not in slot.leases:
                slot.leases.add(name)
                lease.keys.append(key)
            self._changed.notify_all()

    def close(self, name: str) -> None:
        """The request of a lease has ended: no more pages come. Those that are there stay for the lease's time."""
        with self._changed:
            lease = self._leases.get(name)
            if lease is not None:
                lease.open = False
                lease.expires = self._clock() + lease.ttl
            self._changed.notify_all()

    # --- the page server ---

    def find(self, name: str, key: bytes, wait: float) -> tuple[int, int] | str | None:
        """(slot, checksum) of a page of a lease, which is renewed. A word: it will not come. None: not yet, after
        `wait` seconds."""
        deadline = time.monotonic() + wait
        with self._changed:
            while True:
                lease = self._leases.get(name)
                slot = self._slots.get(key)
                if lease is not None:
                    lease.expires = self._clock() + lease.ttl
                    if slot is not None and name in slot.leases:
                        return slot.index, slot.crc
                    if key in lease.lost:
                        return NO_ROOM
                    if not lease.open:
                        return CLOSED
                elif name in self._past:
                    return CLOSED
                left = deadline - time.monotonic()
                if left <= 0:
                    return None if lease is not None else UNKNOWN
                self._changed.wait(left)

    def page(self, slot: int) -> memoryview:
        """The bytes of a slot, which may be given away at any moment."""
        at = self.offset(slot)
        return self._view[at : at + self.page_bytes]

    def offset(self, slot: int) -> int:
        return slot * self._stride

    def renew(self, name: str) -> None:
        with self._changed:
            lease = self._leases.get(name)
            if lease is not None:
                lease.expires = self._clock() + lease.ttl

    def done(self, name: str) -> None:
        """Nobody wants the pages of a lease any more. One that is not known may have ended by itself."""
        with self._changed:
            self._end(name)
            self._changed.notify_all()

    def expire(self) -> None:
        """End the leases whose time is over."""
        with self._changed:
            self._expire()

    # --- state ---

    @property
    def num_leases(self) -> int:
        return len(self._leases)

    @property
    def num_used(self) -> int:
        return len(self._slots)

    def check(self) -> None:
        """Raise AssertionError if a slot is lost, has two uses or is held by a lease that is gone."""
        with self._changed:
            used = [slot.index for slot in self._slots.values()]
            assert sorted(used + self._free) == list(range(self.num_slots)), "a slot is lost or used twice"
            held = {(name, key) for name, lease in self._leases.items() for key in lease.keys}
            assert held == {(name, key) for key, slot in self._slots.items() for name in slot.leases}, "holders differ"
            assert all(slot.leases for slot in self._slots.values()), "a slot that nobody holds is not free"

    # --- how ---

    def _claim(self, key: bytes) -> _Slot | None:
        if not self._free:
            self._expire()
        if not self._free:
            return None
        slot = self._slots[key] = _Slot(self._free.pop(), -1, set())
        return slot

    def _expire(self) -> None:
        now = self._clock()
        for name in [name for name, lease in self._leases.items() if not lease.open and lease.expires <= now]:
            self._end(name)
            self.num_expired += 1

    def _end(self, name: str) -> None:
        lease = self._leases.pop(name, None)
        self._past[name] = None
        while len(self._past) > _MAX_LEASES:
            self._past.popitem(last=False)
        for key in lease.keys if lease is not None else ():
            slot = self._slots[key]
            slot.leases.discard(name)
            if not slot.leases:
                del self._slots[key]
                self._free.append(slot.index)

    def _map(self, size: int) -> mmap.mmap:
        """Memory that is taken as it is written, and that other processes of this user can map where the system has
        files without names."""
        if not hasattr(os, "memfd_create"):
            return mmap.mmap(-1, size)
        descriptor = os.memfd_create("tokenmill-kv", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, size)
        self.mapping = Mapping(os.getpid(), descriptor, os.fstat(descriptor).st_ino)
        return mmap.mmap(descriptor, size)
