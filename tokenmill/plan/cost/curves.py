"""Piecewise curves of milliseconds: sampled once with numpy, then read with plain floats in well under a microsecond.

Owns interpolation (straight lines between samples, straight on beyond the last). Knows nothing of what is measured.
Called by the time models and step_cost.py.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence


class Curve:
    """y over x for ascending x; linear between points and beyond the last, constant before the first."""

    __slots__ = ("_last", "_slopes", "_xs", "_ys")

    def __init__(self, xs: Sequence[float], ys: Sequence[float]) -> None:
        self._xs = [float(x) for x in xs]
        self._ys = [float(y) for y in ys]
        steps = zip(self._xs, self._xs[1:], self._ys, self._ys[1:], strict=False)
        self._slopes = [(y1 - y0) / (x1 - x0) for x0, x1, y0, y1 in steps] or [0.0]
        self._last = len(self._xs) - 1

    def __call__(self, x: float) -> float:
        xs = self._xs
        if x <= xs[0]:
            return self._ys[0]
        i = bisect_right(xs, x, 1, self._last) - 1
        return self._ys[i] + self._slopes[i] * (x - xs[i])


class Surface:
    """z over (x, y): a curve over y for each x, linear between curves and beyond the last."""

    __slots__ = ("_curves", "_last", "_xs")

    def __init__(self, xs: Sequence[float], curves: Sequence[Curve]) -> None:
        self._xs = [float(x) for x in xs]
        self._curves = list(curves)
        self._last = len(self._xs) - 1

    def __call__(self, x: float, y: float) -> float:
        xs = self._xs
        if x <= xs[0]:
            return self._curves[0](y)
        i = bisect_right(xs, x, 1, self._last) - 1
        low, high = self._curves[i](y), self._curves[i + 1](y)
        return low + (high - low) * (x - xs[i]) / (xs[i + 1] - xs[i])


def sampled(function: Callable[[float], float], points: Sequence[float]) -> Curve:
    return Curve(points, [function(point) for point in points])
