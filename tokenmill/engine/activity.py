"""What an engine's thread is doing, and since when: written by that thread, read by the one that sends heartbeats.

Each activity may take as long as the server's stall timeout, or longer where it names a limit of its own (loading,
warming up, capturing graphs). A watchdog then sees a hang wherever it is, and can name it. Imports no torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable

IDLE = "waiting for messages"


class Activity:
    def __init__(self, name: str = IDLE, limit: float = 0.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._current = (name, clock(), limit)

    def begin(self, name: str, limit: float = 0.0) -> None:
        """The thread does something else from now on. `limit`: seconds it may take; 0: the stall timeout."""
        self._current = (name, self._clock(), limit)  # replaced whole: other threads read it

    def read(self) -> tuple[str, float, float]:
        """Name, age in seconds and limit of the current activity."""
        name, began, limit = self._current
        return name, self._clock() - began, limit
