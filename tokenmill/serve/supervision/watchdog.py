"""Judges whether an engine hangs, by its heartbeats: what it is doing, for how long, and when it was last heard of.

Time in which the server itself did not run (a paused machine, a closed lid, SIGSTOP) is no sign of a hang: ages count
anew from the moment it runs again. A frozen engine beside a running server is a hang. Knows no processes; the engine
client asks at regular intervals.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from tokenmill.engine.activity import IDLE
from tokenmill.engine.messages import Heartbeat
from tokenmill.log import get_logger

_log = get_logger(__name__)
_FREEZE_SECONDS = 2.0  # between two looks, which are a fraction of a second apart


class Observed(Protocol):
    """What is known of an engine process."""

    heartbeat: Heartbeat
    last_sign: float  # when anything last came from it


class Watchdog:
    def __init__(self, stall_timeout: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._stall_timeout = stall_timeout
        self._freeze = min(_FREEZE_SECONDS, max(0.5, stall_timeout / 2))
        self._clock = clock
        self._resumed = self._last_look = clock()

    def look(self, engine: Observed, min_silence: float = 0.0) -> str | None:
        """The hang that is seen now, in words; None if there is none. `min_silence`: seconds without any message that
        are allowed in any case."""
        now = self._clock()
        if now - self._last_look > self._freeze:
            _log.warning("the server did not run for %.1f s; the engine gets its time anew", now - self._last_look)
            self._resumed = now
        self._last_look = now
        silence = self.silence(engine)
        if silence > max(self._stall_timeout, min_silence):
            return f"no sign of life for {silence:.1f} s"
        age = min(engine.heartbeat.age, now - self._resumed)
        if age > self.limit(engine):
            return f"{engine.heartbeat.activity} does not end, after {age:.1f} s"
        return None

    def start(self) -> None:
        """A new engine: nothing that was before counts."""
        self._resumed = self._last_look = self._clock()

    def silence(self, engine: Observed) -> float:
        return self._clock() - max(engine.last_sign, self._resumed)

    def limit(self, engine: Observed) -> float:
        """Seconds that the current activity may take."""
        return max(self._stall_timeout, engine.heartbeat.limit)

    def busy(self, engine: Observed, max_silence: float) -> str | None:
        """The work that the engine does now, within its time and by a recent heartbeat; None if it is idle or hangs."""
        heartbeat = engine.heartbeat
        if heartbeat.activity in ("", IDLE) or self.silence(engine) > max_silence or heartbeat.age > self.limit(engine):
            return None
        return f"{heartbeat.activity} for {heartbeat.age:.1f} s" if heartbeat.age > 1 else "serving"
