"""Measured seconds per step, by the number of tokens in it; old measurements expire.

Only decode steps are recorded; a step with prompts says nothing about drafts. Knows no devices: on a GPU a few more
tokens are almost free, on a small CPU each costs a third of a step, and this table is how the engine finds out. Read by
length.py.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from statistics import median

_MAX_SAMPLES = 9  # latest measurements kept per token count; their median is used
_SETTLED_SAMPLES = 6  # measurements after which a token count is settled
_EXPIRY = 2048  # measurements after which a token count that did not occur again is forgotten
_EXACT = 32  # token counts up to this have an entry each, larger ones share one with those within an eighth
# Without measurements: the cost of one more token, relative to the step's cost per token. Where steps are captured,
# which is on a GPU, it is taken for small: a guess that is too low is measured, one that is too high is not.
DEFAULT_SLOPE = 0.3
CAPTURED_SLOPE = 0.02


class StepCosts:
    def __init__(self, slope: float = DEFAULT_SLOPE) -> None:
        self._slope = slope
        self._measured: dict[int, deque[float]] = {}
        self._medians: dict[int, float] = {}
        self._sizes: list[int] = []  # sorted keys
        self._ages: dict[int, int] = {}  # the number of the latest measurement of each
        self._count = 0

    def record(self, num_tokens: int, seconds: float) -> None:
        key = _key(num_tokens)
        if key not in self._measured:
            self._measured[key] = deque(maxlen=_MAX_SAMPLES)
            insort(self._sizes, key)
        self._measured[key].append(seconds)
        self._medians[key] = median(self._measured[key])
        self._ages[key] = self._count
        self._count += 1
        if self._count % _EXPIRY == 0:
            self._forget()

    def is_known(self, num_tokens: int) -> bool:
        return _key(num_tokens) in self._medians

    def is_settled(self, num_tokens: int) -> bool:
        """Measured often enough that slow first steps do not matter."""
        return len(self._measured.get(_key(num_tokens), ())) >= _SETTLED_SAMPLES

    def seconds(self, num_tokens: int) -> float:
        """The median, or a linear interpolation or extrapolation of measured token counts; relative if none is
        measured."""
        key, sizes = _key(num_tokens), self._sizes
        if not sizes:
            return 1.0 + self._slope * (num_tokens - 1)
        index = bisect_left(sizes, key)
        if key in self._medians:
            # A step with more tokens cannot cost less: if it seems to, this measurement was disturbed.
            return min(self._medians[size] for size in sizes[index:])
        if index == 0:
            return self._medians[sizes[0]] * num_tokens / sizes[0]
        low = sizes[index - 1]
        if index < len(sizes):
            high = sizes[index]
            slope = (self._medians[high] - self._medians[low]) / (high - low)
        else:
            slope = self._last_slope()
        return self._medians[low] + max(0.0, slope) * (num_tokens - low)

    def _forget(self) -> None:
        """Drop old measurements: the load has changed, or a disturbed one keeps its token count from being tried
        again."""
        for key in [key for key, age in self._ages.items() if age < self._count - _EXPIRY]:
            del self._measured[key], self._medians[key], self._ages[key]
            self._sizes.remove(key)

    def _last_slope(self) -> float:
        last = self._sizes[-1]
        guess = self._slope * self._medians[last] / last
        if len(self._sizes) == 1:
            return guess
        # Over the upper half: kernels work in tiles, so between adjacent sizes there is a full tile or nothing.
        first = max((size for size in self._sizes[:-1] if 2 * size <= last), default=self._sizes[-2])
        return max((self._medians[last] - self._medians[first]) / (last - first), guess / 4)


def _key(num_tokens: int) -> int:
    if num_tokens <= _EXACT:
        return num_tokens
    unit = 1 << (num_tokens.bit_length() - 4)
    return num_tokens // unit * unit
