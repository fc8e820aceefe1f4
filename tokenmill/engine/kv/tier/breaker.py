"""A circuit breaker: after a failure nobody calls for a while, then one call is tried, and its outcome decides.

    closed --failed--> open --pause over, allow()--> half-open --succeeded--> closed
                        ^                               |
                        +------failed, pause doubled----+

Each tier has one for reads and one for writes (guard.py): a full disk can still be read. Knows nothing of tiers; every
`allow` that returned True is followed by one `succeeded` or `failed`. Any thread may call.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

CLOSED, OPEN, HALF_OPEN = "closed", "open", "half-open"


class Breaker:
    def __init__(
        self, clock: Callable[[], float] = time.monotonic, first_pause: float = 1.0, max_pause: float = 60.0
    ) -> None:
        """Pauses in seconds; each failure in a row doubles the pause."""
        self._clock = clock
        self._first_pause = first_pause
        self._max_pause = max_pause
        self._lock = threading.Lock()
        self._state = CLOSED
        self._retry_at = 0.0
        self.pause = first_pause  # after the next failure

    @property
    def state(self) -> str:
        return self._state

    @property
    def ready(self) -> bool:
        """Whether `allow` would return True."""
        state = self._state
        return state == CLOSED or (state == OPEN and self._clock() >= self._retry_at)

    def allow(self) -> bool:
        """Whether a call may be made now. In a pause: no. After it: yes for one caller, until its outcome is known."""
        with self._lock:
            if self._state == OPEN and self._clock() >= self._retry_at:
                self._state = HALF_OPEN
                return True
            return self._state == CLOSED

    def succeeded(self) -> bool:
        """True: this is news, the calls before it failed."""
        with self._lock:
            news = self._state != CLOSED
            self._state = CLOSED
            self.pause = self._first_pause
            return news

    def failed(self) -> bool:
        """True: this is news, the calls before it succeeded."""
        with self._lock:
            news = self._state == CLOSED
            self._state = OPEN
            self._retry_at = self._clock() + self.pause
            self.pause = min(2 * self.pause, self._max_pause)
            return news
