"""What a step costs, by the number of tokens in it: seconds, learned while running, forgotten as they age.

Only steps that decode are entered; a step with prompts in it says nothing about drafts. Knows no devices: on a GPU a
few tokens more are almost free, on a small CPU each costs a third of a step, and this table is how the engine knows.
Asked by length.py.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from statistics import median

_KEPT = 9  # measurements of a kind of step; the median of them stands for it
_SETTLED = 6
_KEPT_STEPS = 2048  # measurements after which a kind of step that did not occur again is unknown
_EXACT = 32  # token counts up to here have an entry each, larger ones share one with those within an eighth
_FIRST_GUESS = 0.3  # before anything is known: a token more costs this share of a token's part in the step


class StepCosts:
    def __init__(self) -> None:
        self._measured: dict[int, deque[float]] = {}
        self._medians: dict[int, float] = {}
        self._sizes: list[int] = []  # sorted keys
        self._ages: dict[int, int] = {}  # the number of the latest measurement of each
        self._count = 0

    def record(self, num_tokens: int, seconds: float) -> None:
        key = _key(num_tokens)
        if key not in self._measured:
            self._measured[key] = deque(maxlen=_KEPT)
            insort(self._sizes, key)
        self._measured[key].append(seconds)
        self._medians[key] = median(self._measured[key])
        self._ages[key] = self._count
        self._count += 1
        if self._count % _KEPT_STEPS == 0:
            self._forget()

    def is_known(self, num_tokens: int) -> bool:
        return _key(num_tokens) in self._medians

    def is_settled(self, num_tokens: int) -> bool:
        """Measured often enough that a slow beginning does not count."""
        return len(self._measured.get(_key(num_tokens), ())) >= _SETTLED

    def seconds(self, num_tokens: int) -> float:
        """Measured, or between its measured neighbours, or beyond them on a straight line; 1 if nothing is known."""
        key, sizes = _key(num_tokens), self._sizes
        if not sizes:
            return 1.0 + _FIRST_GUESS * (num_tokens - 1)
        place = bisect_left(sizes, key)
        if key in self._medians:
            # A step with more tokens cannot cost less: one that seems to was disturbed when it was measured.
            return min(self._medians[size] for size in sizes[place:])
        if place == 0:
            return self._medians[sizes[0]] * num_tokens / sizes[0]
        low = sizes[place - 1]
        if place < len(sizes):
            high = sizes[place]
            slope = (self._medians[high] - self._medians[low]) / (high - low)
        else:
            slope = self._last_slope()
        return self._medians[low] + max(0.0, slope) * (num_tokens - low)

    def _forget(self) -> None:
        """Drop what was not measured for long: another load, or a disturbance that keeps itself from being seen."""
        for key in [key for key, age in self._ages.items() if age < self._count - _KEPT_STEPS]:
            del self._measured[key], self._medians[key], self._ages[key]
            self._sizes.remove(key)

    def _last_slope(self) -> float:
        last = self._sizes[-1]
        guess = _FIRST_GUESS * self._medians[last] / last
        if len(self._sizes) == 1:
            return guess
        # Over the upper half: kernels work in tiles, and between two neighbouring sizes lies all of a tile or nothing.
        first = max((size for size in self._sizes[:-1] if 2 * size <= last), default=self._sizes[-2])
        return max((self._medians[last] - self._medians[first]) / (last - first), guess / 4)


def _key(num_tokens: int) -> int:
    if num_tokens <= _EXACT:
        return num_tokens
    unit = 1 << (num_tokens.bit_length() - 4)
    return num_tokens // unit * unit
