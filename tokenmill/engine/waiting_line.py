"""The waiting requests as an admission sees them: those that cannot start yet are set aside and keep their place.

A request waits for its pages to come from a tier or a peer, or for its adapter to be on the device. All that wait for
the same are set aside at once, so that however many they are, whoever comes after them is reached. Loads begin for the
first requests of the line whether or not they can start: transfers then run side by side, not one after the other.
Owned by the scheduler.
"""

from __future__ import annotations

from collections.abc import Iterable

from tokenmill.engine.adapters.residency import AdapterQueue, AdapterSlots
from tokenmill.engine.kv.manager import KVManager
from tokenmill.engine.order.queue import Key
from tokenmill.types import Request

_WINDOW = 32  # requests at the head of the line whose pages are fetched ahead of their turn


class WaitingLine(AdapterQueue):
    def __init__(self, kv: KVManager, adapters: AdapterSlots) -> None:
        super().__init__()
        self._kv = kv
        self._adapters = adapters
        self._aside: list[tuple[Key, Request]] = []
        self._passed_loads = False  # in this admission: all whose pages were on their way are set aside

    # --- one admission ---

    @property
    def is_whole(self) -> bool:
        """Whether nobody is set aside."""
        return not self._aside

    @property
    def has_candidates(self) -> bool:
        return bool(self._entries)

    def can_start(self, request: Request, wait: float) -> bool:
        """Whether its adapter is on the device and no page that it could use is still on its way; waits for at most
        `wait` seconds. If not, it is set aside with all that wait for the same."""
        if not self._adapters.ready(request, wait):
            self.set_aside([request, *self._without_adapter()])
        elif self._kv.prefetch(request, wait):
            return True
        elif self._passed_loads:
            self.set_aside([request])
        else:
            self._passed_loads = True
            self.set_aside([request, *self._kv.sources.unfinished()])
        return False

    def set_aside(self, requests: Iterable[Request]) -> None:
        """They are no candidates until `bring_back`. Those that do not wait here stay where they are."""
        chosen = set(requests)
        here: list[tuple[Key, Request]] = []
        for entry in self._entries:
            (self._aside if entry[1] in chosen else here).append(entry)
        self._entries = here

    def bring_back(self) -> None:
        """The admission is over: everybody is in place."""
        self._passed_loads = False
        if self._aside:
            self._entries = sorted([*self._entries, *self._aside])
            self._aside = []

    def look_ahead(self) -> None:
        """Have the pages of the first in line fetched, as far as that has not begun."""
        if self._kv.sources.brings_pages:
            for _, request in self._entries[:_WINDOW]:
                self._kv.sources.start_early(request)

    def _without_adapter(self) -> list[Request]:
        """Those whose adapter is not on the device and cannot come now, or takes no requests."""
        waits: dict[bytes, bool] = {}
        found = []
        for _, request in self._entries:
            if request.adapter is None:
                continue
            digest = request.adapter.digest
            if digest not in waits:
                waits[digest] = self._adapters.would_wait(digest)
            if waits[digest]:
                found.append(request)
        return found
