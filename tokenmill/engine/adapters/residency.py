"""Which adapters lie in the slots of the device: the least recently used one makes room, never one that computes.

The scheduler asks `ready` before it starts a request. An adapter that is not there gets a slot at once and is brought
beside the loop, while others are started past its requests. Where every slot computes, the one with the fewest running
requests takes no new ones until it is free, one slot at a time: so nobody waits forever, and the others go on. Slot 0
is the base. Imports no torch; the runner moves the numbers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tokenmill.engine.adapters.host import HostStore
from tokenmill.engine.order.queue import Key, RequestQueue
from tokenmill.engine.stats import EngineStats
from tokenmill.errors import UserError
from tokenmill.log import get_logger
from tokenmill.types import Request

_log = get_logger(__name__)
_MAX_NAMES = 64  # of adapters in the statistics


@dataclass(slots=True, eq=False)
class _Held:
    slot: int
    is_here: bool = False  # False: on its way
    num_running: int = 0


class AdapterSlots:
    def __init__(
        self,
        num_slots: int = 0,
        store: HostStore | None = None,
        place: Callable[[int, Any], None] | None = None,
        clear: Callable[[int], None] | None = None,
        stats: EngineStats | None = None,
    ) -> None:
        """`place` writes an adapter into a slot of the device, `clear` empties one."""
        assert not num_slots or (store is not None and place is not None and clear is not None)
        self._store = store
        self._place = place
        self._clear = clear
        self._free = list(range(num_slots, 0, -1))
        self._held: dict[bytes, _Held] = {}  # by digest, least recently used first
        self._coming: set[bytes] = set()  # of those, what is not here yet
        self._leaving: bytes | None = None  # takes no new requests, so that its slot gets free
        self._is_wanted = False  # somebody waited for that slot in this step
        self.num_slots = num_slots
        self.stats = stats or EngineStats()
        self.failures: dict[bytes, UserError] = {}  # adapters that could not be brought: their requests are refused

    # --- the verbs of the scheduler ---

    def begin_step(self) -> None:
        """What came meanwhile is put into its slot; nothing leaves for somebody who is gone."""
        if not self._is_wanted:
            self._leaving = None
        self._is_wanted = False
        for digest in tuple(self._coming):
            self._bring(digest, self._held[digest], 0.0)

    def ready(self, request: Request, wait: float = 0.0) -> bool:
        """Whether the request's adapter is on the device and takes requests. False: ask again in the next step; blocks
        for at most `wait` seconds."""
        if request.adapter is None:
            return True
        digest = request.adapter.digest
        if digest in self.failures:
            return False
        held = self._held.get(digest) or self._claim(digest)
        if held is None:
            return False
        if not held.is_here:
            self._bring(digest, held, wait)
        if digest == self._leaving and not held.num_running:  # those who want its slot come later, or are gone
            self._leaving = None
        return held.is_here and digest != self._leaving

    def would_wait(self, digest: bytes) -> bool:
        """What `ready` would answer for an adapter without waiting, where nothing came meanwhile: True if it is not
        here and no slot can be had for it, or it takes no requests. Changes nothing."""
        held = self._held.get(digest)
        if digest in self.failures:
            return True
        if held is not None:
            return not held.is_here or (digest == self._leaving and held.num_running > 0)
        return not self._free and not any(each.is_here and not each.num_running for each in self._held.values())

    def started(self, request: Request) -> None:
        if request.adapter is not None:
            held = self._held.pop(request.adapter.digest)
            assert held.is_here, "a request was started before its adapter was there"
            self._held[request.adapter.digest] = held  # now the most recently used
            held.num_running += 1

    def stopped(self, request: Request) -> None:
        if request.adapter is not None:
            self._held[request.adapter.digest].num_running -= 1

    def slot(self, request: Request) -> int:
        """Of a running request."""
        return 0 if request.adapter is None else self._held[request.adapter.digest].slot

    @property
    def is_loading(self) -> bool:
        return bool(self.failures or self._coming)

    # --- the registry ---

    def drop(self, digest: bytes) -> None:
        """Empty its slot, if it has one. Nothing runs with it."""
        held = self._held.get(digest)
        if held is not None:
            assert not held.num_running, "an adapter is dropped while it computes"
            self._vacate(digest)
        self.failures.pop(digest, None)

    def measure(self, running: AdapterQueue, waiting: AdapterQueue) -> None:
        """Gauges of this moment."""
        if self.num_slots:
            self.stats.num_adapters_on_device = len(self._held) - len(self._coming)
            self.stats.running_adapters = sorted(running.names)[:_MAX_NAMES]
            self.stats.waiting_adapters = sorted(waiting.names)[:_MAX_NAMES]

    def check(self) -> None:
        """Raise AssertionError if a slot is lost or has two owners."""
        used = [held.slot for held in self._held.values()]
        assert self._coming == {digest for digest, held in self._held.items() if not held.is_here}
        assert sorted(used + self._free) == list(range(1, self.num_slots + 1)), "a slot is lost or used twice"
        assert all(held.num_running >= 0 and (held.is_here or not held.num_running) for held in self._held.values())

    # --- how ---

    def _claim(self, digest: bytes) -> _Held | None:
        """A slot for an adapter that has none; None if all of them compute."""
        if not self._free:
            unused = next((each for each, held in self._held.items() if held.is_here and not held.num_running), None)
            if unused is None:
                self._have_one_leave()
                return None
            self._vacate(unused)
            self.stats.num_adapter_evictions += 1
        held = self._held[digest] = _Held(self._free.pop())
        self._coming.add(digest)
        return held

    def _have_one_leave(self) -> None:
        self._is_wanted = True
        here = {digest: held for digest, held in self._held.items() if held.is_here}
        if self._leaving not in here:
            self._leaving = min(here, key=lambda digest: here[digest].num_running, default=None)

    def _bring(self, digest: bytes, held: _Held, wait: float) -> None:
        assert self._store is not None
        assert self._place is not None
        try:
            adapter = self._store.fetch(digest, wait)
            if adapter is None:
                return
            self._place(held.slot, adapter)
        except Exception as error:  # whatever it is: only the requests of this adapter suffer
            self._vacate(digest)
            if not isinstance(error, UserError):
                _log.exception("an adapter could not be brought to the device")
                error = UserError(f"the adapter could not be loaded: {error}", "the server's log has more")
            self.failures[digest] = error
            return
        held.is_here = True
        self._coming.discard(digest)
        self.stats.num_adapter_loads += 1

    def _vacate(self, digest: bytes) -> None:
        assert self._clear is not None
        held = self._held.pop(digest)
        self._coming.discard(digest)
        if held.is_here:
            self._clear(held.slot)
        self._free.append(held.slot)
        if self._leaving == digest:
            self._leaving = None


class AdapterQueue(RequestQueue):
    """Counts the adapters of its requests."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def add(self, request: Request, key: Key) -> None:
        super().add(request, key)
        if request.adapter is not None:
            self.names[request.adapter.name] += 1

    def remove(self, request: Request) -> Key:
        if request.adapter is not None:
            name = request.adapter.name
            self.names[name] -= 1
            if not self.names[name]:
                del self.names[name]
        return super().remove(request)


class RunningQueue(AdapterQueue):
    """The requests that compute: an adapter stays in its slot as long as one of them needs it."""

    def __init__(self, adapters: AdapterSlots) -> None:
        super().__init__()
        self._adapters = adapters

    def add(self, request: Request, key: Key) -> None:
        self._adapters.started(request)
        super().add(request, key)

    def remove(self, request: Request) -> Key:
        self._adapters.stopped(request)
        return super().remove(request)
