"""The time of a run: how much is used, and how long each kind of work took so far, which forecasts the next one.

The clock is given, so that tests need not wait. Knows nothing of candidates. Used by the loop.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median

Clock = Callable[[], float]


class TimeBudget:
    def __init__(self, seconds: float, clock: Clock = time.monotonic) -> None:
        self.seconds = seconds
        self._clock = clock
        self._began = clock()
        self._durations: dict[str, list[float]] = {}

    @property
    def used(self) -> float:
        """Fraction of the budget that has passed."""
        return (self._clock() - self._began) / self.seconds

    def left_until(self, share: float) -> float:
        """Seconds until this share of the budget is used; 0 if it is."""
        return max(0.0, self.seconds * (share - self.used))

    @contextmanager
    def timed(self, kind: str) -> Iterator[None]:
        begin = self._clock()
        try:
            yield
        finally:
            self._durations.setdefault(kind, []).append(self._clock() - begin)

    def expected(self, kind: str, unknown: float = 0.0) -> float:
        """Seconds that work of this kind took so far, the median; `unknown` before the first."""
        found = self._durations.get(kind)
        return median(found) if found else unknown
