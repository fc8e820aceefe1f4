"""Plots as inline SVG: points with error bars, a scatter against the diagonal, bars. No script, no outside resource.

Knows axes and marks, not what they mean. Called by report.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 640, 340
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 20, 16, 48


@dataclass(frozen=True, slots=True)
class Point:
    x: float
    y: float
    label: str
    kind: str = "other"  # a CSS class: "chosen", "passed", "harmed", "baseline", "other"
    x_range: tuple[float, float] | None = None
    y_range: tuple[float, float] | None = None


class _Frame:
    """Maps values to pixels and draws the axes."""

    def __init__(self, xs: Sequence[float], ys: Sequence[float], x_name: str, y_name: str, percent: bool) -> None:
        self.low_x, self.high_x = _padded(xs)
        self.low_y, self.high_y = _padded(ys)
        self._names = (x_name, y_name)
        self._percent = percent

    def x(self, value: float) -> float:
        share = (value - self.low_x) / (self.high_x - self.low_x)
        return _LEFT + max(0.0, min(1.0, share)) * (WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        share = (value - self.low_y) / (self.high_y - self.low_y)
        return HEIGHT - _BOTTOM - max(0.0, min(1.0, share)) * (HEIGHT - _TOP - _BOTTOM)

    def axes(self) -> str:
        parts = []
        for number in range(6):
            value_x = self.low_x + number / 5 * (self.high_x - self.low_x)
            value_y = self.low_y + number / 5 * (self.high_y - self.low_y)
            x, y = self.x(value_x), self.y(value_y)
            parts.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
            parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{self._text(value_y)}</text>')
            parts.append(
                f'<text x="{x:.1f}" y="{HEIGHT - _BOTTOM + 16}" text-anchor="middle">{self._text(value_x)}</text>'
            )
        x_name, y_name = map(escape, self._names)
        middle = (_TOP + HEIGHT - _BOTTOM) / 2
        parts.append(f'<text class="name" x="{WIDTH / 2}" y="{HEIGHT - 8}" text-anchor="middle">{x_name}</text>')
        parts.append(
            f'<text class="name" x="14" y="{middle}" text-anchor="middle" '
            f'transform="rotate(-90 14 {middle})">{y_name}</text>'
        )
        return "".join(parts)

    def _text(self, value: float) -> str:
        return f"{value:.1%}" if self._percent else f"{value:.2g}"


def scatter(
    points: Sequence[Point],
    x_name: str,
    y_name: str,
    *,
    percent: bool = False,
    limit_y: float | None = None,
    diagonal: bool = False,
    path: Sequence[tuple[float, float]] = (),
) -> str:
    """Labelled points; `limit_y` a dashed line, `path` a stepped front, `diagonal` where x = y."""
    xs = [point.x for point in points] + [value for point in points for value in point.x_range or ()]
    ys = [point.y for point in points] + ([limit_y] if limit_y is not None else [])
    if diagonal:
        xs = ys = [*xs, *ys, 0.0]
    frame = _Frame(xs, ys, x_name, y_name, percent)
    parts = [frame.axes()]
    if limit_y is not None:
        y = frame.y(limit_y)
        parts.append(f'<line class="limit" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
    if diagonal:
        low, high = max(frame.low_x, frame.low_y), min(frame.high_x, frame.high_y)
        parts.append(
            f'<line class="limit" x1="{frame.x(low):.1f}" y1="{frame.y(low):.1f}" x2="{frame.x(high):.1f}" '
            f'y2="{frame.y(high):.1f}"/>'
        )
    if len(path) > 1:
        corners = " ".join(f"{frame.x(x):.1f},{frame.y(y):.1f}" for x, y in path)
        parts.append(f'<polyline class="front" points="{corners}"/>')
    parts += [_mark(frame, point) for point in points]
    return _svg("".join(parts), HEIGHT)


def bars(rows: Sequence[tuple[str, float, str]]) -> str:
    """Horizontal bars: (label, value, text)."""
    most = max((value for _, value, _ in rows), default=0.0) or 1.0
    step, left = 16, 250
    parts = []
    for number, (label, value, text) in enumerate(rows):
        y, width = 8 + number * step, value / most * (WIDTH - left - 90)
        parts.append(f'<text x="{left - 6}" y="{y + 10}" text-anchor="end">{escape(label)}</text>')
        parts.append(f'<rect class="bar" x="{left}" y="{y}" width="{max(1.0, width):.1f}" height="{step - 4}"/>')
        parts.append(f'<text x="{left + width + 6:.1f}" y="{y + 10}">{escape(text)}</text>')
    return _svg("".join(parts), 16 + step * len(rows))


def _mark(frame: _Frame, point: Point) -> str:
    x, y = frame.x(point.x), frame.y(point.y)
    parts = []
    if point.x_range:
        low, high = (frame.x(value) for value in point.x_range)
        parts.append(f'<line class="error" x1="{low:.1f}" x2="{high:.1f}" y1="{y:.1f}" y2="{y:.1f}"/>')
    if point.y_range:
        low, high = (frame.y(value) for value in point.y_range)
        parts.append(f'<line class="error" x1="{x:.1f}" x2="{x:.1f}" y1="{low:.1f}" y2="{high:.1f}"/>')
    label = escape(point.label)
    anchor, shift = ("end", -9) if x > WIDTH - 150 else ("start", 9)
    parts.append(f'<circle class="{point.kind}" cx="{x:.1f}" cy="{y:.1f}" r="5"><title>{label}</title></circle>')
    parts.append(f'<text class="label" x="{x + shift:.1f}" y="{y - 6:.1f}" text-anchor="{anchor}">{label}</text>')
    return "".join(parts)


def _padded(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values, default=0.0), max(values, default=1.0)
    spare = 0.08 * (high - low) or max(0.01, 0.1 * abs(high))
    return low - spare, high + spare


def _svg(content: str, height: float) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height}" role="img" xmlns="http://www.w3.org/2000/svg">{content}</svg>'
