"""Small SVG charts as text: axes, curves with intervals, scatter, bars. No library, no script; colours are CSS classes.

Knows nothing of plans: callers bring numbers and labels, report.css brings light and dark. Every chart has an
`aria-label`, points have a tooltip (`<title>`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

WIDTH, HEIGHT = 520, 300
_LOG_STEPS: tuple[tuple[float, ...], ...] = ((1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8), (1, 1.5, 2, 3, 5, 7), (1, 2, 5))
_LABEL_HEIGHT = 15
_MAX_JOINED = 12  # a front of more points has too many steps in its third axis to be a line
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 14, 12, 44


@dataclass(frozen=True, slots=True)
class Axis:
    label: str
    low: float
    high: float
    logarithmic: bool = False

    def share(self, value: float) -> float:
        """Position within the range, 0 to 1, clipped."""
        low, high = self.low, self.high
        if self.logarithmic:
            value, low, high = math.log10(max(value, 1e-12)), math.log10(low), math.log10(high)
        return min(1.0, max(0.0, (value - low) / ((high - low) or 1.0)))

    def ticks(self) -> list[float]:
        if self.logarithmic:
            decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            span = self.high / self.low
            steps = _LOG_STEPS[0] if span < 4 else _LOG_STEPS[1] if span < 12 else _LOG_STEPS[2] if span < 300 else (1,)
            return [f * 10.0**d for d in decades for f in steps if self.low <= f * 10.0**d <= self.high * 1.0001]
        step = nice_step((self.high - self.low) / 5)
        first = math.ceil(self.low / step - 1e-9)
        return [step * n for n in range(first, math.floor(self.high / step + 1e-9) + 1)]


@dataclass(frozen=True, slots=True)
class Curve:
    """`color`: number of a palette class. With `low` and `high` an interval is drawn behind the line."""

    label: str
    xs: Sequence[float]
    ys: Sequence[float]
    color: int = 0
    low: Sequence[float] = ()
    high: Sequence[float] = ()


@dataclass(frozen=True, slots=True)
class Point:
    x: float
    y: float
    color: str  # a CSS colour
    title: str
    mark: str = ""  # a short text beside it
    dim: bool = False
    ring: bool = False


@dataclass(frozen=True, slots=True)
class Bar:
    label: str
    value: float
    color: int


@dataclass(slots=True)
class Canvas:
    x: Axis
    y: Axis
    width: int = WIDTH
    height: int = HEIGHT
    parts: list[str] = field(default_factory=list)
    label_rows: tuple[list[float], list[float]] = field(default_factory=lambda: ([], []))  # taken: right end, left end

    def place(self, x: float, y: float) -> tuple[float, float]:
        across = _LEFT + self.x.share(x) * (self.width - _LEFT - _RIGHT)
        down = self.height - _BOTTOM - self.y.share(y) * (self.height - _TOP - _BOTTOM)
        return round(across, 1), round(down, 1)

    def frame(self) -> None:
        right, bottom = self.width - _RIGHT, self.height - _BOTTOM
        for tick in self.y.ticks():
            _, down = self.place(self.x.low, tick)
            self.parts.append(f'<line class="grid-line" x1="{_LEFT}" x2="{right}" y1="{down}" y2="{down}"/>')
            self.parts.append(f'<text x="{_LEFT - 8}" y="{down + 4}" text-anchor="end">{short(tick)}</text>')
        for tick in self.x.ticks():
            across, _ = self.place(tick, self.y.low)
            self.parts.append(f'<text x="{across}" y="{bottom + 18}" text-anchor="middle">{short(tick)}</text>')
        self.parts.append(f'<line class="axis" x1="{_LEFT}" x2="{right}" y1="{bottom}" y2="{bottom}"/>')
        middle, centre = (_LEFT + right) / 2, (_TOP + bottom) / 2
        self.parts.append(
            f'<text x="{middle}" y="{self.height - 6}" text-anchor="middle">{escape(self.x.label)}</text>'
        )
        self.parts.append(
            f'<text transform="translate(14 {centre}) rotate(-90)" text-anchor="middle">{escape(self.y.label)}</text>'
        )

    def curve(self, curve: Curve) -> None:
        places = [self.place(x, y) for x, y in zip(curve.xs, curve.ys, strict=True)]
        if curve.low and curve.high:
            upper = [self.place(x, y) for x, y in zip(curve.xs, curve.high, strict=True)]
            lower = [self.place(x, y) for x, y in zip(curve.xs, curve.low, strict=True)]
            outline = " ".join(f"{x},{y}" for x, y in [*upper, *reversed(lower)])
            self.parts.append(f'<polygon class="band" fill="var(--c{curve.color})" points="{outline}"/>')
        path = " ".join(f"{x},{y}" for x, y in places)
        self.parts.append(f'<polyline class="curve" stroke="var(--c{curve.color})" points="{path}"/>')

    def limit(self, value: float, label: str, color: str = "var(--muted)") -> None:
        """A horizontal line with its name at the right end, or the left where the right is taken."""
        right = self.width - _RIGHT
        _, down = self.place(self.x.low, value)
        line = f'<line class="limit" style="stroke:{color}" x1="{_LEFT}" x2="{right}" y1="{down}" y2="{down}"/>'
        self.parts.append(line)
        for taken, across, anchor in zip(self.label_rows, (right - 4, _LEFT + 6), ("end", "start"), strict=True):
            for at in (down - 5, down + 13):
                if all(abs(at - other) >= _LABEL_HEIGHT for other in taken):
                    taken.append(at)
                    text = f'<text class="strong" x="{across}" y="{at}" text-anchor="{anchor}">{escape(label)}</text>'
                    self.parts.append(text)
                    return

    def svg(self, name: str, label: str) -> str:
        return (
            f'<svg class="chart" data-chart="{name}" role="img" aria-label="{escape(label)}" '
            f'viewBox="0 0 {self.width} {self.height}">{"".join(self.parts)}</svg>'
        )


def curves(
    name: str,
    label: str,
    lines: Sequence[Curve],
    x_label: str,
    y_label: str,
    *,
    logarithmic: tuple[bool, bool] = (False, False),
    limits: Sequence[tuple[float, str]] = (),
    top: float = 0.0,
    width: int = WIDTH,
) -> str:
    """Lines over one pair of axes, with intervals and horizontal limits. `top`: at least this high."""
    xs = [x for line in lines for x in line.xs]
    values = [y for line in lines for y in (*line.ys, *line.high)] + [value for value, _ in limits] + [top]
    lows = [y for line in lines for y in (*line.ys, *line.low)] + [value for value, _ in limits]
    x_axis = Axis(x_label, min(xs), max(xs) if max(xs) > min(xs) else min(xs) + 1, logarithmic[0])
    low = min(max(1e-9, value) for value in lows) * 0.8 if logarithmic[1] else 0.0
    canvas = Canvas(x_axis, Axis(y_label, low, max(values) * 1.1 or 1.0, logarithmic[1]), width)
    canvas.frame()
    for line in lines:
        canvas.curve(line)
    for value, text in limits:
        canvas.limit(value, text)
    legend = "".join(
        f'<span><i style="background:var(--c{line.color})"></i>{escape(line.label)}</span>' for line in lines
    )
    return canvas.svg(name, label) + (f'<div class="legend">{legend}</div>' if len(lines) > 1 else "")


def scatter(name: str, label: str, points: Sequence[Point], x_label: str, y_label: str) -> str:
    """Both axes logarithmic; the marked points are joined in order of x."""
    xs, ys = [point.x for point in points], [point.y for point in points]
    x_axis = Axis(x_label, min(xs) / 1.25, max(xs) * 1.25, True)
    canvas = Canvas(x_axis, Axis(y_label, min(ys) / 1.25, max(ys) * 1.25, True))
    canvas.frame()
    marked = sorted(canvas.place(point.x, point.y) for point in points if point.mark)
    if 1 < len(marked) <= _MAX_JOINED:
        canvas.parts.append(f'<polyline class="front" points="{" ".join(f"{x},{y}" for x, y in marked)}"/>')
    for point in sorted(points, key=lambda each: not each.dim):  # the front is drawn over the rest
        x, y = canvas.place(point.x, point.y)
        shape = f'<circle cx="{x}" cy="{y}" r="{4 if point.dim else 6.5}" fill="{point.color}"'
        canvas.parts.append(f"{shape}{' class=dim' if point.dim else ''}><title>{escape(point.title)}</title></circle>")
        if point.ring:
            canvas.parts.append(f'<circle class="ring" cx="{x}" cy="{y}" r="10"/>')
    for (x, y), mark in _joined(canvas, points):
        canvas.parts.append(f'<text class="mark" x="{x + 11}" y="{y - 8}">{escape(mark)}</text>')
    return canvas.svg(name, label)


def _joined(canvas: Canvas, points: Sequence[Point]) -> list[tuple[tuple[float, float], str]]:
    """Marks by place; points that lie on each other share a text, many of them only the first mark and a count."""
    found: list[tuple[tuple[float, float], list[str]]] = []
    for point in points:
        if point.mark:
            place = canvas.place(point.x, point.y)
            near = next((marks for other, marks in found if math.dist(other, place) < 30), None)
            if near is None:
                found.append((place, [point.mark]))
            else:
                near.append(point.mark)
    return [(at, ", ".join(marks) if len(marks) < 3 else f"{marks[0]} +{len(marks) - 1}") for at, marks in found]


def stacked_bar(name: str, label: str, bars: Sequence[Bar], total: float, unit: str) -> str:
    """One bar whose parts add up to `total`; what is left shows the ground. Labels inside where they fit."""
    width, height, gap = 1060, 62, 3.0
    parts, at = [f'<rect x="0" y="4" width="{width}" height="40" rx="8" fill="var(--grid)"/>'], 0.0
    for bar in bars:
        length = max(0.0, bar.value) / total * width
        if length > 0.5:
            inner = max(1.0, length - gap)
            title = f"<title>{escape(bar.label)}: {bar.value:.2f} {unit}</title>"
            shape = f'<rect x="{at:.1f}" y="4" width="{inner:.1f}" height="40" rx="6" fill="var(--c{bar.color})">'
            parts.append(f"{shape}{title}</rect>")
            if length > 90:
                text = f"{bar.label} {bar.value:.1f}"
                parts.append(f'<text class="onbar" x="{at + 12:.1f}" y="29">{escape(text)}</text>')
        at += length
    parts.append(f'<text x="{width}" y="60" text-anchor="end">{total:.1f} {unit} may be used</text>')
    legend = "".join(
        f'<span><i style="background:var(--c{bar.color})"></i>{escape(bar.label)} {bar.value:.2f} {unit}</span>'
        for bar in bars
    )
    return (
        f'<svg class="chart" data-chart="{name}" role="img" aria-label="{escape(label)}" '
        f'viewBox="0 0 {width} {height}">{"".join(parts)}</svg><div class="legend">{legend}</div>'
    )


def nice_step(rough: float) -> float:
    """The next of 1, 2, 5 x 10^n."""
    power = 10.0 ** math.floor(math.log10(max(rough, 1e-12)))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)


def short(value: float) -> str:
    """12000 -> 12k."""
    for limit, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:g}{suffix}"
    return f"{round(value, 6):g}"
